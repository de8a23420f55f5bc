// The float64 oracle: exact values of a formula, each with its error bound E.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tenon/expr.h"

namespace tenon {

// The relative error that native precision allows a transcendental word. Strict precision allows
// only β.
double native_error(DType output);

// ulp of fp32 at |v|, at least 2^−149; 0 for infinities and NaN.
double ulp32(double v);

// Values of a formula and their bounds E at many points. An infinite E means no promise. Both
// vectors hold one array of n values per root.
struct Evaluation {
  std::vector<std::vector<double>> value, bound;
};

class Oracle {
 public:
  // `native` is 0 for strict precision, else the relative error of transcendental words.
  Oracle(const Graph& graph, std::span<const uint32_t> roots, double native);

  // loads[slot] points to n fp32 values. errors[slot] points to their error bounds, or is null if
  // they are exact. Row totals and products are not exact.
  [[nodiscard]] Evaluation run(size_t n, std::span<const float* const> loads,
                               std::span<const double* const> errors = {}) const;

 private:
  Graph graph_;
  std::vector<uint32_t> roots_, nodes_;
  double native_;
};

// Whether `result`, an element of `dtype` decoded to fp32, is correct for an exact value with bound
// E (1 % slack): some value within E must round to it.
bool within(float result, DType dtype, double exact, double bound);

// Rounds to nearest even in any format, by float64 arithmetic alone. Overflow gives infinity, or
// the largest value if the format saturates.
double nearest(double v, DType dtype);

}  // namespace tenon
