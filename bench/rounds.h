// Calls in turns under Google Benchmark: what slows the machine for a while slows all of them.
#pragma once

#include <benchmark/benchmark.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/timing.h"

namespace tenon::bench {

using NamedCalls = std::vector<std::pair<std::string, std::function<void()>>>;

// Seconds of each call, round by round; the first one's are the benchmark's.
inline std::vector<std::vector<double>> rounds(benchmark::State& state, const NamedCalls& calls) {
  std::vector<std::vector<double>> times(calls.size());
  for (const auto& [name, call] : calls) call();
  for (auto _ : state) {  // NOLINT
    for (size_t i = 0; i < calls.size(); ++i) {
      // Threads of the call before spin for a while; after the pause they sleep, and a first call
      // wakes the processor up again.
      if (calls.size() > 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(40));
        calls[i].second();
      }
      times[i].push_back(seconds(calls[i].second));
    }
    state.SetIterationTime(times[0].back());
  }
  // How many times the first one's time the others take.
  for (size_t i = 1; i < calls.size(); ++i) {
    std::vector<double> ratios;
    for (size_t r = 0; r < times[i].size(); ++r) ratios.push_back(times[i][r] / times[0][r]);
    state.counters["of_" + calls[i].first] = median(ratios);
  }
  return times;
}

}  // namespace tenon::bench
