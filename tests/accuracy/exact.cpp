// Evaluates formula functions over float64 arrays, one loop per function: values, then the bound of
// each precision.
#include "exact.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "expr/evaluate.h"
#include "expr/order.h"

namespace tenon::accuracy {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kOverflow32 = 0x1.ffffffp127;
constexpr double kTwoOverRootPi = 1.1283791670955126;
constexpr size_t kBatch = 128;

template <int K>
struct Block {
  alignas(64) std::array<double, kBatch> v;
  alignas(64) std::array<std::array<double, kBatch>, K> e;
};

// Joins conditions without branches, so that the loops vectorise.
bool both(bool a, bool b) { return (static_cast<int>(a) & static_cast<int>(b)) != 0; }
bool either(bool a, bool b) { return (static_cast<int>(a) | static_cast<int>(b)) != 0; }

double times(double derivative, double error) {
  const double product = std::fabs(derivative) * error;
  const double some = error == 0 ? 0 : product;
  return derivative == 0 ? 0 : some;
}

double minimum(double a, double b) {
  const uint64_t signs = std::bit_cast<uint64_t>(a) | std::bit_cast<uint64_t>(b);
  const double ordered = a < b ? a : b;
  // They differ at most in sign.
  const double equal = a == b ? std::bit_cast<double>(signs) : ordered;
  return a != a ? a : equal;
}

// A transcendental function and its slope. Both sides of a sigmoid share one exp.
struct Point {
  double y, slope;
};
Point sigmoid_point(double x) {
  const double e = std::exp(-std::fabs(x));
  const double y = (x < 0 ? e : 1.0) / (1.0 + e);
  return {y, y * ((-x < 0 ? e : 1.0) / (1.0 + e))};
}
Point point(Word w, double x) {
  switch (w) {
    case Word::exp: {
      const double y = std::exp(x);
      return {y, y};
    }
    case Word::expm1: {
      const double y = std::expm1(x);
      return {y, y + 1};
    }
    case Word::log:
      return {std::log(x), 1 / x};
    case Word::log1p:
      return {std::log1p(x), 1 / (1 + x)};
    case Word::sigmoid:
      return sigmoid_point(x);
    case Word::tanh: {
      const double e = std::exp(-std::fabs(2 * x));
      const double up = (2 * x < 0 ? e : 1.0) / (1.0 + e);
      const double down = (-2 * x < 0 ? e : 1.0) / (1.0 + e);
      return {std::tanh(x), 4 * up * down};
    }
    case Word::erf:
      return {std::erf(x), kTwoOverRootPi * std::exp(-x * x)};
    default:
      return {std::erfc(x), kTwoOverRootPi * std::exp(-x * x)};
  }
}

template <int K>
class Kernel {
 public:
  using B = Block<K>;

  Kernel(std::span<const double> natives, size_t count) : natives_(natives), count_(count) {}

  // Computes bounds as input of a parent or, for a `root`, as results.
  void run(const Node& n, bool root, const B& a, const B& b, const B& c, const B& d, B& r) {
    beta_ = n.word == Word::round ? 0 : info(n.word).beta;
    overflow_ = root ? kInf : kOverflow32;
    switch (n.word) {
      case Word::add:
        values([&](size_t i) { return a.v[i] + b.v[i]; }, r);
        arithmetic([&](int k, size_t i) { return a.e[k][i] + b.e[k][i]; }, a, b, r);
        break;
      case Word::sub:
        values([&](size_t i) { return a.v[i] - b.v[i]; }, r);
        arithmetic([&](int k, size_t i) { return a.e[k][i] + b.e[k][i]; }, a, b, r);
        break;
      case Word::mul:
        values([&](size_t i) { return a.v[i] * b.v[i]; }, r);
        arithmetic(
            [&](int k, size_t i) { return times(b.v[i], a.e[k][i]) + times(a.v[i], b.e[k][i]); }, a,
            b, r);
        break;
      case Word::div:
        values([&](size_t i) { return a.v[i] / b.v[i]; }, r);
        arithmetic(
            [&](int k, size_t i) {
              return times(1 / b.v[i], a.e[k][i]) + times(r.v[i] / b.v[i], b.e[k][i]);
            },
            a, b, r);
        break;
      case Word::min:
      case Word::max:
        extreme(n.word, a, b, r);
        break;
      case Word::neg:
        values([&](size_t i) { return -a.v[i]; }, r);
        bounds([&](int k, size_t i) { return a.e[k][i]; }, r);
        break;
      case Word::abs:
        values([&](size_t i) { return std::fabs(a.v[i]); }, r);
        bounds([&](int k, size_t i) { return a.e[k][i]; }, r);
        break;
      case Word::sqrt:
        values([&](size_t i) { return std::sqrt(a.v[i]); }, r);
        bounds([&](int k, size_t i) { return times(0.5 / r.v[i], a.e[k][i]); }, r);
        break;
      case Word::rsqrt:
        values([&](size_t i) { return 1 / std::sqrt(a.v[i]); }, r);
        bounds([&](int k, size_t i) { return times(0.5 * r.v[i] / a.v[i], a.e[k][i]); }, r);
        break;
      case Word::select:
        choose(n.rel(), a, b, c, d, r);
        break;
      case Word::round:
        rounded(n.dtype(), a, r);
        break;
      default:
        transcendental(n.word, a, r);
    }
  }

  // For a parent, an fp32 value that overflowed has no bound.
  void as_input(B& r) {
    for (int k = 0; k < K; ++k)
      for (size_t i = 0; i < count_; ++i) r.e[k][i] = seen(r.v[i], r.e[k][i], kOverflow32);
  }

 private:
  static double seen(double v, double e, double overflow) {
    const bool over = both(std::fabs(v) < kInf, std::fabs(v) + e >= overflow);
    return either(e != e, over) ? kInf : e;
  }

  template <class F>
  void values(F f, B& r) {
    for (size_t i = 0; i < count_; ++i) r.v[i] = f(i);
  }
  template <class F>
  void bounds(F f, B& r) {
    const double beta = beta_;
    const double overflow = overflow_;
    for (int k = 0; k < K; ++k)
      for (size_t i = 0; i < count_; ++i)
        r.e[k][i] = seen(r.v[i], f(k, i) + beta * fast_ulp32(r.v[i]), overflow);
  }
  // ∞·0 is NaN in fp32. So an operand without a bound gives a result without a bound, even if its
  // factor is 0.
  template <class F>
  void arithmetic(F f, const B& a, const B& b, B& r) {
    bounds(
        [&](int k, size_t i) {
          const bool lost = either(a.e[k][i] == kInf, b.e[k][i] == kInf);
          const double e = f(k, i);
          return lost ? kInf : e;
        },
        r);
  }

  void transcendental(Word w, const B& a, B& r) {
    alignas(64) std::array<double, kBatch> slope;
    for (size_t i = 0; i < count_; ++i) {
      const Point p = point(w, a.v[i]);
      r.v[i] = p.y;
      slope[i] = p.slope;
    }
    const double beta = beta_;
    const double overflow = overflow_;
    for (int k = 0; k < K; ++k) {
      const double native = natives_[static_cast<size_t>(k)];
      for (size_t i = 0; i < count_; ++i) {
        const double v = std::fabs(r.v[i]);
        const double u = fast_ulp32(v);
        const double most = native * v < 0.5 * u ? 0.5 * u : native * v;
        const double allowed = v < kInf ? most : 0;
        const double own = native > 0 ? allowed : beta * u;
        r.e[k][i] = seen(v, times(slope[i], a.e[k][i]) + own, overflow);
      }
    }
  }

  void extreme(Word w, const B& a, const B& b, B& r) {
    if (w == Word::min)
      values([&](size_t i) { return minimum(a.v[i], b.v[i]); }, r);
    else
      values([&](size_t i) { return -minimum(-a.v[i], -b.v[i]); }, r);
    bounds(
        [&](int k, size_t i) {
          const double ea = a.e[k][i];
          const double eb = b.e[k][i];
          const bool close = std::fabs(a.v[i] - b.v[i]) <= ea + eb;
          const double one = r.v[i] == a.v[i] ? ea : eb;
          const double most = ea < eb ? eb : ea;
          return close ? most : one;
        },
        r);
  }

  void choose(Rel rel, const B& a, const B& b, const B& c, const B& d, B& r) {
    alignas(64) std::array<double, kBatch> first;  // 1 if the first branch is taken
    const auto compare = [&](auto holds) {
      for (size_t i = 0; i < count_; ++i) first[i] = holds(a.v[i], b.v[i]) ? 1.0 : 0.0;
    };
    switch (rel) {
      case Rel::lt:
        compare(std::less{});
        break;
      case Rel::le:
        compare(std::less_equal{});
        break;
      case Rel::gt:
        compare(std::greater{});
        break;
      case Rel::ge:
        compare(std::greater_equal{});
        break;
      case Rel::eq:
        compare(std::equal_to{});
        break;
      default:
        compare(std::not_equal_to{});
    }
    values([&](size_t i) { return first[i] != 0 ? c.v[i] : d.v[i]; }, r);
    bounds(
        [&](int k, size_t i) {
          const double sum = a.e[k][i] + b.e[k][i];
          const double ec = c.e[k][i];
          const double ed = d.e[k][i];
          const bool close = both(sum > 0, std::fabs(a.v[i] - b.v[i]) <= sum);
          const double gap = c.v[i] == d.v[i] ? 0 : std::fabs(c.v[i] - d.v[i]);
          const double taken = first[i] != 0 ? ec : ed;
          const double any = (ec < ed ? ed : ec) + gap;
          return close ? any : taken;
        },
        r);
  }

  static double stored(double v, DType dtype) {
    const double r = nearest(v, dtype);
    return info(dtype).saturates && std::isinf(r) ? std::copysign(info(dtype).max, r) : r;
  }
  void rounded(DType dtype, const B& a, B& r) {
    values([&](size_t i) { return stored(a.v[i], dtype); }, r);
    bounds(
        [&](int k, size_t i) {
          const double e = a.e[k][i];
          if (e == 0 || std::isinf(e)) return e;
          const auto gap = [&](double v) { return v == r.v[i] ? 0 : std::fabs(v - r.v[i]); };
          return std::max(gap(stored(a.v[i] - e, dtype)), gap(stored(a.v[i] + e, dtype)));
        },
        r);
  }

  std::span<const double> natives_;
  size_t count_;
  double beta_ = 0;
  double overflow_ = kOverflow32;
};

struct Work {
  const Graph& graph;
  std::span<const uint32_t> roots, nodes;
  std::span<const double> natives;
  size_t n;
  std::span<const Column> loads;
  Values& out;
};

template <int K>
void run_blocks(const Work& w) {
  std::vector<Block<K>> blocks(w.graph.size());
  for (size_t start = 0; start < w.n; start += kBatch) {
    const size_t count = std::min(kBatch, w.n - start);
    Kernel<K> kernel(w.natives, count);
    for (const uint32_t id : w.nodes) {
      const Node& node = w.graph[id];
      Block<K>& r = blocks[id];
      const bool is_root = std::ranges::find(w.roots, id) != w.roots.end();
      if (node.arity() == 0) {
        if (start == 0) {
          r.v.fill(node.value);
          for (auto& e : r.e) e.fill(0);
        }
        if (node.word == Word::load) {
          const Column& load = w.loads[node.slot];
          for (size_t i = 0; i < count; ++i) r.v[i] = load[start + i];
        }
      } else {
        kernel.run(node, is_root, blocks[node.in[0]], blocks[node.in[1]], blocks[node.in[2]],
                   blocks[node.in[3]], r);
      }
      if (!is_root) continue;
      const auto at = static_cast<ptrdiff_t>(start);
      for (size_t root = 0; root < w.roots.size(); ++root) {
        if (w.roots[root] != id) continue;
        std::copy_n(r.v.begin(), count, w.out.value[root].begin() + at);
        for (size_t k = 0; k < K; ++k)
          std::copy_n(r.e[k].begin(), count, w.out.bound[k][root].begin() + at);
      }
      kernel.as_input(r);
    }
  }
}

// The same code for wider vectors. Without fma and contraction it gives the same bits.
#if defined(__x86_64__)
[[gnu::flatten, gnu::target("avx2")]] void run_avx2(const Work& w) {
  w.natives.size() == 1 ? run_blocks<1>(w) : run_blocks<3>(w);
}
[[gnu::flatten, gnu::target("avx512f,avx512dq,avx512vl")]] void run_avx512(const Work& w) {
  w.natives.size() == 1 ? run_blocks<1>(w) : run_blocks<3>(w);
}
#endif
void run_any(const Work& w) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return run_avx512(w);
  if (__builtin_cpu_supports("avx2")) return run_avx2(w);
#endif
  w.natives.size() == 1 ? run_blocks<1>(w) : run_blocks<3>(w);
}

}  // namespace

Exact::Exact(const Graph& graph, std::span<const uint32_t> roots, std::span<const double> natives)
    : graph_(graph),
      roots_(roots.begin(), roots.end()),
      nodes_(order(graph, roots)),
      natives_(natives.begin(), natives.end()) {}

void Exact::run(size_t n, std::span<const Column> loads, Values& out) const {
  out.value.resize(roots_.size());
  out.bound.resize(natives_.size());
  for (auto& v : out.value) v.resize(n);
  for (auto& b : out.bound) {
    b.resize(roots_.size());
    for (auto& e : b) e.resize(n);
  }
  run_any({graph_, roots_, nodes_, natives_, n, loads, out});
}

bool Exact::agrees_with_oracle(size_t n, std::span<const Column> loads) const {
  Values mine;
  run(n, loads, mine);
  std::vector<std::vector<float>> copies;
  std::vector<const float*> pointers;
  for (const Column& c : loads) {
    std::vector<float>& copy = copies.emplace_back(n);
    for (size_t i = 0; i < n; ++i) copy[i] = c[i];
  }
  for (const auto& copy : copies) pointers.push_back(copy.data());
  const auto same = [](double a, double b) {
    return (a != a && b != b) || std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
  };
  for (size_t k = 0; k < natives_.size(); ++k) {
    const Evaluation theirs = Oracle(graph_, roots_, natives_[k]).run(n, pointers);
    for (size_t r = 0; r < roots_.size(); ++r)
      for (size_t i = 0; i < n; ++i) {
        const double bound = theirs.bound[r][i];
        if (!same(mine.bound[k][r][i], bound)) return false;
        // A value without a bound is not compared.
        if (bound < kInf && !same(mine.value[r][i], theirs.value[r][i])) return false;
      }
  }
  return true;
}

}  // namespace tenon::accuracy
