// Philox 4x32-10 in a function that asmjit compiles: one counter per 64-bit lane.
#pragma once

#include <array>
#include <cstddef>

#include "backend/cpu/jit/vectors.h"
#include "core/philox.h"

namespace tenon::cpu::jit {

// The 16-bit numbers of a stream. Each counter gives eight of them.
struct RandomInput {
  static constexpr int kRounds = 10;

  uint64_t first = 0;  // the counter of the first element
  uint64_t high = 0;   // the upper half of each counter
  std::array<std::array<uint64_t, 2>, kRounds> keys = {};

  RandomInput(uint64_t key, uint64_t upper) : high(upper) {
    auto k0 = static_cast<uint32_t>(key);
    auto k1 = static_cast<uint32_t>(key >> 32);
    for (auto& round : keys) {
      round = {k0, k1};
      k0 += kPhiloxKeyStep0;
      k1 += kPhiloxKeyStep1;
    }
  }
};

// The numbers of four vectors from counter `counter` on, as fp32. `input` is the address of the
// RandomInput. `pairs`: two vectors have the even and the odd elements of a line.
std::array<x86::Vec, 4> draws(x86::Compiler& cc, Vectors& v, const x86::Gp& counter,
                              const x86::Gp& input, bool pairs);

}  // namespace tenon::cpu::jit
