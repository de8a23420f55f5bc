// Norms of rows as one step each: LayerNorm, RMSNorm, L2 normalisation, forward and backward.
#pragma once

#include <optional>

#include "lazy/norm.h"
#include "step/key.h"
#include "step/operand.h"
#include "step/step.h"
#include "tenon/options.h"

namespace tenon {

// Everything that the steps depend on. Operands without a value are absent. eps is parameter 0 of
// the forward step. The backward step reads the saved statistics.
struct NormForm {
  NormKind kind = NormKind::rms;
  int64_t cols = 0;
  bool zero_centered_gamma = false;  // the factor is gamma + 1
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
  Operand x;
  std::optional<Operand> residual;    // forward: added to x before the norm
  std::optional<DType> gamma, beta;   // l2 has neither
  std::optional<Operand> y;           // backward: dx
  std::optional<Operand> sum;         // forward: x + residual, stored
  bool mean = false, rstdev = false;  // forward: statistics to save, one f32 value per row
  bool y_amax = false;                // also store the amax of a tensor with one scale
  bool amax_only = false;             // store only the amax: first pass of `current` scaling
  // Backward: the incoming gradient, a gradient to add to dx, and the ordered sums over the rows.
  Operand grad;
  std::optional<Operand> added;
  std::optional<DType> dgamma, dbeta;
};

// Positions of a call's views. A tensor uses several positions.
struct NormArgs {
  enum In : uint32_t {
    x = 0,
    residual = x + operand_inputs,
    grad = residual + operand_inputs,
    added = grad + operand_inputs,
    gamma = added + operand_inputs,
    beta,
    mean_in,  // backward: the saved statistics
    rstdev_in,
    y_scale,  // the multiplier or amax that encodes y
    sum_scale,
    inputs
  };
  enum Out : uint32_t {
    y = 0,
    sum = y + operand_outputs,
    mean = sum + operand_outputs,
    rstdev,
    dgamma,
    dbeta,
    y_amax,
    outputs
  };
};

// y = (x − mean)·rstdev·gamma + beta with mean = Σx/n and rstdev = rsqrt(Σ(x − mean)²/n + eps). rms
// has no mean. l2: y = x·rsqrt(Σx² + eps).
Step norm_step(const NormForm& form);

// With w = grad·gamma and x̂ = (x − mean)·rstdev: dx = rstdev·(w − Σw/n − x̂·(Σw·x̂/n)), dgamma = Σ
// grad·x̂ and dbeta = Σ grad over the rows. rms has no Σw. l2: dx = r·(grad − x·r²·Σx·grad).
Step norm_backward_step(const NormForm& form);

// Equal for equal steps of one direction.
Key key(const NormForm& form, bool backward);

}  // namespace tenon
