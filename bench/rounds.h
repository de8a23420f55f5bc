// Alternates calls under Google Benchmark, so that temporary slowdowns of the machine affect all of
// them.
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

// Seconds of each call, per round. Google Benchmark reports the times of the first call.
inline std::vector<std::vector<double>> rounds(benchmark::State& state, const NamedCalls& calls) {
  std::vector<std::vector<double>> times(calls.size());
  for (const auto& [name, call] : calls) call();
  for (auto _ : state) {  // NOLINT
    for (size_t i = 0; i < calls.size(); ++i) {
      // Threads of the previous call spin for a while. The pause lets them sleep. The untimed call
      // then wakes the processor up.
      if (calls.size() > 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(40));
        calls[i].second();
      }
      times[i].push_back(seconds(calls[i].second));
    }
    state.SetIterationTime(times[0].back());
  }
  // The ratio of each other call's time to the first call's time.
  for (size_t i = 1; i < calls.size(); ++i) {
    std::vector<double> ratios;
    for (size_t r = 0; r < times[i].size(); ++r) ratios.push_back(times[i][r] / times[0][r]);
    state.counters["of_" + calls[i].first] = median(ratios);
  }
  return times;
}

}  // namespace tenon::bench
