// Calls of activations in formulas that a test or a benchmark builds, and properties of formulas.
#pragma once

#include <vector>

#include "tenon/activation.h"

namespace tenon::support {

// f(x), or f(x, b) for a gated f, with default parameters.
inline Expr call(const char* name, Expr x, Expr b = {}) {
  const Activation f = activation(name);
  std::vector<Expr> values;
  for (const Parameter& p : f.parameters) values.emplace_back(p.value);
  return f.body({.x = x, .a = x, .b = b, .parameters = f.parameters, .values = values});
}

// Whether the value of node `root` depends on the load `slot` other than through a comparison.
inline bool depends(const Graph& graph, uint32_t root, uint32_t slot) {
  std::vector<bool> used(root + 1);
  used[root] = true;
  for (uint32_t id = root + 1; id-- > 0;) {  // children come before their parents
    if (!used[id]) continue;
    const Node& n = graph[id];
    if (n.word == Word::load && n.slot == slot) return true;
    for (int i = n.word == Word::select ? 2 : 0; i < n.arity(); ++i)
      used[n.in[static_cast<size_t>(i)]] = true;
  }
  return false;
}

}  // namespace tenon::support
