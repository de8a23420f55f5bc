// The first step of native precision: replaces functions by approximations. native.h has the rest.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cuda/native.h"

namespace tenon::cuda {

struct Approximated {
  Lowered formula;
  std::vector<uint32_t> positive;  // single loads that must be positive
};
// Functions may err by `error`, relative to their results. If `loads` marks single loads, the host
// may compute values of slopes from them.
Approximated approximated(const Graph& graph, std::span<const uint32_t> roots, double error,
                          const std::vector<Loaded>& loads);

}  // namespace tenon::cuda
