// Activations as steps: forward and backward, with bias, scale, their gradients and amax.
#pragma once

#include <optional>
#include <string>

#include "lazy/halves.h"
#include "step/key.h"
#include "step/operand.h"
#include "step/step.h"
#include "tenon/activation.h"
#include "tenon/options.h"

namespace tenon {

// All that the step of an activation depends on besides. Operands without a value are absent.
struct ActivationForm {
  bool backward = false;
  int64_t cols = 0;  // of the output; a gated input has twice as many
  Layout layout;
  bool separate = false;  // a and b are two tensors
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
  Operand x;
  std::optional<Operand> b, grad;
  std::optional<Operand> y, db;  // y is the output, or dx
  std::optional<DType> bias, scale, dbias, dscale, amax;
  bool y_amax = false, db_amax = false;  // the amax of a tensor with one scale, beside it
  bool amax_only = false;                // only those: what `current` needs first
};

// Positions of a call's views; tensors take several.
struct ActivationArgs {
  enum In : uint32_t {
    x = 0,
    b = x + operand_inputs,
    grad = b + operand_inputs,
    bias = grad + operand_inputs,
    scale,
    y_scale,  // the multiplier or amax that encodes y
    db_scale,
    inputs
  };
  enum Out : uint32_t {
    y = 0,
    db = y + operand_outputs,
    dbias = db + operand_outputs,
    dscale,
    amax,
    y_amax,
    db_amax,
    outputs
  };
};

Step activation_step(const Activation& f, const ActivationForm& form);

// Equal for equal steps of one f.body; shorter to make than a step.
Key key(const Activation& f, const ActivationForm& form);

}  // namespace tenon
