// The formula that is compiled for a step.
#pragma once

#include "backend/cpu/jit/vectors.h"
#include "expr/approximated.h"
#include "step/step.h"

namespace tenon::cpu::jit {

// How a bf16 result of the step is rounded. In native precision a result of an approximated
// function may break a tie either way.
Rounding rounding_of(const Step& step, const Store& store);

// Roots: the values of the stores, then the totals. Nodes fma and abs may have a Negated form.
// `ordinary`: the parameters are ordinary (vectors.h), and those of `positive` are positive.
Approximated formula(const Step& step, bool wide, bool ordinary);

}  // namespace tenon::cpu::jit
