// The float64 form of an op, by hand on doubles: what the results of plans are compared with. The
// runner is in tests/support.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tenon/activation.h"

namespace tenon {

struct OpCall;

struct Matrix64 {
  int64_t rows = 0, cols = 0;
  std::vector<double> v;

  [[nodiscard]] double* row(int64_t r) { return v.data() + r * cols; }
  [[nodiscard]] const double* row(int64_t r) const { return v.data() + r * cols; }
};

// A double with its derivatives by a few variables.
struct Dual {
  static constexpr size_t kMost = 6;
  double v = 0;
  std::array<double, kMost> d{};

  Dual(double value = 0) : v(value) {}  // NOLINT: a number has no derivative
  // Variable `number`.
  Dual(double value, size_t number) : v(value) { d[number] = 1; }
};
// f(a, b), given its partial derivatives.
inline Dual dual(double f, const Dual& a, double by_a, const Dual& b, double by_b) {
  Dual y(f);
  for (size_t i = 0; i < Dual::kMost; ++i) y.d[i] = by_a * a.d[i] + by_b * b.d[i];
  return y;
}
inline Dual operator+(const Dual& a, const Dual& b) { return dual(a.v + b.v, a, 1, b, 1); }
inline Dual operator-(const Dual& a, const Dual& b) { return dual(a.v - b.v, a, 1, b, -1); }
inline Dual operator*(const Dual& a, const Dual& b) { return dual(a.v * b.v, a, b.v, b, a.v); }
inline Dual operator/(const Dual& a, const Dual& b) {
  return dual(a.v / b.v, a, 1 / b.v, b, -a.v / (b.v * b.v));
}
inline Dual exp(const Dual& a) { return dual(std::exp(a.v), a, std::exp(a.v), 0, 0); }
// At a tie the derivative goes to the first, as in the words of formulas.
inline Dual max(const Dual& a, const Dual& b) { return a.v < b.v ? b : a; }
inline Dual min(const Dual& a, const Dual& b) { return b.v < a.v ? b : a; }

// One element of an elementwise op.
struct Point {
  std::span<const Dual> x, parameters, extras;
  std::function<double()> random_bits;  // 16 of them as a number
};

// One op while a chain runs in float64.
class Run64 {
 public:
  virtual ~Run64() = default;
  Matrix64 value;  // the op's input, to be made its output; in backward the gradients of those
  Matrix64 kept;   // of the forward pass for the backward pass

  [[nodiscard]] virtual const Matrix64& parameter(size_t number) const = 0;
  virtual void give_gradient(size_t parameter, Matrix64 gradient, int64_t length, double size) = 0;
  // The value is made of sums of so many terms, of that size if no terms cancel. Both bound how
  // far rounding moves it.
  virtual void sums(int64_t length, double size) = 0;
  // A number in [-1, 1] that moves a value by its rounding error; 0 in the exact run.
  virtual double noise() = 0;
  // The matrix as it may come back from storage in the chain's dtype, or in the recipe's format.
  enum class Stored : uint8_t { plain, input, weight, gradient };
  [[nodiscard]] virtual Matrix64 stored(Matrix64 m, Stored as) = 0;
  [[nodiscard]] virtual Matrix64 product(const Matrix64& a, const Matrix64& b) const = 0;
};

struct Float64 {
  // Of an elementwise op; the gradients follow by dual numbers.
  std::function<Dual(const OpCall&, const Point&)> element = {};
  // Of an activation: evaluate gives its formula in float64.
  Activation activation = {};
  // Of any other op, on whole matrices. Without one the op does nothing to the value.
  std::function<void(const OpCall&, Run64&)> forward = {}, backward = {};
};

inline Matrix64 zeros64(int64_t rows, int64_t cols) {
  return {rows, cols, std::vector<double>(static_cast<size_t>(rows * cols))};
}
Matrix64 transposed(const Matrix64& m);
double root_mean_square(const double* v, int64_t n);
double root_mean_square(const Matrix64& m);
// The sum over the rows; `size` is set to that of the sums if no terms cancel.
Matrix64 column_sums(const Matrix64& terms, double& size);

}  // namespace tenon
