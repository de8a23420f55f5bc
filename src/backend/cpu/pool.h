// Threads for row blocks: one small pool, the caller works too.
#pragma once

#include <cstdint>
#include <functional>

namespace tenon::cpu {

using Range = std::function<void(int64_t begin, int64_t end)>;

// Splits [0, n) into contiguous pieces, neighbours to one thread if it keeps up. Nested calls, and
// calls while another thread uses the pool, run inline. An exception of a part reaches the caller.
void parallel_for(int64_t n, const Range& body);

// A host's own scheduler in place of the pool; an empty function restores the pool.
void set_parallel_for(std::function<void(int64_t n, const Range& body)> replacement);

inline constexpr int kMaxThreads = 1024;

// TENON_THREADS, else OMP_NUM_THREADS, else the cores this process may use.
int threads();
void set_threads(int count);  // 0: as at the start

}  // namespace tenon::cpu
