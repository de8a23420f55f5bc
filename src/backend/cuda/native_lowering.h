// The first step of native precision; native.h has the rest.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cuda/native.h"

namespace tenon::cuda {

struct Approximated {
  Lowered formula;
  std::vector<uint32_t> positive;  // single loads that it wants positive
};
// Words may err by `error`, relative to their results. Only where `loads` says which of them are
// single the host may be asked for what a slope needs of those.
Approximated approximated(const Graph& graph, std::span<const uint32_t> roots, double error,
                          const std::vector<Loaded>& loads);

}  // namespace tenon::cuda
