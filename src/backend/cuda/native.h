// Native precision on the GPU: words by the processor's own approximations.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tenon/expr.h"

namespace tenon::cuda {

// The statements of print() for formulas whose words may err by `error`, relative to their results.
// A formula without such words has the strict bits, but for subnormal quotients.
std::string native_lines(const Graph& graph, std::span<const uint32_t> roots, double error);

}  // namespace tenon::cuda
