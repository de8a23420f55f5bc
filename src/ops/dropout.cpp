// dropout(p): y = x·scale where 16 random bits reach the threshold, else 0.
#include "lazy/dropout.h"

#include <cmath>

#include "ops/op.h"

namespace tenon {

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
        return {Elementwise{
            [rule = dropout_rule(call.arguments.number("p"))](Element& e, std::span<const Expr> x) {
              return select(e.random() >= e.constant(rule.threshold), x[0] * e.constant(rule.scale),
                            0.0F);
            }}};
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
