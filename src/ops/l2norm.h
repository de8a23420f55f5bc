// The L2 normalisation of rows as map steps: y = x·r, r = rsqrt(Σ x² + eps).
#pragma once

#include "step/step.h"
#include "tenon/options.h"

namespace tenon {

struct L2Form {
  int64_t cols = 0;
  DType x = DType::f32, y = DType::f32, grad = DType::f32;  // y is dx in the backward pass
  Options options;
};

Step l2_square_sum(const L2Form& form);   // x -> Σ x² a row
Step l2_rsqrt(const L2Form& form);        // s -> rsqrt(s + eps); eps is parameter 0
Step l2_scale(const L2Form& form);        // x, r -> y
Step l2_product_sum(const L2Form& form);  // x, grad -> Σ x·grad a row
Step l2_backward(const L2Form& form);     // grad, x, r, t -> dx = r·(grad − x·r²·t)

}  // namespace tenon
