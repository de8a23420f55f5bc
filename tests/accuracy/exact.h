// Exact values of a formula and its bounds E, over arrays and for several precisions at once. It is
// a fast form of the library's Oracle. `agrees_with_oracle` checks that both give the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "columns.h"
#include "tenon/expr.h"

namespace tenon::accuracy {

// ulp32 from the exponent bits only, so that loops contain no calls.
inline double fast_ulp32(double v) {
  const uint64_t exponent = std::bit_cast<uint64_t>(v) & 0x7ff0000000000000U;
  const auto scaled = static_cast<int64_t>(exponent) - (int64_t{23} << 52);
  const double u = std::bit_cast<double>(scaled);
  const double floored = std::fabs(v) < 0x1p-126 ? 0x1p-149 : u;
  return std::fabs(v) < std::numeric_limits<double>::infinity() ? floored : 0;
}

// value[root][i]; bound[precision][root][i].
struct Values {
  std::vector<std::vector<double>> value;
  std::vector<std::vector<std::vector<double>>> bound;
};

class Exact {
 public:
  // `natives`: for each precision the relative error of transcendental functions, 0 for strict. One
  // or three precisions.
  Exact(const Graph& graph, std::span<const uint32_t> roots, std::span<const double> natives);

  void run(size_t n, std::span<const Column> loads, Values& out) const;

  // Whether the library's Oracle gives the same bits at these points.
  [[nodiscard]] bool agrees_with_oracle(size_t n, std::span<const Column> loads) const;

 private:
  Graph graph_;
  std::vector<uint32_t> roots_, nodes_;
  std::vector<double> natives_;
};

}  // namespace tenon::accuracy
