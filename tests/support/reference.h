// A chain in float64, op by op: what the results of plans are compared with.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ops/float64.h"
#include "support/session.h"

namespace tenon::support {

// By the names of a plan's buffers.
using Tensors64 = std::map<std::string, Matrix64>;

// How a chain runs, and what it reads: x, parameters, extra inputs, and for backward dy and the
// gradients of extra outputs.
struct Reference {
  Chain chain;
  PlanRequest request;
  RandomState random{};
  Tensors64 given;

  // Outputs, and gradients where the request has a backward pass. Quantisation does nothing. With
  // a seed that is not 0, every value that the plan may round is moved at random by as much as its
  // format may move it: how far the results then lie from the exact ones is what rounding costs.
  [[nodiscard]] Tensors64 run(uint64_t noise = 0) const;
};

// Relative to the exact numbers: the root mean square of all errors, and the largest one, measured
// by its element and by the root mean squares of its row and of the tensor.
struct Distance {
  double rms = 0, worst = 0;
  int64_t not_finite = 0;  // of the exact ones, NaN, or outside of the format
  bool lost = false;       // one of the two is finite and the other is not
};
Distance distance(const Matrix64& got, const Matrix64& exact, DType dtype);

// Every number of rows that the chain takes is a multiple of this one.
int64_t least_rows(const Plan& plan);
// About how many floating-point operations `run` takes for one row of the input.
double work_per_row(const Plan& plan);

}  // namespace tenon::support
