// The formula that is compiled for a step.
#pragma once

#include "backend/cpu/jit/vectors.h"
#include "expr/lower.h"
#include "step/step.h"

namespace tenon::cpu::jit {

// The words that a compiled formula has besides those of lower(): 2^x and 1/x of hardware.h, for
// AVX-512. A rough one errs by up to 2^-13.7.
[[nodiscard]] bool is_rough(const Node& n);

// How a bf16 result of the step is rounded. In native precision a result of an approximated
// function may break a tie either way.
Rounding rounding_of(const Step& step, const Store& store);

// Roots: the values of the stores, then the totals.
Lowered formula(const Step& step, bool wide);

}  // namespace tenon::cpu::jit
