// Float64 values of expressions at one or many points, for the tests of formulas.
#pragma once

#include <span>
#include <vector>

#include "expr/evaluate.h"
#include "tenon/expr.h"

namespace tenon::test {

// columns[slot][i] is load `slot` at point i. All columns have the same length.
inline std::vector<double> values(Graph& graph, Expr e,
                                  const std::vector<std::vector<float>>& columns) {
  const uint32_t root = graph.id(e);
  std::vector<const float*> loads;
  for (const auto& c : columns) loads.push_back(c.data());
  const size_t n = columns.empty() ? 1 : columns[0].size();
  return Oracle(graph, std::span(&root, 1), 0).run(n, loads).value[0];
}

inline double value(Graph& graph, Expr e, std::initializer_list<float> loads) {
  std::vector<std::vector<float>> columns;
  for (const float v : loads) columns.push_back({v});
  return values(graph, e, columns)[0];
}

}  // namespace tenon::test
