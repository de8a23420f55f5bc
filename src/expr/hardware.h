// Functions in native precision from a processor's 2^x, log2 x and 1/x. These err by a few ulp and
// flush fp32 subnormals to 0. Every sequence avoids subnormals.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>

#include "expr/lower.h"
#include "expr/word.h"

namespace tenon::hardware {

// A lowered graph has no transcendental words left, so three of them can represent the hardware
// words.
inline constexpr Word kEx2 = Word::exp, kLg2 = Word::log, kRcp = Word::sigmoid;

inline std::string_view name_of(Word w) {
  return w == kEx2 ? "ex2" : w == kLg2 ? "lg2" : w == kRcp ? "rcp" : info(w).name;
}

inline Expr own(Word w, Expr x, bool rough) {
  if (!x.is_constant())
    return x.graph()->intern({.word = w, .detail = uint8_t{rough}, .in = {x.id()}});
  const float v = x.constant();
  return w == kEx2 ? std::exp2(v) : w == kLg2 ? std::log2(v) : 1 / v;
}
// A rough function may err by kRoughEx2 or kRoughRcp.
inline Expr ex2(Expr x, bool rough = false) { return own(kEx2, x, rough); }
inline Expr lg2(Expr x) { return own(kLg2, x, false); }
inline Expr rcp(Expr x, bool rough = false) { return own(kRcp, x, rough); }
inline bool is_rough(const Node& n) { return n.detail != 0; }

inline constexpr double kRoughEx2 = 0x1p-13 * 0.63;  // 2^-13.67, rounding included
inline constexpr double kRoughRcp = 0x1p-14;
// Results that may err by this much allow rough functions and short tables.
inline constexpr double kRoughError = 0x1p-12 * 0.7;

inline const Node& node(Expr e) { return (*e.graph())[e.id()]; }
inline Expr input(Expr e, int i) { return {e.graph(), node(e).in[static_cast<size_t>(i)]}; }
inline bool is(Expr e, Word w) { return e.graph() && node(e).word == w; }

// A product with a constant: the constant and the other factor.
struct Multiple {
  float factor;
  Expr of;
};
inline std::optional<Multiple> multiple(Expr e) {
  if (!is(e, Word::mul)) return std::nullopt;
  for (const int i : {0, 1})
    if (input(e, i).is_constant()) return Multiple{input(e, i).constant(), input(e, 1 - i)};
  return std::nullopt;
}

// min(x, most). Of two limits, the smaller one.
inline Expr limited_to(Expr x, float most) {
  if (is(x, Word::min) && input(x, 1).is_constant() && input(x, 1).constant() >= most)
    return min(input(x, 0), most);
  return min(x, most);
}

// x·f. Constants of x are folded into f: the exponent's error is far smaller than the allowed
// error.
inline Expr scaled(Expr x, float f) {
  for (;;) {
    const auto m = multiple(x);
    const float joined = f * (m ? m->factor : -1);
    if (!m && !is(x, Word::neg)) break;
    if (!(std::fabs(joined) > 0x1p-60F && std::fabs(joined) < 0x1p60F)) return x * f;
    f = joined;
    x = m ? m->of : input(x, 0);
  }
  // a + c·(b·a), as in gelu: saves one product.
  if (is(x, Word::add))
    if (const auto m = multiple(input(x, 1)); m && is(m->of, Word::mul))
      for (const int i : {0, 1})
        if (const Expr a = input(x, 0); input(m->of, i).id() == a.id())
          return a * fma(input(m->of, 1 - i), f * m->factor, f);
  return x * f;
}

inline constexpr float kLog2e = words::kLog2e, kLn2 = words::kLn2;
inline constexpr float kLogSmall = 0x1p-5F;  // below it the absolute error of lg2 is too large

// The sum of c[i]·(k·x)^i·f, and of the next power with coefficient 1 if `monic`.
template <size_t N>
Expr polynomial(Expr x, const std::array<float, N>& c, double k, double f, bool monic) {
  double power = f * std::pow(k, monic ? N : N - 1);
  size_t i = N - 1;
  Expr sum = static_cast<float>(monic ? power : power * c[i]);
  for (i = monic ? N : N - 1; i-- > 0;) {
    power /= k;
    const auto term = static_cast<float>(power * c[i]);
    sum = sum.is_constant() && sum.constant() == 1 ? x + term : fma(sum, x, term);
  }
  return sum;
}

// Coefficients, lowest order first, printed by tools/polynomials.py.
// clang-format off
struct ExactTables {
  // erfc(x) = exp(-x^2) p(x) / q(x): 2^-24.5
  static constexpr std::array kErfcOver{0x1.114f7cp+4f, 0x1.5304c2p+4f, 0x1.9115dp+3f, 0x1.f77a42p+1f,
      0x1.20de4cp-1f};
  static constexpr std::array kErfcUnder{0x1.114f7cp+4f, 0x1.43b552p+5f, 0x1.48e15ep+5f, 0x1.6b567ap+4f,
      0x1.be3924p+2f};
  // log1p(x) = x p(x) on [0, 1]: 2^-27.5
  static constexpr float kLog1p[] = {0x1p+0f, -0x1.ffffd2p-2f, 0x1.554ddp-2f, -0x1.ff23e6p-3f,
      0x1.934b58p-3f, -0x1.3a4382p-3f, 0x1.b4af02p-4f, -0x1.d6b3d4p-5f, 0x1.491d28p-6f,
      -0x1.af5768p-9f};
};
template <bool kRough>
struct HardwareTables {
  // tanh(x) = x p(x^2) / q(x^2) up to kTanhHigh, and 1 from there on: 2^-16.8
  static constexpr float kTanhHigh = 6;
  static constexpr std::array kTanhOver{0x1.1d204cp+14f, 0x1.051cb4p+11f, 0x1.b36fe6p+4f};
  static constexpr std::array kTanhUnder{0x1.1d20f4p+14f, 0x1.fea8ccp+12f, 0x1.3ee2acp+8f};
  // erfc(x) = exp(-x^2) p(x) / q(x): 2^-21.0
  static constexpr std::array kErfcOver{0x1.7344fp+2f, 0x1.7d36cep+2f, 0x1.64d42ap+1f, 0x1.20d564p-1f};
  static constexpr std::array kErfcUnder{0x1.7344fap+2f, 0x1.901184p+3f, 0x1.630eeep+3f, 0x1.3c0718p+2f};
  // log1p(x) = x p(x) on [0, 1]: 2^-19.6
  static constexpr float kLog1p[] = {0x1.ffffd6p-1f, -0x1.ffddf4p-2f, 0x1.530b6ap-2f, -0x1.e162a2p-3f,
      0x1.31a77p-3f, -0x1.100d1cp-4f, 0x1.cf8b2p-7f};
};
template <>
struct HardwareTables<true> {
  // The same: 2^-14.1, 2^-15.3, 2^-14.1
  static constexpr float kTanhHigh = 4.9F;
  static constexpr std::array kTanhOver{0x1.387d0cp+6f, 0x1.ffb09p+2f, 0x1.ac5fa8p-5f};
  static constexpr std::array kTanhUnder{0x1.38817cp+6f, 0x1.1016b4p+5f};
  static constexpr std::array kErfcOver{0x1.201646p+1f, 0x1.c64c9cp+0f, 0x1.212e1p-1f};
  static constexpr std::array kErfcUnder{0x1.201474p+1f, 0x1.14433p+2f, 0x1.957d66p+1f};
  static constexpr float kLog1p[] = {0x1.fff89p-1f, -0x1.fce7b8p-2f, 0x1.39a6e2p-2f, -0x1.4268fep-3f,
      0x1.52b724p-5f};
};
// clang-format on

// The range of a value that is not NaN.
struct Range {
  float low = -words::kInfinity, high = words::kInfinity;
  [[nodiscard]] bool within(float a, float b) const { return low >= a && high <= b; }
};
inline Range range(Expr e, int depth = 8) {
  if (e.is_constant()) return {e.constant(), e.constant()};
  if (depth == 0) return {};
  const auto in = [&](int i) { return range(input(e, i), depth - 1); };
  switch (node(e).word) {
    case Word::min:
      return {std::min(in(0).low, in(1).low), std::min(in(0).high, in(1).high)};
    case Word::max:
      return {std::max(in(0).low, in(1).low), std::max(in(0).high, in(1).high)};
    case Word::add:
      return {in(0).low + in(1).low, in(0).high + in(1).high};
    case Word::mul:
      // Squares. In these formulas they come from exp, which squares 2^(x/2).
      if (node(e).in[0] == node(e).in[1])
        return {0, std::max(in(0).low * in(0).low, in(0).high * in(0).high)};
      if (const auto m = multiple(e); m && m->factor > 0) {
        const Range r = range(m->of, depth - 1);
        return {r.low * m->factor, r.high * m->factor};
      }
      return {};
    case kEx2:
      return {0, std::exp2(in(0).high)};
    default:
      return {};
  }
}

// The sequences of strict precision, and shorter ones for some compositions. All are IEEE
// operations, which err less than the formula may.
struct Exact : words::Strict {
  static constexpr bool kIeee = true;
  using Tables = ExactTables;

  static Expr reciprocal(Expr x) { return inverse(x); }
  // exp(min(x, most))
  static Expr exp_up_to(Expr x, float most) {
    const Expr y = limited_to(x, most);
    return exp_within(range(y).low >= words::kExpLow ? y : max(y, words::kExpLow));
  }
  static Expr log1p_exp(Expr x) {
    const Expr e = exp_within(-min(abs(x), -words::kExpLow));
    return fma(e, words::polynomial(e, Tables::kLog1p), max(x, -0.0F));
  }
  // As HardwareOf. k·a has the rounding error of the formula's argument.
  static Expr erfc_ratio(Expr a, double k, double f) {
    const Expr x = a * static_cast<float>(k);
    return polynomial(x, Tables::kErfcOver, 1, f, false) /
           polynomial(x, Tables::kErfcUnder, 1, 1, true);
  }
  // The rounding error of the square is added to the reduced argument.
  static Expr times_exp_square(Expr g, Expr a, double k) {
    const Expr x = a * static_cast<float>(k), square = x * x;
    const auto [n, r, power] = words::reduce_once(-square, words::kLn2Hi);
    const Expr rest = fma(x, x, -square);
    const Expr less = expm1_reduced(r + fma(n, Expr(-words::kLn2Lo), -rest));
    return words::scale(fma(g, less, g), n);
  }

 private:
  // exp(x) for x in [kExpLow, kExpHigh]
  static Expr exp_within(Expr x) {
    const auto reduced = reduce(x);
    return words::scale(exp_reduced(reduced.r), reduced.n);
  }
};

// As words::Words. A polynomial remains only near a zero of the function.
template <bool kRough>
struct HardwareOf : words::Words<words::NativeTables> {
  static constexpr bool kIeee = false;
  using Tables = HardwareTables<kRough>;

  static Expr reciprocal(Expr x) { return rcp(x, kRough); }
  // exp(min(x, most))
  static Expr exp_up_to(Expr x, float most) { return exp(limited_to(x, most)); }

  // Squaring reaches subnormal results.
  static Expr exp(Expr x) {
    const Expr half = ex2(scaled(x, kLog2e / 2), kRough);
    return half * half;
  }
  static Expr expm1(Expr x) {
    return select(abs(x) < kLn2 / 2, expm1_reduced(x), ex2(scaled(x, kLog2e)) - 1.0F);
  }
  static Expr log(Expr x) {
    const Expr f = x - 1.0F;
    return select(abs(f) < kLogSmall, log1p_small(f), lg2(x) * kLn2);
  }
  static Expr log1p(Expr x) {
    return select(abs(x) < kLogSmall, log1p_small(x), lg2(x + 1.0F) * kLn2);
  }
  // exp(-|x|)
  static Expr exp_below(Expr x) {
    const Expr t = scaled(x, kLog2e / 2);
    const auto m = multiple(t);
    const Expr half = ex2(m ? abs(m->of) * -std::fabs(m->factor) : -abs(t), kRough);
    return half * half;
  }
  // log1p(exp(x)) = max(x, 0) + log1p(exp(-|x|))
  static Expr log1p_exp(Expr x) {
    const Expr e = exp_below(x);
    return fma(e, words::polynomial(e, Tables::kLog1p), max(x, -0.0F));
  }
  // 1/(1 + 2^t). 2^t may reach 2^150, because numerator and denominator are scaled by kLess.
  static constexpr float kLess = 0x1p-24F;
  static Expr sigmoid_over_less(Expr x) { return rcp(ex2(scaled(x, -kLog2e) + -24.0F) + kLess); }
  static Expr sigmoid(Expr x) { return sigmoid_over_less(x) * kLess; }
  static Expr tanh(Expr x) {
    const Expr y = clamp(x, -Tables::kTanhHigh, Tables::kTanhHigh);
    const Expr square = y * y;
    const Expr under = polynomial(square, Tables::kTanhUnder, 1, 1, true);
    return y * polynomial(square, Tables::kTanhOver, 1, 1, false) * rcp(under, kRough);
  }
  static Expr erf(Expr x) {
    const Expr a = abs(x);
    const Expr p = words::polynomial(min(a, words::kErfHigh), words::NativeTables::kErfTail);
    const Expr large = 1.0F - ex2(p * kLog2e);
    return select(a < words::kErfSmall, erf_small(x), with_sign(large, x));
  }
  static Expr erfc(Expr x) {
    const Expr a = min(abs(x), words::kErfcHigh);
    const Expr tail = times_exp_square(erfc_ratio(a, 1, 1), a, 1);
    return select(x < 0.0F, 2.0F - tail, tail);
  }
  // f·erfc(k·a)/exp(−(k·a)²) for a >= 0, and g·exp(−(k·a)²).
  static Expr erfc_ratio(Expr a, double k, double f) {
    const double less = std::pow(k, -static_cast<double>(Tables::kErfcUnder.size()));
    return polynomial(a, Tables::kErfcOver, k, f * less, false) *
           rcp(polynomial(a, Tables::kErfcUnder, k, less, true), kRough);
  }
  static Expr times_exp_square(Expr g, Expr a, double k) {
    const Expr half = ex2(a * a * static_cast<float>(-k * k * kLog2e / 2), kRough);
    return g * (half * half);
  }

 private:
  static Expr log1p_small(Expr x) {
    const Expr p = fma(fma(x, -0.25F, 1.0F / 3), x, -0.5F);
    return fma(x * x, p, x);
  }
};

// Division by a constant: a correctly rounded quotient from the rounded reciprocal.
inline Expr quotient(Expr a, float b) {
  const float inverse = 1 / b;
  const Expr q = a * inverse;
  const Expr better = fma(fma(q, -b, a), inverse, q);
  if (range(a).within(-0x1p60F, 0x1p60F)) return better;
  return select(abs(q) < words::kInfinity, better, q);
}
inline bool divides(float b) { return std::fabs(b) > 0x1p-60F && std::fabs(b) < 0x1p60F; }

// A quotient with an error of a few ulp, for all values.
inline Expr rough_quotient(Expr a, Expr b) {
  if (range(b).within(0x1p-64F, 0x1p64F)) return a * rcp(b);
  const Expr up = select(abs(b) < 0x1p-64F, 0x1p64F, 1.0F);
  const Expr scale = select(abs(b) > 0x1p64F, 0x1p-64F, up);
  return a * rcp(b * scale) * scale;
}

}  // namespace tenon::hardware
