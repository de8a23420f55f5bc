// The thread pool for row blocks. The calling thread works too.
#pragma once

#include <cstdint>
#include <functional>

namespace tenon::cpu {

using Range = std::function<void(int64_t begin, int64_t end)>;

// Splits [0, n) into contiguous pieces. Adjacent pieces go to one thread unless it is late. Nested
// calls run inline, and so do calls while another thread uses the pool. An exception in a piece is
// rethrown to the caller.
void parallel_for(int64_t n, const Range& body);

// Replaces the pool by a scheduler of the host. An empty function restores the pool.
void set_parallel_for(std::function<void(int64_t n, const Range& body)> replacement);

inline constexpr int kMaxThreads = 1024;

// TENON_THREADS, else OMP_NUM_THREADS, else the number of cores that this process may use.
int threads();
void set_threads(int count);  // 0 restores the initial value

}  // namespace tenon::cpu
