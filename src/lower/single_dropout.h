// residual + dropout(x + bias) as a step, and its derived backward step.
#pragma once

#include <optional>

#include "lazy/dropout.h"
#include "step/key.h"
#include "step/step.h"
#include "tenon/options.h"

namespace tenon {

struct DropoutForm {
  bool training = true;
  int64_t cols = 0;
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
  DType chain = DType::f32;             // `eager` rounds to it between ops
  DType x = DType::f32;                 // backward: the incoming gradient
  std::optional<DType> bias, residual;  // backward: their gradients
  std::optional<DType> y;               // backward: dx
};

// Inputs x, bias, residual; output y. Backward: input grad; outputs dx, dbias, dresidual. The
// parameters are those of DropoutRule, in training only.
Step dropout_step(const DropoutForm& form);
Step dropout_backward_step(const DropoutForm& form);

// Equal for equal steps of one direction.
Key key(const DropoutForm& form, bool backward);

}  // namespace tenon
