// The transcendental words: one branch-free sequence of operations each, shared by all backends.
#pragma once

namespace tenon::words {

inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kNan = __builtin_nanf("");
inline constexpr float kRound = 12582912.0f;      // adding and subtracting it rounds to an integer
inline constexpr float kPower = kRound + 127.0f;  // pow2(n + kPower) is 2^n
inline constexpr float kLog2e = 0x1.715476p+0f;
inline constexpr float kLn2 = 0x1.62e43p-1f;
// ln2 truncated, so that both parts are positive and a reduction by n = 0 keeps x = -0.
inline constexpr float kLn2Hi = 0x1.62e42ep-1f;
inline constexpr float kLn2Lo = 0x1.efa39ep-25f;
// exp rounds to 0 below -104. From -176 on the scaling multiplies by 0, which avoids slow
// underflow. exp(89) rounds to infinity, expm1(-18) to -1.
inline constexpr float kExpLow = -176.0f;
inline constexpr float kExpHigh = 89.0f;
inline constexpr float kExpm1Low = -18.0f;
// For |x| below kErfSmall, erf is a polynomial. From 4 on erf rounds to 1. From 10.1 on erfc rounds
// to 0. At 12.54 the scaling of exp(-x^2) multiplies by 0.
inline constexpr float kErfSmall = 0.375f;
inline constexpr float kErfHigh = 4.0f;
inline constexpr float kErfcHigh = 12.54f;

// Coefficients, lowest order first, printed by tools/polynomials.py. Each table has its form and
// the largest relative error of the word in exact arithmetic.
// clang-format off
struct StrictTables {
  static constexpr bool kExact = true;  // with second reduction steps and error terms
  static constexpr float kTanhSmall = 0.55f;
  static constexpr float kErfcShift = 2.0f;
  static constexpr float kErfcCentre = 0.15625f;
  // exp(r) = 1 + r + r^2 p(r): 2^-28.2
  static constexpr float kExp[] = {0x1.fffffcp-2f, 0x1.555494p-3f, 0x1.5558bep-5f, 0x1.12385ap-7f,
      0x1.6a3d14p-10f};
  // expm1(r) = r + r^2 p(r): 2^-26.1
  static constexpr float kExpm1[] = {0x1.fffffep-2f, 0x1.5554b4p-3f, 0x1.5556f6p-5f, 0x1.122532p-7f,
      0x1.6b97fap-10f};
  // log(1 + f) = f + f^2 p(f): 2^-25.0
  static constexpr float kLog[] = {-0x1.fffffap-2f, 0x1.5556fp-2f, -0x1.0004a6p-2f, 0x1.98d39ep-3f,
      -0x1.535c9p-3f, 0x1.317d22p-3f, -0x1.25030ep-3f, 0x1.65e7f4p-4f};
  // tanh(x) = x p(x^2): 2^-24.7
  static constexpr float kTanh[] = {0x1p+0f, -0x1.555452p-2f, 0x1.10cefep-3f, -0x1.af7d7cp-5f,
      0x1.0d529cp-6f};
  // erf(x) = x + x p(x^2): 2^-26.1
  static constexpr float kErf[] = {0x1.06eba6p-3f, -0x1.812658p-2f, 0x1.cdab3p-4f, -0x1.a0acbap-6f};
  // erf(x) = 1 - exp(p(x)): 2^-26.2
  static constexpr float kErfTail[] = {0x1.bb08bap-16f, -0x1.20ef2p+0f, -0x1.455becp-1f,
      -0x1.b00b3cp-4f, 0x1.787032p-6f, -0x1.a6d44ep-9f, 0x1.bf4246p-13f};
  // erfc(x) = exp(-x^2) (u + u p(u - centre)), u = 1/(x + shift): 2^-26.3
  static constexpr float kErfcTail[] = {-0x1.97be48p-3f, 0x1.fca1e8p+0f, 0x1.cbbbe4p+1f,
      0x1.d450dap+1f, -0x1.5228e6p+0f, -0x1.35b7b2p+3f, -0x1.092b2ep+2f, 0x1.2ac804p+5f,
      -0x1.047c92p+5f};
};

struct NativeTables {
  static constexpr bool kExact = false;
  static constexpr float kTanhSmall = 0.4f;
  static constexpr float kErfcShift = 2.25f;
  static constexpr float kErfcCentre = 0.15625f;
  // exp(r) = 1 + r + r^2 p(r): 2^-17.5
  static constexpr float kExp[] = {0x1.0006b4p-1f, 0x1.571cacp-3f, 0x1.522614p-5f};
  // expm1(r) = r + r^2 p(r): 2^-21.1
  static constexpr float kExpm1[] = {0x1.fffe6ep-2f, 0x1.555628p-3f, 0x1.57058p-5f, 0x1.113edp-7f};
  // log(1 + f) = f + f^2 p(f): 2^-16.9
  static constexpr float kLog[] = {-0x1.ffea5cp-2f, 0x1.54b9ecp-2f, -0x1.03f8c8p-2f, 0x1.c11526p-3f,
      -0x1.2325cep-3f};
  // tanh(x) = x p(x^2): 2^-17.0
  static constexpr float kTanh[] = {0x1p+0f, -0x1.54c6dp-2f, 0x1.f42d72p-4f};
  // erf(x) = x + x p(x^2): 2^-18.9
  static constexpr float kErf[] = {0x1.06ea78p-3f, -0x1.80db8cp-2f, 0x1.b79f04p-4f};
  // erf(x) = 1 - exp(p(x)): 2^-17.8
  static constexpr float kErfTail[] = {-0x1.b65808p-11f, -0x1.1f5d3cp+0f, -0x1.4dbefap-1f,
      -0x1.5b9bacp-4f, 0x1.57852ep-7f};
  // erfc(x) = exp(-x^2) (u + u p(u - centre)), u = 1/(x + shift): 2^-18.8
  static constexpr float kErfcTail[] = {-0x1.39dbap-3f, 0x1.41708cp+1f, 0x1.6dd8acp+2f,
      0x1.198302p+3f, 0x1.2b7798p+2f, -0x1.33aef6p+4f};
};
// clang-format on

// Results below 2^-126 must round once, so their inputs are scaled by 2^kDeep.
inline constexpr float kDeep = 100.0f;
inline constexpr float kDeepUnit = 0x1p-100f;

// x = n ln2 + r. power is 2^(n + offset).
template <class V>
struct Reduced {
  V n, r, power;
};

template <class V>
[[gnu::always_inline]] inline V round_multiple(V x, float factor) {
  return fma(x, V(factor), V(kRound)) - V(kRound);
}

// Horner's rule. Recursive, because g++ unrolls a loop too late to vectorise the outer loop.
template <int K = 0, int N, class V>
[[gnu::always_inline]] inline V polynomial(V x, const float (&c)[N]) {
  if constexpr (K == N - 1) {
    return V(c[K]);
  } else {
    return fma(polynomial<K + 1>(x, c), x, V(c[K]));
  }
}

// |r| <= ln2/2 for either constant ln2. The fma is exact.
template <class V>
[[gnu::always_inline]] inline Reduced<V> reduce_once(V x, float ln2, float offset = 0.0f) {
  V shifted = fma(x, V(kLog2e), V(kPower + offset));
  V n = shifted - V(kPower + offset);
  return {n, fma(n, V(-ln2), x), pow2(shifted)};
}

// p 2^n for 2^-5 < p < 2 and n in [-254, 128]. The first product is exact if the result is not 0,
// so p 2^n rounds once.
template <class V>
[[gnu::always_inline]] inline V scale(V p, V n) {
  V h = round_multiple(n, 0.5f);
  return (p * pow2(h + V(kPower))) * pow2(n - h + V(kPower));
}

// Both precisions of every word. T holds the coefficients and selects the error terms. The largest
// errors over all fp32 arguments, strict in ulp and native relative:
//   exp      0.90  2^-17.4    expm1  1.57  2^-20.3    log  1.14  2^-16.8    log1p  1.76  2^-16.8
//   sigmoid  2.48  2^-17.4    tanh   1.72  2^-16.9    erf  2.32  2^-17.0    erfc   2.37  2^-16.4
template <class T>
struct Words {
  template <class V>
  [[gnu::always_inline]] static inline V exp(V x) {
    auto reduced = reduce(min(max(x, V(kExpLow)), V(kExpHigh)));
    return scale(exp_reduced(reduced.r), reduced.n);
  }

  template <class V>
  [[gnu::always_inline]] static inline V expm1(V x) {
    // Half of 2^n (1 + t) - 1, because 2^128 overflows.
    auto [n, r, half] = reduce(min(max(x, V(kExpm1Low)), V(kExpHigh)), -1.0f);
    V t = expm1_reduced(r);
    V y = fma(t, half, half - V(0.5f));
    return select(n == V(0.0f), t, y + y);
  }

  template <class V>
  [[gnu::always_inline]] static inline V log(V x) {
    auto subnormal = x < V(0x1p-126f);
    V scaled = select(subnormal, x * V(0x1p23f), x);
    V e = exponent(scaled) - select(subnormal, V(23.0f), V(0.0f));
    return log_tail(x, e, mantissa(scaled) - V(1.0f));
  }

  template <class V>
  [[gnu::always_inline]] static inline V log1p(V x) {
    V one = V(1.0f);
    V u = one + x;
    V lost = min(x, one) - (u - max(x, one));  // u + lost is 1 + x exactly
    V e = exponent(u);
    // 2^-128 is not available in this form. There `lost` does not matter.
    V f = fma(lost, pow2(max(-e, V(-127.0f)) + V(kPower)), mantissa(u) - one);
    return select(u == one, x, log_tail(u, e, f));
  }

  template <class V>
  [[gnu::always_inline]] static inline V sigmoid(V x) {
    // |0 - tail| or |1 - tail|: sigmoid(x) and sigmoid(-x) differ only in this line.
    return abs(fma(deep_tail(abs(x)), V(-kDeepUnit), select(x < V(0.0f), V(0.0f), V(1.0f))));
  }

  template <class V>
  [[gnu::always_inline]] static inline V tanh(V x) {
    V small = x * polynomial(x * x, T::kTanh);
    V large = fma(deep_tail(abs(x + x)), V(-2.0f * kDeepUnit), V(1.0f));
    return select(abs(x) < V(T::kTanhSmall), small, with_sign(large, x));
  }

  template <class V>
  [[gnu::always_inline]] static inline V erf(V x) {
    // log(erfc) is a polynomial here. erfc scales its error down, so one reduction step is enough.
    V a = abs(x);
    auto [n, r, power] = reduce_once(polynomial(min(a, V(kErfHigh)), T::kErfTail), kLn2);
    V large = fma(-exp_reduced(r), power, V(1.0f));
    return select(a < V(kErfSmall), erf_small(x), with_sign(large, x));
  }

  template <class V>
  [[gnu::always_inline]] static inline V erfc(V x) {
    V a = abs(x);
    V tail = erfc_tail(min(a, V(kErfcHigh)));
    V large = select(x < V(0.0f), V(2.0f) - tail, tail);
    return select(a < V(kErfSmall), V(1.0f) - erf_small(x), large);
  }

 protected:  // also used by hardware words
  template <class V>
  [[gnu::always_inline]] static inline V with_sign(V y, V x) {
    return select(x < V(0.0f), -y, y);
  }

  template <class V>
  [[gnu::always_inline]] static inline Reduced<V> reduce(V x, float offset = 0.0f) {
    if constexpr (!T::kExact) return reduce_once(x, kLn2, offset);
    auto [n, r, power] = reduce_once(x, kLn2Hi, offset);
    return {n, fma(n, V(-kLn2Lo), r), power};
  }

  template <class V>
  [[gnu::always_inline]] static inline V exp_reduced(V r) {
    V one = V(1.0f);
    return fma(fma(polynomial(r, T::kExp), r, one), r, one);
  }

  // r + r^2 p(r). Adding zero keeps r = -0.
  template <class V>
  [[gnu::always_inline]] static inline V expm1_reduced(V r) {
    return fma(fma(polynomial(r, T::kExpm1), r, V(0.0f)), r, r);
  }

  // 2^kDeep sigmoid(-a) for a >= 0. sigmoid(-a) rounds to 0 from 104 on. At 156 the scaled value is
  // still normal.
  template <class V>
  [[gnu::always_inline]] static inline V deep_tail(V a) {
    auto [n, r, power] = reduce(min(a, V(156.0f)), -kDeep);
    return inverse(fma(exp_reduced(r), power, V(kDeepUnit)));
  }

  // log x = e ln2 + log(1 + f). kLn2 is accurate enough for every e.
  template <class V>
  [[gnu::always_inline]] static inline V log_tail(V x, V e, V f) {
    V y = fma(e, V(kLn2), fma(polynomial(f, T::kLog), f * f, f));
    V outside = select(x == V(0.0f), V(-kInfinity), V(kNan));
    return select(x > V(0.0f), select(x < V(kInfinity), y, x), outside);
  }

  template <class V>
  [[gnu::always_inline]] static inline V erf_small(V x) {
    return fma(polynomial(x * x, T::kErf), x, x);
  }

  // exp(-a^2) (u + u p(u - centre)) with u = 1/(a + shift). The rounding errors of a^2 and u are
  // added to the reduced argument of exp: a relative error of the product is an absolute error
  // there.
  template <class V>
  [[gnu::always_inline]] static inline V erfc_tail(V a) {
    V d = a + V(T::kErfcShift);
    V u = inverse(d);
    V g = fma(polynomial(u - V(T::kErfcCentre), T::kErfcTail), u, u);
    V square = a * a;
    if constexpr (!T::kExact) {
      auto [n, r, power] = reduce(-square, kDeep);
      return (g * exp_reduced(r) * V(kDeepUnit)) * power;
    }
    auto [n, r, power] = reduce_once(-square, kLn2Hi, kDeep);
    V lost = a - (d - V(T::kErfcShift));
    V error = fma(-u, lost, fma(-u, d, V(1.0f)));
    V slope = fma(u, V(2.75f), V(1.0f));  // about d log(u + u p) / d log u
    V rest = fma(error, slope, -fma(a, a, -square));
    V p = fma(g, expm1_reduced(r + fma(n, V(-kLn2Lo), rest)), g);
    return (p * V(kDeepUnit)) * power;
  }
};

struct Strict : Words<StrictTables> {};
struct Native : Words<NativeTables> {};

}  // namespace tenon::words
