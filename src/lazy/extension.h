// The ways in which an op can extend a lazy value. The lowering derives the backward pass from
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <variant>

#include "lazy/norm.h"
#include "step/step.h"
#include "tenon/options.h"

namespace tenon {

// The numbers of one element that a formula reads in addition to its inputs.
class Element {
 public:
  virtual ~Element() = default;
  virtual Expr parameter(size_t number) = 0;  // row vector of the op, at the column of the element
  virtual Expr extra(size_t number) = 0;      // extra input of the op
  virtual Expr random() = 0;                  // 16 random bits as a number
  // A kernel argument: a new value does not recompile the kernel.
  virtual Expr constant(float value) = 0;
};
using Formula = std::function<Expr(Element&, std::span<const Expr> inputs)>;

// value := formula(value), or formula(a, b) of its two halves.
struct Elementwise {
  Formula formula;
  std::optional<Layout> halves = {};
};

// value := (value − mean)·rstdev·gamma + beta, by rows. Parameter 0 is gamma and parameter 1 is
// beta, if the kind has them.
struct Normalised {
  NormKind kind;
  float eps;
  bool zero_centered_gamma = false;
};

// value := value·wᵀ. w is parameter 0. It has one row per column of the result.
struct Multiplied {
  // Products of FP8 operands may be summed with fewer bits than fp32 has.
  bool fast = false;
};

// value := the same elements in rows of another length.
struct Reshaped {};

// value := the value after a round trip through the recipe's encoding.
struct Quantised {};

// The value is also written to the op's extra output.
struct Shared {};

// value := the result of a collective over the ranks of a group.
struct Exchanged {
  enum class Kind : uint8_t { none, all_reduce, all_gather, reduce_scatter };
  Kind forward, backward;
};

using Extension =
    std::variant<Elementwise, Normalised, Multiplied, Reshaped, Quantised, Shared, Exchanged>;

}  // namespace tenon
