// rmsnorm(n): y = x·rsqrt(mean of x² + eps)·gamma.
#include "ops/norms.h"

namespace tenon {

OpSchema rmsnorm_op() {
  return {
      .name = "rmsnorm",
      .summary = "y = x·rsqrt(mean of x² + eps)·gamma, by rows",
      .arguments = {columns("n"), eps_argument(1e-5), flag("zero_centered_gamma", false)},
      .parameters = {gamma_parameter()},
      .forward = normalise<NormKind::rms>,
      .float64 = norm_float64(NormKind::rms),
  };
}

}  // namespace tenon
