// Limits of the built-in activations: required NaN, forbidden NaN, and results at infinities.
#pragma once

#include <array>
#include <cmath>
#include <string_view>

#include "function.h"

namespace tenon::accuracy {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The value and derivative at −∞ and +∞.
struct Ends {
  std::string_view name;
  std::array<float, 2> value, derivative;
};
inline constexpr std::array<Ends, 13> kEnds{{
    {"gelu", {0, kInfinity}, {0, 1}},
    {"gelu_erf", {0, kInfinity}, {0, 1}},
    {"silu", {0, kInfinity}, {0, 1}},
    {"qgelu", {0, kInfinity}, {0, 1}},
    {"relu", {0, kInfinity}, {0, 1}},
    {"srelu", {0, kInfinity}, {0, kInfinity}},
    {"sigmoid", {0, 1}, {0, 0}},
    {"tanh", {-1, 1}, {0, 0}},
    {"softplus", {0, kInfinity}, {0, 1}},
    {"mish", {0, kInfinity}, {0, 1}},
    {"hardswish", {0, kInfinity}, {0, 1}},
    {"leaky_relu", {-kInfinity, kInfinity}, {0.01F, 1}},
    {"elu", {-1, kInfinity}, {0, 1}},
}};

enum class Nan : uint8_t { due, forbidden, open };

inline Nan unary_nan(const Function& f, size_t root, float x) {
  if (!std::isnan(x)) return Nan::forbidden;
  return f.depends_on_a(root) ? Nan::due : Nan::open;
}

// A NaN factor must give NaN only if its branch is taken: inside of the clamps.
inline Nan gated_nan(const Function& f, size_t root, float a, float b) {
  const std::string_view name = f.name();
  constexpr float kInside = 6.5F;  // inside of every clamp with default parameters
  const bool nan_a = std::isnan(a);
  const bool nan_b = std::isnan(b);
  const bool bounded = name == "clamped_swiglu" || name == "situglu";
  if (!nan_a && !nan_b) {
    // The others guarantee it if f(a), f'(a) and b are finite. Here also no product of b in the
    // derivative may overflow, because reverse mode would compute ∞·0.
    const bool overflows = name == "glu" ? false : name == "sreglu" ? a > 1e18F : a == kInfinity;
    const bool ordinary = std::fabs(b) < (root == 1 ? 0x1p113F : kInfinity);
    return bounded || (!overflows && ordinary) ? Nan::forbidden : Nan::open;
  }
  if (root == 0 || name == "situglu") return Nan::due;
  const bool rectified = name == "reglu" || name == "sreglu";
  const bool inside = name == "glu" || (rectified ? a > 0 : std::fabs(a) < kInside);
  if (root == 1) {
    if (nan_a && !f.depends_on_a(root)) return Nan::open;
    return nan_a || inside ? Nan::due : Nan::open;
  }
  if (name == "clamped_swiglu") return nan_a && std::fabs(b) < kInside ? Nan::due : Nan::open;
  return nan_a ? Nan::due : Nan::open;
}

inline Nan nan_rule(const Function& f, size_t root, float a, float b) {
  if (f.group() == Function::Group::word) return Nan::open;
  return f.gated() ? gated_nan(f, root, a, b) : unary_nan(f, root, a);
}

}  // namespace tenon::accuracy
