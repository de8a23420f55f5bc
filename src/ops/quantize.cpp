// quantize: the value after a round trip through the recipe's encoding.
#include "ops/op.h"

namespace tenon {

OpSchema quantize_op() {
  return {
      .name = "quantize",
      .summary = "the value in the recipe's format; the gradient in the format of gradients",
      .arguments = {recipe_argument()},
      .forward = [](const OpCall&) { return std::vector<Extension>{Quantised{}}; },
      .float64 = {
          .forward = [](const OpCall&,
                        Run64& r) { r.value = r.stored(std::move(r.value), Run64::Stored::input); },
          .backward =
              [](const OpCall&, Run64& r) {
                r.value = r.stored(std::move(r.value), Run64::Stored::gradient);
              }},
  };
}

}  // namespace tenon
