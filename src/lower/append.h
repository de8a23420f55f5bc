// A finished step joins its pass with the kernels that it needs.
#pragma once

#include "lower/planner.h"

namespace tenon {

// The target that a request names, or that of its device.
const Target& target_of(const PlanRequest& request);

// Two steps with workspace between them where the best maker does it so. Throws where no maker
// takes the step.
void append(Planner& planner, Pass pass, PlanStep step);

}  // namespace tenon
