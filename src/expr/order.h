// The nodes that the roots depend on, children first. The order does not depend on how the graph
// was built.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tenon/expr.h"

namespace tenon {

std::vector<uint32_t> order(const Graph& graph, std::span<const uint32_t> roots);

}  // namespace tenon
