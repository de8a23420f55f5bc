// The final pass over partial results of the items: sums, amaxes and counts.
#pragma once

#include "backend/cpu/grid.h"
#include "backend/cpu/leftovers.h"
#include "step/backend.h"

namespace tenon::cpu {

// Size of the partial results of all sums in the workspace, in floats.
size_t leftover_floats(const Step& step, const Grid& grid);
// Empty partial results. `memory` holds leftover_floats floats.
Leftovers no_leftovers(const Step& step, const Grid& grid, float* memory);
// Joins the partial results of the items and writes the outputs.
void finish(const Step& step, const Loops& loops, const RunArgs& args, const Grid& grid,
            const Leftovers& left);

}  // namespace tenon::cpu
