// The fused norm loops, written once. Each instruction set compiles them with its own tag and
// flags. A line is two vectors of elements. For 16-bit elements, two neighbours are the halves of
// one 32-bit word. So a 16-bit line needs no shuffle, and the first level of its tree sum needs
// none.
#pragma once

#include <cstring>
#include <utility>

#include "backend/cpu/norm_loops.h"
#include "tenon/dtype.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tenon::cpu {

template <int lanes>
struct Vectors;
template <>
struct Vectors<16> {
  using V [[gnu::vector_size(64)]] = float;
  using U [[gnu::vector_size(64)]] = uint32_t;
};
template <>
struct Vectors<8> {
  using V [[gnu::vector_size(32)]] = float;
  using U [[gnu::vector_size(32)]] = uint32_t;
};

template <class tag, DType d>
struct NormMaker {
#if defined(__AVX512F__)
  static constexpr int kLanes = 16, kLevels = 4;
#else
  static constexpr int kLanes = 8, kLevels = 3;
#endif
  static constexpr int64_t kLine = 2 * kLanes;
  static constexpr int64_t kBytes = info(d).bytes;
  static constexpr int64_t kLineBytes = kLine * kBytes;
  using V = typename Vectors<kLanes>::V;
  using U = typename Vectors<kLanes>::U;
  using Lanes = std::make_index_sequence<kLanes>;

  struct Line {
    V a, b;
  };

// Without optimisation (sanitizers), forced inlining only slows the compiler. The attribute is not
// written as [[…]]: after the parameters of a lambda, [[…]] applies to its type and has no effect.
#ifdef __OPTIMIZE__
#define TENON_ALWAYS __attribute__((always_inline))
#else
#define TENON_ALWAYS
#endif
#define TENON_INLINE TENON_ALWAYS static inline

  TENON_INLINE V all(float v) { return v - V{}; }
  TENON_INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }

  // Sums of adjacent lanes of the concatenation of a and b.
  template <size_t... i>
  TENON_INLINE V pairs(V a, V b, std::index_sequence<i...> /*lanes*/) {
    return __builtin_shufflevector(a, b, static_cast<int>(2 * i)...) +
           __builtin_shufflevector(a, b, static_cast<int>(2 * i + 1)...);
  }
  TENON_INLINE V pairs(V a, V b) { return pairs(a, b, Lanes{}); }
  TENON_INLINE V pairs(const Line& l) {
    if constexpr (d == DType::bf16) return l.a + l.b;
    return pairs(l.a, l.b);
  }

  TENON_INLINE Line read(const char* p) {
    Line l;
    if constexpr (d == DType::bf16) {
      U u;
      std::memcpy(&u, p, sizeof u);
      const U even = u << 16;
      const U odd = u & 0xffff0000U;
      std::memcpy(&l.a, &even, sizeof u);
      std::memcpy(&l.b, &odd, sizeof u);
    } else {
      std::memcpy(&l, p, sizeof l);
    }
    return l;
  }
  TENON_INLINE Line read_vector(const float* p, int64_t line) {
    return {load(p + line * kLine), load(p + line * kLine + kLanes)};
  }
  TENON_INLINE Line read_vector(const NormVector& v, int64_t line) {
    if constexpr (d == DType::bf16)
      if (v.own) return read(v.own + line * kLineBytes);
    return read_vector(v.wide, line);
  }

  // bf16 in the upper halves, rounded to nearest even. If NaN is possible, its bits are the
  // executor's.
  template <bool clean>
  TENON_INLINE U rounded(V v) {
    U u;
    std::memcpy(&u, &v, sizeof u);
    const U down = u + 0x7fffU;
    const U r = (u & 0x10000U) != 0 ? down + 1U : down;
    if constexpr (clean) return r;
    return v != v ? U{} + 0x7fc00000U : r;
  }
  template <bool stream>
  TENON_INLINE void put(char* p, const V& v) {
#if defined(__AVX512F__)
    if constexpr (stream) return _mm512_stream_ps(reinterpret_cast<float*>(p), (__m512)v);
#elif defined(__AVX__)
    if constexpr (stream) return _mm256_stream_ps(reinterpret_cast<float*>(p), (__m256)v);
#endif
    std::memcpy(p, &v, sizeof v);
  }
  template <bool stream, bool clean>
  TENON_INLINE void write(char* p, const Line& l) {
    if constexpr (d == DType::bf16) {
      const U u = (rounded<clean>(l.a) >> 16) | (rounded<clean>(l.b) & 0xffff0000U);
      V v;
      std::memcpy(&v, &u, sizeof u);
      put<stream>(p, v);
    } else {
      put<stream>(p, l.a);
      put<stream>(p + sizeof(V), l.b);
    }
  }

  TENON_INLINE void prefetch(const char* p) {
    for (int64_t i = 0; i < kLineBytes; i += 64) __builtin_prefetch(p + i);
  }
  // Each of the two backward passes prefetches half of the next rows, so that both passes use
  // memory bandwidth. The prefetch goes to the second-level cache: gradients and sums fill the
  // first.
  template <bool second>
  TENON_INLINE void fetch_half(const NormRows& rows, int r, int64_t line) {
    const int64_t at = line * (kLineBytes / 2) + (second ? rows.cols * kBytes / 2 : 0);
    __builtin_prefetch(rows.x[r] + rows.ahead_x + at, 0, 2);
    __builtin_prefetch(rows.grad[r] + rows.ahead_grad + at, 0, 2);
  }

  // Element e of a line.
  TENON_INLINE float& element(Line& l, int64_t e) {
    float* const lanes = reinterpret_cast<float*>(&l);
    if constexpr (d == DType::bf16) return lanes[e / 2 + (e % 2) * kLanes];
    return lanes[e];
  }
  TENON_INLINE Line padded(Line l, int64_t elements) {
    for (int64_t e = elements; e < kLine; ++e) element(l, e) = -0.0F;
    return l;
  }

  template <int level, class F>
  TENON_INLINE V tree(F& f, int64_t first) {
    if constexpr (level == 0) return f(first);
    return pairs(tree<(level > 0 ? level - 1 : 0)>(f, first),
                 tree<(level > 0 ? level - 1 : 0)>(f, first + (int64_t{1} << level) / 2));
  }

  // The tree sum of `vectors` ≥ 1 vectors in memory. Overwrites them.
  TENON_INLINE float sum_of(float* p, int64_t vectors) {
    const V none = all(-0.0F);
    while (vectors > 1) {
      for (int64_t i = 0; i < vectors / 2; ++i) {
        const V v = pairs(load(p + 2 * i * kLanes), load(p + (2 * i + 1) * kLanes));
        std::memcpy(p + i * kLanes, &v, sizeof v);
      }
      if (vectors % 2) {
        const V v = pairs(load(p + (vectors - 1) * kLanes), none);
        std::memcpy(p + vectors / 2 * kLanes, &v, sizeof v);
      }
      vectors = (vectors + 1) / 2;
    }
    V v = load(p);
    for (int i = 0; i < kLevels; ++i) v = pairs(v, v);
    return v[0];
  }

  // Pointers to one line of every stream of a row.
  struct At {
    const char *x, *residual, *grad;
  };

  template <int n>
  struct Totals {
    float v[n] = {};
  };
  template <int n>
  struct Lines {
    Line v[n];
  };

  // Tree sums over a row of summands(at, line, row), which returns one Line per sum.
  template <int n, class F>
  TENON_INLINE Totals<n> row_totals(const NormRows& rows, int r, F summands) {
    const int64_t full = rows.cols / kLine;
    const int64_t rest = rows.cols % kLine;
    const auto at = [&](int64_t i) {
      return At{rows.x[r] + i * kLineBytes, rows.residual[r] + i * kLineBytes,
                rows.grad[r] + i * kLineBytes};
    };
    Totals<n> out;
    if (rows.cols == 0) return out;
    const int64_t groups = full / kLanes;
    const bool more = full % kLanes > 0 || rest > 0;
    float* const scratch = rows.scratch;
    const int64_t apart = (groups + 1) * kLanes;
    for (int64_t g = 0; g < groups; ++g) {
      const auto each = [&]<int k>(std::integral_constant<int, k>) TENON_ALWAYS {
        const auto line = [&](int64_t i) TENON_ALWAYS { return pairs(summands(at(i), i).v[k]); };
        const V v = tree<kLevels>(line, g * kLanes);
        std::memcpy(scratch + k * apart + g * kLanes, &v, sizeof v);
      };
      each(std::integral_constant<int, 0>{});
      if constexpr (n == 2) each(std::integral_constant<int, 1>{});
    }
    if (more) tail_group<n>(rows, r, summands, groups, apart);
    for (int k = 0; k < n; ++k) out.v[k] = sum_of(scratch + k * apart, groups + (more ? 1 : 0));
    return out;
  }

  // The last lines of a row, fewer than a group. Missing elements are −0.
  template <int n, class F>
  static void tail_group(const NormRows& rows, int r, F& summands, int64_t groups, int64_t apart) {
    const int64_t full = rows.cols / kLine;
    const int64_t rest = rows.cols % kLine;
    V v[n][kLanes];
    for (auto& list : v)
      for (V& one : list) one = all(-0.0F);
    const auto take = [&](int64_t i, const Lines<n>& lines) {
      for (int k = 0; k < n; ++k) v[k][i - groups * kLanes] = pairs(lines.v[k]);
    };
    for (int64_t i = groups * kLanes; i < full; ++i)
      take(i, summands(At{rows.x[r] + i * kLineBytes, rows.residual[r] + i * kLineBytes,
                          rows.grad[r] + i * kLineBytes},
                       i));
    if (rest > 0) {
      const Partial p(rows, r);
      Lines<n> lines = summands(p.at(), full);
      for (Line& l : lines.v) l = padded(l, rest);
      take(full, lines);
    }
    for (int k = 0; k < n; ++k) {
      const auto line = [&](int64_t i) { return v[k][i]; };
      const V sum = tree<kLevels>(line, 0);
      std::memcpy(rows.scratch + k * apart + groups * kLanes, &sum, sizeof sum);
    }
  }

  // The elements after the last whole line, copied into separate memory.
  struct Partial {
    char x[kLineBytes] = {}, residual[kLineBytes] = {}, grad[kLineBytes] = {};
    Partial(const NormRows& rows, int r) {
      const int64_t begin = rows.cols / kLine * kLineBytes;
      const auto bytes = static_cast<size_t>(rows.cols * kBytes - begin);
      if (rows.x[r]) std::memcpy(x, rows.x[r] + begin, bytes);
      if (rows.residual[r]) std::memcpy(residual, rows.residual[r] + begin, bytes);
      if (rows.grad[r]) std::memcpy(grad, rows.grad[r] + begin, bytes);
    }
    [[nodiscard]] At at() const { return {x, residual, grad}; }
  };

  template <bool residual>
  TENON_INLINE Line input(const At& at) {
    Line x = read(at.x);
    if constexpr (residual) {
      const Line other = read(at.residual);
      x = {x.a + other.a, x.b + other.b};
    }
    return x;
  }
  template <bool centred>
  TENON_INLINE Line from_mean(const Line& x, V mean) {
    if constexpr (centred) return {x.a - mean, x.b - mean};
    return x;
  }
  TENON_INLINE Line times(const Line& a, const Line& b) { return {a.a * b.a, a.b * b.b}; }
  TENON_INLINE Line times(const Line& a, V b) { return {a.a * b, a.b * b}; }

  template <int n, bool residual>
  static void total(NormRows& rows) {
    for (int r = 0; r < n; ++r)
      rows.total[r] = row_totals<1>(rows, r, [&](const At& at, int64_t) TENON_ALWAYS {
                        return Lines<1>{{input<residual>(at)}};
                      }).v[0];
  }

  template <int n, bool centred, bool residual>
  static void squares(NormRows& rows) {
    for (int r = 0; r < n; ++r) {
      const V mean = all(rows.mean[r]);
      rows.total[r] = row_totals<1>(rows, r, [&](const At& at, int64_t) TENON_ALWAYS {
                        const Line c = from_mean<centred>(input<residual>(at), mean);
                        return Lines<1>{{times(c, c)}};
                      }).v[0];
    }
  }

  template <int n, bool centred, bool residual, bool gamma, bool beta>
  static void forward(NormRows& rows) {
    if (d == DType::bf16 && !rows.clean)
      forward_as<n, centred, residual, gamma, beta, false, d != DType::bf16>(rows);
    else if (rows.stream)
      forward_as<n, centred, residual, gamma, beta, true, true>(rows);
    else
      forward_as<n, centred, residual, gamma, beta, false, true>(rows);
  }

  template <int n, bool centred, bool residual, bool gamma, bool beta, bool stream, bool clean>
  TENON_INLINE void forward_as(const NormRows& given) {
    const NormRows rows = given;  // a copy, so that no store can alias it
    const int64_t full = rows.cols / kLine;
    V mean[n];
    V rstdev[n];
    for (int r = 0; r < n; ++r) mean[r] = all(rows.mean[r]), rstdev[r] = all(rows.rstdev[r]);
    const auto result = [&](const Line& x, int64_t i, int r) TENON_ALWAYS {
      Line y = times(from_mean<centred>(x, mean[r]), rstdev[r]);
      if constexpr (gamma) y = times(y, read_vector(rows.gamma, i));
      if constexpr (beta) {
        const Line b = read_vector(rows.beta, i);
        y = {y.a + b.a, y.b + b.b};
      }
      return y;
    };
    for (int64_t i = 0; i < full; ++i) {
      Line x[n];
      for (int r = 0; r < n; ++r) {
        const At at{rows.x[r] + i * kLineBytes, rows.residual[r] + i * kLineBytes, nullptr};
        prefetch(at.x + rows.ahead_x);
        if constexpr (residual) prefetch(at.residual + rows.ahead_residual);
        x[r] = input<residual>(at);
      }
      for (int r = 0; r < n; ++r) {
        write<stream, clean>(rows.y[r] + i * kLineBytes, result(x[r], i, r));
        if constexpr (residual)
          if (rows.sum[r]) write<stream, clean>(rows.sum[r] + i * kLineBytes, x[r]);
      }
    }
    if (rows.cols % kLine == 0) return;
    const auto bytes = static_cast<size_t>(rows.cols % kLine * kBytes);
    char out[kLineBytes];
    for (int r = 0; r < n; ++r) {
      const Partial p(rows, r);
      const Line x = input<residual>(p.at());
      write<false, clean>(out, result(x, full, r));
      std::memcpy(rows.y[r] + full * kLineBytes, out, bytes);
      if (!residual || !rows.sum[r]) continue;
      write<false, clean>(out, x);
      std::memcpy(rows.sum[r] + full * kLineBytes, out, bytes);
    }
  }

  // total: Σ w·x̂, or Σ x·grad for l2. second: Σ w if there is a mean.
  template <int n, bool centred, bool gamma, bool l2>
  static void products(NormRows& rows) {
    for (int r = 0; r < n; ++r) {
      const V mean = all(rows.mean[r]);
      const V rstdev = all(rows.rstdev[r]);
      const auto summands = [&](const At& at, int64_t i) TENON_ALWAYS {
        fetch_half<false>(rows, r, i);
        const Line x = read(at.x);
        Line w = read(at.grad);
        if constexpr (gamma) w = times(w, read_vector(rows.gamma, i));
        const Line normal = l2 ? x : times(from_mean<centred>(x, mean), rstdev);
        if constexpr (centred)
          return Lines<2>{{times(w, normal), w}};
        else
          return Lines<1>{{times(w, normal)}};
      };
      constexpr int kSums = centred ? 2 : 1;
      const auto found = row_totals<kSums>(rows, r, summands);
      rows.total[r] = found.v[0];
      if constexpr (centred) rows.second[r] = found.v[1];
    }
  }

  template <int n, bool centred, bool gamma, bool l2, int sums>
  static void backward(NormRows& rows) {
    rows.first&& sums > 0 ? backward_as<n, centred, gamma, l2, sums, true>(rows)
                          : backward_as<n, centred, gamma, l2, sums, false>(rows);
  }
  template <int n, bool centred, bool gamma, bool l2, int sums, bool first>
  TENON_INLINE void backward_as(const NormRows& rows) {
    // Only these cases can prove that no result is NaN.
    constexpr bool kMayBeClean = d != DType::bf16 || (!centred && !l2);
    if (d == DType::bf16 && !rows.clean)
      backward_as<n, centred, gamma, l2, sums, false, d != DType::bf16, first>(rows);
    else if (rows.stream)
      backward_as<n, centred, gamma, l2, sums, true, kMayBeClean, first>(rows);
    else
      backward_as<n, centred, gamma, l2, sums, false, kMayBeClean, first>(rows);
  }

  template <int n, bool centred, bool gamma, bool l2, int sums, bool stream, bool clean, bool first>
  TENON_INLINE void backward_as(const NormRows& given) {
    const NormRows rows = given;
    const int64_t full = rows.cols / kLine;
    V mean[n];
    V rstdev[n];
    V total[n];
    V second[n];
    for (int r = 0; r < n; ++r) {
      mean[r] = all(rows.mean[r]);
      rstdev[r] = all(rows.rstdev[r]);
      total[r] = all(rows.total[r]);
      second[r] = all(rows.second[r]);
    }
    const auto add = [&](float* to, int64_t i, const Line* values) TENON_ALWAYS {
      Line sum = first ? values[0] : read_vector(to, i);
      if (!first) sum = {sum.a + values[0].a, sum.b + values[0].b};
      for (int r = 1; r < n; ++r) sum = {sum.a + values[r].a, sum.b + values[r].b};
      std::memcpy(to + i * kLine, &sum, sizeof sum);
    };
    const auto lines = [&](const At* at, int64_t i, Line* out) TENON_ALWAYS {
      Line grad[n];
      Line product[n];
      for (int r = 0; r < n; ++r) {
        const Line x = read(at[r].x);
        grad[r] = read(at[r].grad);
        if constexpr (l2) {
          const Line t = times(times(x, rstdev[r] * rstdev[r]), total[r]);
          out[r] = times(Line{grad[r].a - t.a, grad[r].b - t.b}, rstdev[r]);
          continue;
        }
        const Line normal = times(from_mean<centred>(x, mean[r]), rstdev[r]);
        Line w = grad[r];
        if constexpr (gamma) w = times(w, read_vector(rows.gamma, i));
        product[r] = times(grad[r], normal);
        if constexpr (centred) w = {w.a - second[r], w.b - second[r]};
        const Line t = times(normal, total[r]);
        out[r] = times(Line{w.a - t.a, w.b - t.b}, rstdev[r]);
      }
      if constexpr (sums > 0) add(rows.dgamma, i, product);
      if constexpr (sums > 1) add(rows.dbeta, i, grad);
    };
    for (int64_t i = 0; i < full; ++i) {
      At at[n];
      Line out[n];
      for (int r = 0; r < n; ++r) {
        at[r] = {rows.x[r] + i * kLineBytes, nullptr, rows.grad[r] + i * kLineBytes};
        fetch_half<true>(rows, r, i);
      }
      lines(at, i, out);
      for (int r = 0; r < n; ++r) write<stream, clean>(rows.y[r] + i * kLineBytes, out[r]);
    }
    if (rows.cols % kLine == 0) return;
    Line out[n];
    At at[n];
    const Partial partial[2] = {Partial(rows, 0), Partial(rows, n - 1)};
    for (int r = 0; r < n; ++r) at[r] = partial[r].at();
    lines(at, full, out);
    for (int r = 0; r < n; ++r) {
      char bytes[kLineBytes];
      write<false, clean>(bytes, out[r]);
      std::memcpy(rows.y[r] + full * kLineBytes, bytes,
                  static_cast<size_t>(rows.cols % kLine * kBytes));
    }
  }

  // The position of column c in line order.
  static int64_t place(int64_t c) {
    const int64_t e = c % kLine;
    return d == DType::bf16 ? c - e + e / 2 + (e % 2) * kLanes : c;
  }
  static void to_lines(float* out, const float* in, int64_t cols) {
    for (int64_t c = cols / kLine * kLine; c < (cols + kLine - 1) / kLine * kLine; ++c)
      out[place(c)] = 0;
    for (int64_t c = 0; c < cols; ++c) out[place(c)] = in[c];
  }
  static void from_lines(float* out, const float* in, int64_t cols) {
    for (int64_t c = 0; c < cols; ++c) out[c] = in[place(c)];
  }

#undef TENON_INLINE

  // Calls f(flags as constants …). Takes the flags one by one from `bits`.
  template <class F, bool... known>
  static NormPair choose(F f) {
    return f(std::bool_constant<known>{}...);
  }
  template <class F, bool... known, class... Rest>
  static NormPair choose(F f, bool next, Rest... rest) {
    return next ? choose<F, known..., true>(f, rest...) : choose<F, known..., false>(f, rest...);
  }

  static NormPair squares_for(const NormShape& s) {
    return choose(
        [](auto c, auto r) {
          return NormPair{squares<1, c(), r()>, squares<kNormRows, c(), r()>};
        },
        s.centred, s.residual);
  }
  static NormPair forward_for(const NormShape& s) {
    return choose(
        [](auto c, auto r, auto g, auto b) {
          return NormPair{forward<1, c(), r(), g(), b()>, forward<kNormRows, c(), r(), g(), b()>};
        },
        s.centred, s.residual, s.gamma, s.beta);
  }
  static NormPair products_for(const NormShape& s) {
    if (s.l2) return {products<1, false, false, true>, products<kNormRows, false, false, true>};
    return choose(
        [](auto c, auto g) {
          return NormPair{products<1, c(), g(), false>, products<kNormRows, c(), g(), false>};
        },
        s.centred, s.gamma);
  }
  static NormPair backward_for(const NormShape& s) {
    if (s.l2)
      return {backward<1, false, false, true, 0>, backward<kNormRows, false, false, true, 0>};
    return choose(
        [](auto c, auto g, auto one, auto two) {
          constexpr int kSums = two() ? 2 : one() ? 1 : 0;
          return NormPair{backward<1, c(), g(), false, kSums>,
                          backward<kNormRows, c(), g(), false, kSums>};
        },
        s.centred, s.gamma, s.sums > 0, s.sums > 1);
  }

  static constexpr NormLoops kLoops{
      .line = kLine,
      .to_lines = to_lines,
      .from_lines = from_lines,
      .total = {total<1, false>, total<kNormRows, false>},
      .squares = squares_for,
      .forward = forward_for,
      .products = products_for,
      .backward = backward_for,
      .total_residual = {total<1, true>, total<kNormRows, true>},
  };
};

template <class tag>
constexpr NormTable make_norms() {
  return {&NormMaker<tag, DType::f32>::kLoops, &NormMaker<tag, DType::bf16>::kLoops};
}

}  // namespace tenon::cpu
