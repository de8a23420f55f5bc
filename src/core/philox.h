// Philox 4x32-10: one block of four random words for a counter and a key.
#pragma once

#include <cstdint>

namespace tenon {

// Number of values in the state of a stream: seed, offset, row0, col0, columns.
inline constexpr int kRandomState = 5;

inline constexpr uint64_t kPhiloxMultiplier0 = 0xD2511F53U;
inline constexpr uint64_t kPhiloxMultiplier1 = 0xCD9E8D57U;
inline constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9U;
inline constexpr uint32_t kPhiloxKeyStep1 = 0xBB67AE85U;

struct RandomWords {
  uint32_t w[4];
  friend bool operator==(const RandomWords&, const RandomWords&) = default;
};

// Always inlined, like the number formats, because it is compiled once per instruction set.
[[gnu::always_inline]] constexpr RandomWords philox(uint64_t key, uint64_t low, uint64_t high) {
  auto k0 = static_cast<uint32_t>(key);
  auto k1 = static_cast<uint32_t>(key >> 32);
  auto c0 = static_cast<uint32_t>(low);
  auto c1 = static_cast<uint32_t>(low >> 32);
  auto c2 = static_cast<uint32_t>(high);
  auto c3 = static_cast<uint32_t>(high >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kPhiloxMultiplier0 * c0;
    const uint64_t p1 = kPhiloxMultiplier1 * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

static_assert(philox(0, 0, 0) == RandomWords{{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}});

}  // namespace tenon
