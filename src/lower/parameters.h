// Parameters, their gradients, and the formats of operands.
#pragma once

#include <string>

#include "lower/flow.h"

namespace tenon {

// A parameter of an op: a row vector or a weight, and its gradient if it is needed.
struct ParameterTensor {
  const StoredTensor* value = nullptr;
  const StoredTensor* grad = nullptr;
  GradRequest request;

  static ParameterTensor make(Planner& planner, const std::string& name, int64_t rows, int64_t cols,
                              const Initial& initial);
};

// Stores the column sum of `v` in the gradient of a parameter.
void sum_into(Planner& planner, Flow& flow, size_t op, const ParameterTensor& p, const Value& v,
              bool ordered);

// True if products along the columns need a columnwise encoding: its codes differ from the rowwise
// ones, or the target multiplies codes only along contiguous memory.
bool two_encodings(const Planner& planner, const Format& f);

// An operand with the encodings that its products need.
// The encoding of an operand of a product: in `f` if it has a scaling mode, else in the dtype of
// the chain.
Operand operand(const Planner& planner, const Format& f, bool row, bool column);
Operand encoded(const Planner& planner, const Format& f, bool row, bool column);

}  // namespace tenon
