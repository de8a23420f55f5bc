// Runs jobs by index on all cores. The library runs each call in the calling thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

namespace tenon::accuracy {

inline void parallel(size_t jobs, const std::function<void(size_t)>& job) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < jobs; i = next++) job(i);
  };
  std::vector<std::jthread> threads;
  for (unsigned t = 1; t < std::thread::hardware_concurrency(); ++t) threads.emplace_back(work);
  work();
}

}  // namespace tenon::accuracy
