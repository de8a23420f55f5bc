// The formula that is compiled for a step.
#pragma once

#include "backend/cpu/jit/vectors.h"
#include "expr/lower.h"
#include "step/step.h"

namespace tenon::cpu::jit {

// How a bf16 result of the step is rounded. In native precision a result of an approximated
// function may break a tie either way.
Rounding rounding_of(const Step& step, const Store& store);

// Roots: the values of the stores, then the totals. Nodes fma and abs may have a Negated form.
Lowered formula(const Step& step, bool wide);

}  // namespace tenon::cpu::jit
