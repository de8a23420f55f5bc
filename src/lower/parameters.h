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

  // `encoding` is set if the parameter comes encoded.
  static ParameterTensor make(Planner& planner, const std::string& name, int64_t rows, int64_t cols,
                              const Initial& initial, const std::optional<GivenEncoding>& encoding);
};

// Stores the column sum of `v` in the gradient of a parameter.
void sum_into(Planner& planner, Flow& flow, size_t op, const ParameterTensor& p, const Value& v,
              bool ordered);

// Whether a product along the columns of a tensor in `f` reads its columnwise encoding. `other` is
// the format of the other operand.
bool reads_columnwise(const Planner& planner, const Format& f, const Format& other);

// A tensor in `f`, or in the dtype of the chain if `f` has no scaling mode. It has the columnwise
// encoding if `column` is set, and the rowwise one otherwise or if `row` is set.
Operand operand(const Planner& planner, const Format& f, bool row, bool column);
// A tensor that the caller gives in this encoding.
Operand operand(const GivenEncoding& given);

}  // namespace tenon
