// Any function of expressions as a step: broadcast arguments get summed gradients.
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
    std::optional<DType> gradient;  // backward: wanted in this dtype
  };
  std::string name;
  Function f;
  std::vector<Argument> arguments;
  size_t parameters = 0;      // further values of f, given by the call
  std::optional<DType> grad;  // backward if given: the dtype of the incoming gradient
  DType y = DType::f32;
  int64_t cols = 0;
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
};

// Views of a call: inputs are the arguments, then the incoming gradient; outputs are y, or one view
// an argument.
Step fuse_step(const FuseForm& form);

// Equal for equal steps of one f.
Key key(const FuseForm& form);

}  // namespace tenon
