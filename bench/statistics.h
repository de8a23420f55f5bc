// Medians and their intervals. Medians, not means: on a busy machine a few slow rounds must not
// decide the result.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace tenon::bench {

struct Estimate {
  double median = 0, low = 0, high = 0;  // low to high: 95 % interval of the median
};

inline Estimate estimate(std::vector<double> v) {
  if (v.empty()) return {};
  std::ranges::sort(v);
  const size_t count = v.size(), half = count / 2;
  // By order statistics: the number of the n values below the true median is binomial.
  const auto n = static_cast<double>(count);
  const double reach = 1.96 * std::sqrt(n) / 2;
  const double first = std::max(0.0, std::floor(n / 2 - reach));
  const double last = std::min(n - 1, std::ceil(n / 2 + reach));
  return {count % 2 ? v[half] : (v[half - 1] + v[half]) / 2, v[static_cast<size_t>(first)],
          v[static_cast<size_t>(last)]};
}

inline double median(std::vector<double> v) { return estimate(std::move(v)).median; }

}  // namespace tenon::bench
