// The rule that decides which elements a dropout keeps.
#pragma once

#include <cmath>

namespace tenon {

// An element is kept if 16 random bits are at least the threshold. Threshold and scale are kernel
// arguments.
struct DropoutRule {
  float threshold = 0, scale = 1;
};
inline DropoutRule dropout_rule(double p) {
  constexpr double kAll = 65536;
  const double threshold = std::nearbyint(kAll * p);            // round half to even
  if (threshold == kAll) return {static_cast<float>(kAll), 1};  // no element is kept
  return {static_cast<float>(threshold), static_cast<float>(kAll / (kAll - threshold))};
}

}  // namespace tenon
