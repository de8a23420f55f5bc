// The first step of native precision: replaces functions by those of hardware.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "expr/lower.h"

namespace tenon {

// The kind of a load. pairs: bf16 values; two at a time can be compared with constants, in half as
// many instructions. single: one value for all elements.
enum class Loaded : uint8_t { otherwise, pairs, single };

struct Approximated {
  Lowered formula;
  std::vector<uint32_t> positive;  // single loads that must be positive
};
// Functions may err by `error`, relative to their results. If `loads` marks single loads, the host
// may compute values of slopes from them.
Approximated approximated(const Graph& graph, std::span<const uint32_t> roots, double error,
                          const std::vector<Loaded>& loads);

}  // namespace tenon
