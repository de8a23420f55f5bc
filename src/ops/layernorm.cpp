// layernorm(n): y = (x − mean)·rstdev·gamma + beta.
#include "ops/norms.h"

namespace tenon {

OpSchema layernorm_op() {
  return {
      .name = "layernorm",
      .summary = "y = (x − mean)·rstdev·gamma + beta, by rows",
      .arguments = {columns("n"), eps_argument(1e-5), flag("zero_centered_gamma", false)},
      .parameters = {gamma_parameter(), {.name = "beta"}},
      .forward = normalise<NormKind::layer>,
      .float64 = norm_float64(NormKind::layer),
  };
}

}  // namespace tenon
