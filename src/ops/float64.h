// The float64 form of an op, written by hand on doubles: the reference for the results of plans.
// The runner is in tests/support.
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

// A double with its derivatives by up to kMost variables.
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
// On a tie the derivative goes to the first argument, as in formulas.
inline Dual max(const Dual& a, const Dual& b) { return a.v < b.v ? b : a; }
inline Dual min(const Dual& a, const Dual& b) { return b.v < a.v ? b : a; }

// One element of an elementwise op.
struct Point {
  std::span<const Dual> x, parameters, extras;
  std::function<double()> random_bits;  // 16 random bits as a number
};

// The state of one op during a float64 run of a chain.
class Run64 {
 public:
  virtual ~Run64() = default;
  Matrix64 value;  // in: the op's input, out: its output; backward: their gradients
  Matrix64 kept;   // saved by the forward pass for the backward pass

  [[nodiscard]] virtual const Matrix64& parameter(size_t number) const = 0;
  virtual void give_gradient(size_t parameter, Matrix64 gradient, int64_t length, double size) = 0;
  // Declares that the value consists of sums of `length` terms. `size` is their magnitude without
  // cancellation. Both bound the rounding error of the value.
  virtual void sums(int64_t length, double size) = 0;
  // A number in [-1, 1] that scales the rounding error added to a value. 0 in the exact run.
  virtual double noise() = 0;
  // The matrix after a possible round trip through storage, in the chain's dtype or the recipe's
  // format.
  enum class Stored : uint8_t { plain, input, weight, gradient };
  [[nodiscard]] virtual Matrix64 stored(Matrix64 m, Stored as) = 0;
  [[nodiscard]] virtual Matrix64 product(const Matrix64& a, const Matrix64& b) const = 0;
};

struct Float64 {
  // Set for an elementwise op. Dual numbers give its gradients.
  std::function<Dual(const OpCall&, const Point&)> element = {};
  // Set for an activation: `evaluate` computes its formula in float64.
  Activation activation = {};
  // Set for any other op, on whole matrices. Without them the op does not change the value.
  std::function<void(const OpCall&, Run64&)> forward = {}, backward = {};
};

inline Matrix64 zeros64(int64_t rows, int64_t cols) {
  return {rows, cols, std::vector<double>(static_cast<size_t>(rows * cols))};
}
Matrix64 transposed(const Matrix64& m);
double root_mean_square(const double* v, int64_t n);
double root_mean_square(const Matrix64& m);
// The sums over the rows. Sets `size` to their magnitude without cancellation.
Matrix64 column_sums(const Matrix64& terms, double& size);

}  // namespace tenon
