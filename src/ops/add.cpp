// add: y = extra + x, a residual.
#include "ops/formulas.h"
#include "ops/op.h"

namespace tenon {

Formula add_formula() {
  return [](Element& e, std::span<const Expr> x) { return e.extra(0) + x[0]; };
}

OpSchema add_op() {
  return {
      .name = "add",
      .summary = "y = extra + x; the extra input is a tensor of the caller's or a channel",
      .extra_inputs = {{.name = "extra"}},
      .forward = [](const OpCall&) { return std::vector<Extension>{Elementwise{add_formula()}}; },
      .float64 = {.element = [](const OpCall&, const Point& p) { return p.x[0] + p.extras[0]; }},
  };
}

}  // namespace tenon
