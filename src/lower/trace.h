// The sources that a formula and its gradients read, found once on a separate graph.
#pragma once

#include <cstddef>
#include <vector>

#include "lazy/extension.h"

namespace tenon {

// A number with a gradient that a formula reads.
struct Source {
  enum class Kind : uint8_t { input, parameter, extra };
  Kind kind;
  size_t number;

  friend bool operator==(const Source&, const Source&) = default;
};

struct Trace {
  struct Gradient {
    bool seed = false;           // the gradient equals the incoming gradient
    std::vector<bool> mentions;  // by source: the gradient reads it
  };

  std::vector<Source> sources;      // the inputs, then the others in the order of first use
  std::vector<Gradient> gradients;  // by source
  bool identity = false;            // the formula returns its first input
  bool random = false;              // the formula reads random bits

  [[nodiscard]] size_t at(Source::Kind kind, size_t number) const;  // index in `sources`
  [[nodiscard]] bool reads(Source::Kind kind, size_t number) const {
    return at(kind, number) < sources.size();
  }
};

Trace trace(const Formula& formula, size_t inputs);

}  // namespace tenon
