// Activations as steps: forward and backward, with bias, scale, their gradients and amax.
#pragma once

#include <optional>

#include "step/step.h"
#include "tenon/activation.h"
#include "tenon/options.h"

namespace tenon {

// All that the step depends on. Views without a dtype here are absent.
struct ActivationForm {
  Activation f;
  bool backward = false;
  int64_t cols = 0;  // of the output; a gated input has twice as many
  Layout layout;
  bool separate = false;  // a and b are two tensors
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
  DType x = DType::f32;
  std::optional<DType> b, bias, scale, grad;
  std::optional<DType> y;  // the output, or dx
  std::optional<DType> db, dbias, dscale, amax;
};

// Positions of a call's views.
struct ActivationArgs {
  enum In : uint32_t { x, b, bias, scale, grad, inputs };
  enum Out : uint32_t { y, db, dbias, dscale, amax, outputs };
};

Step activation_step(const ActivationForm& form);

}  // namespace tenon
