// bias(n): y = x + b, with one value of b per column.
#include "ops/formulas.h"
#include "ops/op.h"

namespace tenon {

Formula bias_formula() {
  return [](Element& e, std::span<const Expr> x) { return x[0] + e.parameter(0); };
}

OpSchema bias_op() {
  return {
      .name = "bias",
      .summary = "y = x + b",
      .arguments = {columns("n")},
      .parameters = {{.name = "bias"}},
      .forward = [](const OpCall&) { return std::vector<Extension>{Elementwise{bias_formula()}}; },
      .float64 = {.element = [](const OpCall&,
                                const Point& p) { return p.x[0] + p.parameters[0]; }},
  };
}

}  // namespace tenon
