// The variables that a formula and its gradients read, found once on a separate graph.
#pragma once

#include <cstddef>
#include <vector>

#include "lazy/extension.h"

namespace tenon {

// A number with a gradient that a formula reads.
struct Variable {
  enum class Kind : uint8_t { input, parameter, extra };
  Kind kind;
  size_t number;

  friend bool operator==(const Variable&, const Variable&) = default;
};

struct Trace {
  struct Gradient {
    bool seed = false;           // the gradient equals the incoming gradient
    std::vector<bool> mentions;  // by variable: the gradient reads it
  };

  std::vector<Variable> variables;  // the inputs, then the others in the order of first use
  std::vector<Gradient> gradients;  // by variable
  bool identity = false;            // the formula returns its first input
  bool random = false;              // the formula reads random bits

  [[nodiscard]] size_t at(Variable::Kind kind, size_t number) const;  // index in `variables`
  [[nodiscard]] bool reads(Variable::Kind kind, size_t number) const {
    return at(kind, number) < variables.size();
  }
};

Trace trace(const Formula& formula, size_t inputs);

}  // namespace tenon
