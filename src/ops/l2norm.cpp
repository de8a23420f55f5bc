// l2norm: y = x·rsqrt(sum of x² + eps).
#include "ops/norms.h"

namespace tenon {

OpSchema l2norm_op() {
  return {
      .name = "l2norm",
      .summary = "y = x·rsqrt(sum of x² + eps), by rows",
      .arguments = {eps_argument(1e-6)},
      .forward = normalise<NormKind::l2>,
      .float64 = norm_float64(NormKind::l2),
  };
}

}  // namespace tenon
