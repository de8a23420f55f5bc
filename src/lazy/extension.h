// What an op may say: how it extends a lazy value. The lowering derives the backward pass from it.
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

// The numbers of one element that a formula reads besides its inputs.
class Element {
 public:
  virtual ~Element() = default;
  virtual Expr parameter(size_t number) = 0;  // of the op's row vectors: the element's column
  virtual Expr extra(size_t number) = 0;      // of the op's extra inputs
  virtual Expr random() = 0;                  // 16 random bits as a number
  virtual Expr constant(float value) = 0;     // a kernel argument: a new value compiles nothing
};
using Formula = std::function<Expr(Element&, std::span<const Expr> inputs)>;

// value := formula(value), or formula(a, b) of its two halves.
struct Elementwise {
  Formula formula;
  std::optional<Layout> halves = {};
};

// value := (value − mean)·rstdev·gamma + beta by rows. Parameter 0 is gamma, parameter 1 beta, as
// far as the kind has them.
struct Normalised {
  NormKind kind;
  float eps;
  bool zero_centered_gamma = false;
};

// value := value·wᵀ; w is parameter 0, one row for each column of the result.
struct Multiplied {};

// value := the same numbers in rows of another length.
struct Reshaped {};

// value := what the recipe's encoding of it reads back as.
struct Quantised {};

// The value also goes to the op's extra output.
struct Shared {};

// value := what the ranks of a group make of it.
struct Exchanged {
  enum class Kind : uint8_t { none, all_reduce, all_gather, reduce_scatter };
  Kind forward, backward;
};

using Extension =
    std::variant<Elementwise, Normalised, Multiplied, Reshaped, Quantised, Shared, Exchanged>;

}  // namespace tenon
