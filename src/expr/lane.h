// One fp32 value with the operations of words, as one lane of any backend computes them.
#pragma once

#include <cstdint>

#include "tenon/expr.h"

namespace tenon {

// The tag makes the instantiations of each instruction set distinct functions for the linker.
template <class tag>
struct Lane {
  float v = 0;
  constexpr explicit Lane(float value) : v(value) {}
  constexpr Lane() = default;
};

template <class t>
[[gnu::always_inline]] inline uint32_t bits(Lane<t> a) {
  return __builtin_bit_cast(uint32_t, a.v);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> from_bits(uint32_t b) {
  return Lane<t>(__builtin_bit_cast(float, b));
}

template <class t>
[[gnu::always_inline]] inline Lane<t> operator+(Lane<t> a, Lane<t> b) {
  return Lane<t>(a.v + b.v);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> operator-(Lane<t> a, Lane<t> b) {
  return Lane<t>(a.v - b.v);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> operator*(Lane<t> a, Lane<t> b) {
  return Lane<t>(a.v * b.v);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> operator/(Lane<t> a, Lane<t> b) {
  return Lane<t>(a.v / b.v);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> operator-(Lane<t> a) {
  return from_bits<t>(bits(a) ^ 0x80000000U);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> fma(Lane<t> a, Lane<t> b, Lane<t> c) {
  return Lane<t>(__builtin_fmaf(a.v, b.v, c.v));
}
template <class t>
[[gnu::always_inline]] inline Lane<t> abs(Lane<t> a) {
  return from_bits<t>(bits(a) & 0x7fffffffU);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> sqrt(Lane<t> a) {
  return Lane<t>(__builtin_sqrtf(a.v));
}

// IEEE 754-2019 minimum and maximum: a NaN propagates, and −0 < +0 (equal values differ only in
// sign).
template <class t>
[[gnu::always_inline]] inline Lane<t> min(Lane<t> a, Lane<t> b) {
  const float ordered = a.v < b.v ? a.v : b.v;
  const float zeros = a.v == b.v ? from_bits<t>(bits(a) | bits(b)).v : ordered;
  return Lane<t>(a.v != a.v ? a.v : zeros);
}
template <class t>
[[gnu::always_inline]] inline Lane<t> max(Lane<t> a, Lane<t> b) {
  const float ordered = a.v > b.v ? a.v : b.v;
  const float zeros = a.v == b.v ? from_bits<t>(bits(a) & bits(b)).v : ordered;
  return Lane<t>(a.v != a.v ? a.v : zeros);
}

template <class t>
[[gnu::always_inline]] inline bool operator<(Lane<t> a, Lane<t> b) {
  return a.v < b.v;
}
template <class t>
[[gnu::always_inline]] inline bool operator<=(Lane<t> a, Lane<t> b) {
  return a.v <= b.v;
}
template <class t>
[[gnu::always_inline]] inline bool operator>(Lane<t> a, Lane<t> b) {
  return a.v > b.v;
}
template <class t>
[[gnu::always_inline]] inline bool operator>=(Lane<t> a, Lane<t> b) {
  return a.v >= b.v;
}
template <class t>
[[gnu::always_inline]] inline bool operator==(Lane<t> a, Lane<t> b) {
  return a.v == b.v;
}
template <class t>
[[gnu::always_inline]] inline bool operator!=(Lane<t> a, Lane<t> b) {
  return a.v != b.v;
}
template <class t>
[[gnu::always_inline]] inline Lane<t> select(bool c, Lane<t> a, Lane<t> b) {
  return Lane<t>(c ? a.v : b.v);
}

// 1 ÷ x for x in [2^−125, 2^126). In this range a GPU does not need the slow path of a division.
template <class t>
[[gnu::always_inline]] inline Lane<t> inverse(Lane<t> x) {
  return Lane<t>(1.0F / x.v);
}
// 2^n from n + 1.5·2^23 + 127, whose low bits are n + 127, for an integer n in [−127, 128].
template <class t>
[[gnu::always_inline]] inline Lane<t> pow2(Lane<t> n) {
  return from_bits<t>(bits(n) << 23);
}
// x = mantissa·2^exponent with the mantissa in [√½, √2), for positive normal x.
template <class t>
[[gnu::always_inline]] inline int32_t exponent_bits(Lane<t> x) {
  return static_cast<int32_t>(bits(x) - 0x3f3504f3U) >> 23;
}
template <class t>
[[gnu::always_inline]] inline Lane<t> exponent(Lane<t> x) {
  return Lane<t>(static_cast<float>(exponent_bits(x)));
}
template <class t>
[[gnu::always_inline]] inline Lane<t> mantissa(Lane<t> x) {
  return from_bits<t>(bits(x) - (static_cast<uint32_t>(exponent_bits(x)) << 23));
}

template <Rel rel, class t>
[[gnu::always_inline]] inline bool compare(Lane<t> a, Lane<t> b) {
  if constexpr (rel == Rel::lt) return a.v < b.v;
  if constexpr (rel == Rel::le) return a.v <= b.v;
  if constexpr (rel == Rel::gt) return a.v > b.v;
  if constexpr (rel == Rel::ge) return a.v >= b.v;
  if constexpr (rel == Rel::eq) return a.v == b.v;
  return a.v != b.v;
}

}  // namespace tenon
