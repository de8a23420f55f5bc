// Parameters with their gradients, and formats of operands.
#pragma once

#include <string>

#include "lower/flow.h"

namespace tenon {

// A parameter of an op: a row vector or a weight, and its gradient if it is wanted.
struct ParameterTensor {
  const StoredTensor* value = nullptr;
  const StoredTensor* grad = nullptr;
  GradRequest request;

  static ParameterTensor make(Planner& planner, const std::string& name, int64_t rows, int64_t cols,
                              const Initial& initial);
};

// The column sum of a gradient into a parameter's gradient.
void sum_into(Planner& planner, Flow& flow, size_t op, const ParameterTensor& p, const Value& v,
              bool ordered);

// Whether the two encodings of a format hold different codes, so that each product needs its own.
bool differs(const Format& f);

// An operand with the encodings that its products need.
Operand encoded(const Format& f, bool row, bool column);

}  // namespace tenon
