// Activations as parts of formulas that a test or a benchmark builds by hand.
#pragma once

#include <vector>

#include "tenon/activation.h"

namespace tenon::support {

// f(x), or f(x, b) of a gated one, with the parameters' defaults.
inline Expr call(const char* name, Expr x, Expr b = {}) {
  const Activation f = activation(name);
  std::vector<Expr> values;
  for (const Parameter& p : f.parameters) values.emplace_back(p.value);
  return f.body({.x = x, .a = x, .b = b, .parameters = f.parameters, .values = values});
}

}  // namespace tenon::support
