// A chain in float64, op by op: the reference for the results of plans.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ops/float64.h"
#include "support/session.h"

namespace tenon::support {

// Key: name of the plan's buffer.
using Tensors64 = std::map<std::string, Matrix64>;

// A chain with its request and inputs: x, parameters, extra inputs, and for backward dy and the
// gradients of extra outputs.
struct Reference {
  Chain chain;
  PlanRequest request;
  RandomState random{};
  Tensors64 given;

  // Returns outputs, and gradients if the request has a backward pass. Values are not quantised. If
  // `noise` is not 0, every value that the plan may round gets random noise up to its rounding
  // error. The difference to the exact results is an estimate of the rounding error.
  [[nodiscard]] Tensors64 run(uint64_t noise = 0) const;
};

// Errors relative to the exact values: their root mean square, and the largest. The largest is
// relative to its element and to the root mean squares of its row and of the tensor.
struct Distance {
  double rms = 0, worst = 0;
  int64_t not_finite = 0;  // exact values that are NaN, infinite or outside of the format
  bool lost = false;       // exactly one of the two values is finite
};
Distance distance(const Matrix64& got, const Matrix64& exact, DType dtype);

// Valid numbers of rows of the chain are multiples of this.
int64_t least_rows(const Plan& plan);
// The approximate number of floating-point operations of `run` per row of the input.
double work_per_row(const Plan& plan);

}  // namespace tenon::support
