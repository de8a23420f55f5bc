// Adds a finished step to its pass, with the kernels that it needs.
#pragma once

#include "lower/planner.h"

namespace tenon {

// The target that the request names. If it names none, the target of its device.
const Target& target_of(const PlanRequest& request);

// If the best maker splits the step, adds two steps with workspace between them. Throws if every
// maker refuses the step.
void append(Planner& planner, Pass pass, PlanStep step);

}  // namespace tenon
