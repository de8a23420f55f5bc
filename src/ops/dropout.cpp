// dropout(p): y = x·scale if 16 random bits are at least the threshold, else 0.
#include <cmath>

#include "ops/formulas.h"
#include "ops/op.h"

namespace tenon {

Formula dropout_formula(const DropoutRule& rule) {
  return [rule](Element& e, std::span<const Expr> x) {
    const Expr bits = e.random(), threshold = e.constant(rule.threshold);
    const Expr scale = e.constant(rule.scale);
    return select(bits >= threshold, x[0] * scale, 0.0F);
  };
}

OpSchema dropout_op() {
  return {
      .name = "dropout",
      .summary = "from the plan's random state; identity in evaluation",
      .arguments = {{.name = "p",
                     .least = 0,
                     .most = 1,
                     .missing = "it has no probability; write dropout(0.1)"}},
      .forward = [](const OpCall& call) -> std::vector<Extension> {
        if (!call.training) return {};
        return {Elementwise{dropout_formula(dropout_rule(call.arguments.number("p")))}};
      },
      .float64 = {.element = [](const OpCall& call, const Point& p) -> Dual {
        if (!call.training) return p.x[0];
        const double threshold = std::nearbyint(65536 * call.arguments.number("p"));
        if (p.random_bits() < threshold) return 0;
        return p.x[0] * static_cast<float>(65536 / (65536 - threshold));
      }},
  };
}

}  // namespace tenon
