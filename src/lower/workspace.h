// Assigns shared workspace slots to buffers.
#pragma once

#include "lower/data.h"

namespace tenon {

// Assigns a slot to every workspace buffer. A buffer that both passes use becomes a saved buffer.
void assign_slots(PlanData& d);

}  // namespace tenon
