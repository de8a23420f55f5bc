// Calls of activations in formulas that a test or a benchmark builds.
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

}  // namespace tenon::support
