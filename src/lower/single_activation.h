// Activations as steps: forward and backward, with bias, scale, their gradients and amax.
#pragma once

#include <optional>
#include <string>

#include "step/key.h"
#include "step/operand.h"
#include "step/step.h"
#include "tenon/activation.h"
#include "tenon/options.h"

namespace tenon {

// Everything else that the step of an activation depends on. Operands without a value are absent.
struct ActivationForm {
  bool backward = false;
  int64_t cols = 0;  // of the output; a gated input has 2·cols
  Layout layout;
  bool separate = false;  // a and b are two tensors
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
  Operand x;
  std::optional<Operand> b, grad;
  std::optional<Operand> y, db;  // y is the output (backward: dx)
  std::optional<DType> bias, scale, dbias, dscale, amax;
  bool y_amax = false, db_amax = false;  // also store the amax of a tensor with one scale
  bool amax_only = false;                // store only the amax: first pass of `current` scaling
};

// Positions of a call's views. A tensor uses several positions.
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

// Equal for equal steps of one f.body. Computing the key is faster than building the step.
Key key(const Activation& f, const ActivationForm& form);

}  // namespace tenon
