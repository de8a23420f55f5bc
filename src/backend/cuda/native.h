// Native precision on the GPU: words by the processor's own approximations.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tenon/expr.h"

namespace tenon::cuda {

// The statements of print() for formulas whose words may err by `error`, relative to their results.
// A formula without such words has the strict bits, but for subnormal quotients.
std::string native_lines(const Graph& graph, std::span<const uint32_t> roots, double error);

// The same for in[load][0 … 7]: `ready` changes them first, and `lines` follow for each element.
struct EightLines {
  std::string ready, lines;
};
// `pairs`: which loads are bf16 numbers as they lie in memory. Comparing those with constants takes
// half as many instructions.
EightLines native_eight(const Graph& graph, std::span<const uint32_t> roots, double error,
                        const std::vector<bool>& pairs);

}  // namespace tenon::cuda
