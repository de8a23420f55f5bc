// scale(c): y = x·c.
#include "ops/op.h"

namespace tenon {

OpSchema scale_op() {
  return {
      .name = "scale",
      .summary = "y = x·c",
      .arguments = {{.name = "c", .missing = "it has no factor; write scale(0.5)"}},
      .forward =
          [](const OpCall& call) {
            const auto factor = static_cast<float>(call.arguments.number("c"));
            return std::vector<Extension>{
                Elementwise{[factor](Element& e, std::span<const Expr> x) {
                  return x[0] * e.constant(factor);
                }}};
          },
      .float64 = {.element =
                      [](const OpCall& call, const Point& p) {
                        return p.x[0] * static_cast<float>(call.arguments.number("c"));
                      }},
  };
}

}  // namespace tenon
