// Functions in native precision from a processor's 2^x, log2 x and 1/x. These err by a few ulp and
// flush fp32 subnormals to 0. Every sequence avoids subnormals.
#pragma once

#include <algorithm>
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

inline Expr own(Word w, Expr x) {
  if (!x.is_constant()) return x.graph()->intern({.word = w, .in = {x.id()}});
  const float v = x.constant();
  return w == kEx2 ? std::exp2(v) : w == kLg2 ? std::log2(v) : 1 / v;
}
inline Expr ex2(Expr x) { return own(kEx2, x); }
inline Expr lg2(Expr x) { return own(kLg2, x); }
inline Expr rcp(Expr x) { return own(kRcp, x); }

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

// As words::Words. A polynomial remains only near a zero of the function.
struct Hardware : words::Words<words::NativeTables> {
  // Squaring reaches subnormal results.
  static Expr exp(Expr x) {
    const Expr half = ex2(scaled(x, kLog2e / 2));
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
  // 1/(1 + 2^t). 2^t may reach 2^150, because numerator and denominator are scaled by kLess.
  static constexpr float kLess = 0x1p-24F;
  static Expr sigmoid_over_less(Expr x) { return rcp(ex2(scaled(x, -kLog2e) + -24.0F) + kLess); }
  static Expr sigmoid(Expr x) { return sigmoid_over_less(x) * kLess; }
  static Expr tanh(Expr x) {
    return tanh_of(x, fma(-2.0F, rcp(ex2(scaled(x, 2 * kLog2e)) + 1.0F), 1.0F));
  }
  static Expr tanh_of(Expr x, Expr large) {
    const Expr small = x * words::polynomial(x * x, words::NativeTables::kTanh);
    return select(abs(x) < words::NativeTables::kTanhSmall, small, large);
  }
  static Expr erf(Expr x) {
    const Expr a = abs(x);
    const Expr p = words::polynomial(min(a, words::kErfHigh), words::NativeTables::kErfTail);
    const Expr large = 1.0F - ex2(p * kLog2e);
    return select(a < words::kErfSmall, erf_small(x), with_sign(large, x));
  }
  static Expr erfc(Expr x) {
    const Expr a = abs(x);
    const Expr u = rcp(a + words::NativeTables::kErfcShift);
    const Expr p =
        words::polynomial(u - words::NativeTables::kErfcCentre, words::NativeTables::kErfcTail);
    const Expr tail = fma(p, u, u) * exp(-(a * a));
    const Expr large = select(x < 0.0F, 2.0F - tail, tail);
    return select(a < words::kErfSmall, 1.0F - erf_small(x), large);
  }

 private:
  static Expr log1p_small(Expr x) {
    const Expr p = fma(fma(x, -0.25F, 1.0F / 3), x, -0.5F);
    return fma(x * x, p, x);
  }
};

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
