// Partial results of the items for results that are not tiles, by store.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "backend/cpu/sums.h"
#include "core/few.h"

namespace tenon::cpu {

struct Leftovers {
  Few<float*, 4> partials;  // by store: column sums: blocks x cols; row sums: rows x chunks
  std::vector<std::vector<Forest>> forests;  // by store, if there are total sums: one per item
  std::vector<std::atomic<uint32_t>> amax;   // by store, if there is an amax
  std::vector<std::array<std::atomic<uint64_t>, 3>> health;  // by encoder
};

// most = max(most, value)
inline void raise(std::atomic<uint32_t>& most, uint32_t value) {
  uint32_t seen = most.load(std::memory_order_relaxed);
  while (value > seen && !most.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace tenon::cpu
