// The results that are not tiles: what items leave behind, and what is done with it after them.
#pragma once

#include "backend/cpu/grid.h"
#include "backend/cpu/leftovers.h"
#include "step/backend.h"

namespace tenon::cpu {

// Floats of workspace that the parts of all sums take.
size_t leftover_floats(const Step& step, const Grid& grid);
// Nothing left behind yet; `memory` holds leftover_floats.
Leftovers no_leftovers(const Step& step, const Grid& grid, float* memory);
// Joins the items' parts and writes the results.
void finish(const Step& step, const Loops& loops, const RunArgs& args, const Grid& grid,
            const Leftovers& left);

}  // namespace tenon::cpu
