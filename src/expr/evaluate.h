// The float64 oracle: exact values of a formula, with the running error bound E beside them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tenon/expr.h"

namespace tenon {

// Relative error that native precision allows a transcendental word; strict allows none beyond β.
double native_error(DType output);

// ulp of fp32 at |v|, at least 2^−149; 0 for infinities and NaN.
double ulp32(double v);

// The formula's value and E at many points; where E is infinite, nothing is promised. Both vectors
// hold one array of n for each root.
struct Evaluation {
  std::vector<std::vector<double>> value, bound;
};

class Oracle {
 public:
  // `native` = 0 for strict precision, else the relative error of transcendental words.
  Oracle(const Graph& graph, std::span<const uint32_t> roots, double native);

  // loads[slot] points to n fp32 numbers, errors[slot] to the bounds of those that are not exact
  // (row totals, products), or is null.
  [[nodiscard]] Evaluation run(size_t n, std::span<const float* const> loads,
                               std::span<const double* const> errors = {}) const;

 private:
  Graph graph_;
  std::vector<uint32_t> roots_, nodes_;
  double native_;
};

// Whether `result`, an element of `dtype` decoded to fp32, is a right answer for an exact value
// with bound E (1 % slack): some number within E rounds to it.
bool within(float result, DType dtype, double exact, double bound);

// Nearest even in any format by float64 arithmetic alone; overflow becomes infinity, or the largest
// number where the format saturates.
double nearest(double v, DType dtype);

}  // namespace tenon
