// Shares workspace between buffers over time.
#pragma once

#include "lower/data.h"

namespace tenon {

// Gives every workspace buffer a slot. A buffer that both passes use becomes a saved one.
void assign_slots(PlanData& d);

}  // namespace tenon
