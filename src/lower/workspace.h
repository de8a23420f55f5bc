// Places workspace buffers in memory that they share.
#pragma once

#include "lower/data.h"

namespace tenon {

// Assigns a slot to every workspace buffer, and finds saved memory for those of the backward pass.
// A buffer that both passes use becomes a saved buffer.
void place_workspace(PlanData& d);

}  // namespace tenon
