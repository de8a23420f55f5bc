// Native precision on the GPU: words by the processor's own approximations.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tenon/expr.h"

namespace tenon::cuda {

// The statements of print() for formulas whose words may err as native precision allows. A formula
// without such words has the strict bits, but for subnormal quotients.
std::string native_lines(const Graph& graph, std::span<const uint32_t> roots);

}  // namespace tenon::cuda
