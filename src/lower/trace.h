// What a formula reads, and what each of its gradients mentions: found once, on a graph of its own.
#pragma once

#include <cstddef>
#include <vector>

#include "lazy/extension.h"

namespace tenon {

// Where a formula's numbers come from: those that have gradients.
struct Source {
  enum class Kind : uint8_t { input, parameter, extra };
  Kind kind;
  size_t number;

  friend bool operator==(const Source&, const Source&) = default;
};

struct Trace {
  struct Gradient {
    bool seed = false;           // it is the incoming gradient itself
    std::vector<bool> mentions;  // by source
  };

  std::vector<Source> sources;      // the inputs, then others in the order of their first use
  std::vector<Gradient> gradients;  // of each source
  bool identity = false;            // the formula is its first input
  bool random = false;              // it reads random bits

  [[nodiscard]] size_t at(Source::Kind kind, size_t number) const;  // of `sources`
  [[nodiscard]] bool reads(Source::Kind kind, size_t number) const {
    return at(kind, number) < sources.size();
  }
};

Trace trace(const Formula& formula, size_t inputs);

}  // namespace tenon
