// An independent scalar evaluation of lowered graphs: plain C++ per function, without
// src/expr/lane.h.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "columns.h"
#include "expr/lower.h"
#include "expr/order.h"

namespace tenon::accuracy {

namespace scalar {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline float minimum(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return kNaN;
  if (a == 0 && b == 0) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
inline float maximum(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return kNaN;
  if (a == 0 && b == 0) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

// 2^n for n = −126 … 127. Outside of this range the function gives 0 and infinity.
inline float power_of_two(float n) {
  static const std::array<float, 256> kPowers = [] {
    std::array<float, 256> p{};
    float up = 1;
    float down = 1;
    for (int i = 0; i < 128; ++i, up *= 2, down /= 2) {
      p[static_cast<size_t>(127 + i)] = up;
      p[static_cast<size_t>(127 - i)] = down;
    }
    p[0] = 0;
    p[255] = kInf;
    return p;
  }();
  if (!(n > -127)) return std::isnan(n) ? n : 0;
  return n >= 128 ? kInf : kPowers[static_cast<size_t>(static_cast<int>(n) + 127)];
}

// x = m·2^e with m in [√½, √2), for positive normal values.
struct Split {
  float m, e;
};
inline Split split(float x) {
  constexpr float kRootHalf = 0x1.6a09e6p-1F;
  if (!(x > 0) || x == kInf) return {x, 0};
  int e = 0;
  float m = std::frexp(x, &e);  // [½, 1)
  if (m < kRootHalf) {
    m *= 2;
    --e;
  }
  return {m, static_cast<float>(e)};
}

// Rounds to nearest even in float64. Its division and product are exact here.
inline float round_to(float x, DType dtype) {
  const DTypeInfo& f = info(dtype);
  if (std::isnan(x) || x == 0) return x;
  if (std::isinf(x)) return f.saturates ? std::copysign(f.max, x) : x;
  const int exponent = std::max(std::ilogb(x), 1 - f.bias) - f.mantissa_bits;
  const double quantum = std::ldexp(1.0, exponent);
  const double r = std::nearbyint(static_cast<double>(x) / quantum) * quantum;
  if (std::fabs(r) <= f.max) return std::copysign(static_cast<float>(r), x);
  return std::copysign(f.saturates ? f.max : kInf, x);
}

inline bool holds(Rel rel, float a, float b) {
  switch (rel) {
    case Rel::lt:
      return a < b;
    case Rel::le:
      return a <= b;
    case Rel::gt:
      return a > b;
    case Rel::ge:
      return a >= b;
    case Rel::eq:
      return a == b;
    default:
      return !(a == b);
  }
}

}  // namespace scalar

// Runs a lowered graph node by node over small batches. Each point of a node is one scalar
// expression.
class Reference {
 public:
  static constexpr size_t kBatch = 256;

  Reference(const Graph& graph, std::span<const uint32_t> roots)
      : lowered_(lower(graph, roots, Precision::strict)),
        nodes_(order(lowered_.graph, lowered_.roots)) {}

  [[nodiscard]] const Lowered& lowered() const { return lowered_; }
  [[nodiscard]] std::span<const uint32_t> nodes() const { return nodes_; }

  // out[r][i] is root r at point i.
  void run(size_t n, std::span<const Column> loads, std::vector<std::vector<float>>& out) const {
    out.resize(lowered_.roots.size());
    for (auto& o : out) o.resize(n);
    visit(n, loads, [&](size_t start, size_t count, const auto& values) {
      for (size_t r = 0; r < out.size(); ++r)
        std::copy_n(values[lowered_.roots[r]].begin(), count, out[r].begin() + start);
    });
  }

  // Calls seen(start, count, values of every node) for each batch.
  template <class Seen>
  void visit(size_t n, std::span<const Column> loads, Seen&& seen) const {
    std::vector<Values> values(lowered_.graph.size());
    for (size_t start = 0; start < n; start += kBatch) {
      const size_t count = std::min(kBatch, n - start);
      for (const uint32_t id : nodes_) evaluate(id, start, count, loads, values);
      seen(start, count, values);
    }
  }

 private:
  using Values = std::array<float, kBatch>;

  void evaluate(uint32_t id, size_t start, size_t count, std::span<const Column> loads,
                std::vector<Values>& values) const {
    const Node& n = lowered_.graph[id];
    Values& out = values[id];
    const float* a = values[n.in[0]].data();
    const float* b = values[n.in[1]].data();
    const float* c = values[n.in[2]].data();
    const float* d = values[n.in[3]].data();
    const auto each = [&](auto f) {
      for (size_t i = 0; i < count; ++i) out[i] = f(i);
    };
    switch (n.word) {
      case Word::constant:
        return each([&](size_t) { return n.value; });
      case Word::load:
        return each([&](size_t i) { return loads[n.slot][start + i]; });
      case Word::add:
        return each([&](size_t i) { return a[i] + b[i]; });
      case Word::sub:
        return each([&](size_t i) { return a[i] - b[i]; });
      case Word::mul:
        return each([&](size_t i) { return a[i] * b[i]; });
      case Word::div:
        return each([&](size_t i) { return a[i] / b[i]; });
      case Word::min:
        return each([&](size_t i) { return scalar::minimum(a[i], b[i]); });
      case Word::max:
        return each([&](size_t i) { return scalar::maximum(a[i], b[i]); });
      case Word::neg:
        return each([&](size_t i) { return -a[i]; });
      case Word::abs:
        return each([&](size_t i) { return std::fabs(a[i]); });
      case Word::sqrt:
        return each([&](size_t i) { return std::sqrt(a[i]); });
      case Word::fma:
        return each([&](size_t i) { return std::fma(a[i], b[i], c[i]); });
      case Word::inverse:
        return each([&](size_t i) { return 1 / a[i]; });
      case Word::pow2:
        return each([&](size_t i) { return scalar::power_of_two(a[i] - 12583039); });
      case Word::exponent:
        return each([&](size_t i) { return scalar::split(a[i]).e; });
      case Word::mantissa:
        return each([&](size_t i) { return scalar::split(a[i]).m; });
      case Word::round:
        return each([&](size_t i) { return scalar::round_to(a[i], n.dtype()); });
      case Word::select:
        return each([&](size_t i) { return scalar::holds(n.rel(), a[i], b[i]) ? c[i] : d[i]; });
      default:  // rsqrt, exp … erfc: lowered graphs contain none of them
        return each([&](size_t) { return std::bit_cast<float>(0x7fa5a5a5U); });
    }
  }

  Lowered lowered_;
  std::vector<uint32_t> nodes_;
};

}  // namespace tenon::accuracy
