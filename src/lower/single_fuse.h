// Any function of expressions as a step. Gradients of broadcast arguments are summed.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "step/key.h"
#include "step/step.h"
#include "tenon/options.h"

namespace tenon {

using Function = std::function<Expr(std::span<const Expr>)>;

struct FuseForm {
  struct Argument {
    Load::From from = Load::From::tile;
    DType dtype = DType::f32;
    std::optional<DType> gradient;  // backward: dtype of the gradient, if it is needed
  };
  std::string name;
  Function f;
  std::vector<Argument> arguments;
  size_t parameters = 0;      // number of further scalar arguments of f, passed by the call
  std::optional<DType> grad;  // if set, the step is backward: the dtype of the incoming gradient
  DType y = DType::f32;
  int64_t cols = 0;
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
};

// Views of a call. Inputs: the arguments, then the incoming gradient. Outputs: y, or one view per
// argument.
Step fuse_step(const FuseForm& form);

// Equal for equal steps of one f.
Key key(const FuseForm& form);

}  // namespace tenon
