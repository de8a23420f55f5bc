// Shared parts of the schemas of norms.
#pragma once

#include "ops/op.h"

namespace tenon {

inline ArgumentSchema eps_argument(double value) {
  return {.name = "eps", .value = value, .least = 0};
}

// A zero-centered gamma starts at 0, and the factor is gamma + 1.
inline ParameterSchema gamma_parameter() {
  return {.name = "gamma", .initial = [](const OpCall& call) {
            const float one = call.arguments.flag("zero_centered_gamma") ? 0.0F : 1.0F;
            return Initial{one, one};
          }};
}

template <NormKind kind>
std::vector<Extension> normalise(const OpCall& call) {
  return {Normalised{
      .kind = kind,
      .eps = static_cast<float>(call.arguments.number("eps")),
      .zero_centered_gamma = kind != NormKind::l2 && call.arguments.flag("zero_centered_gamma")}};
}

// The float64 form of all three kinds.
Float64 norm_float64(NormKind kind);

}  // namespace tenon
