// The rules that compute a scale from an amax. Plain IEEE fp32, the same on every device.
#pragma once

#include "tenon/format.h"

namespace tenon {

// Scaled values beyond this are clamped to the largest value, not rounded. It is half a step above
// the largest value.
constexpr float saturation_threshold(DType dtype) {
  const DTypeInfo& f = info(dtype);
  const int exponent = static_cast<int>(__builtin_bit_cast(uint32_t, f.max) >> 23) - 127;
  return f.max + power_of_two(exponent - f.mantissa_bits - 1);
}
static_assert(saturation_threshold(DType::e4m3) == 464);
static_assert(saturation_threshold(DType::e5m2) == 61440);

// The multiplier of a block or tensor, and its stored inverse.
struct Scale {
  float multiplier = 1;
  uint32_t inverse = 0;  // code of scale_inv in the mode's dtype
};

constexpr uint32_t kMagnitude = 0x7fffffffU;
constexpr uint32_t kInfinity = 0x7f800000U;

// The rules are inlined and without branches, so that loops over blocks use the vectors of each
// instruction set.

// A given multiplier, for delayed scaling.
[[gnu::always_inline]] constexpr Scale scale_given(float multiplier) {
  return {multiplier, __builtin_bit_cast(uint32_t, 1.0F / multiplier)};
}

// For `current` and `block`. amax is the integer maximum of the bits of |v|.
[[gnu::always_inline]] constexpr Scale scale_fp32(uint32_t amax_bits, DType dtype, float eps,
                                                  bool power_of_two) {
  constexpr float kLargest = info(DType::f32).max;
  const float most = info(dtype).max;
  const float amax = __builtin_bit_cast(float, amax_bits);
  const float floored = amax < eps ? eps : amax;
  const bool usable = floored > 0 && floored <= kLargest;
  const float scale = most / (usable ? floored : most);  // 1 without an amax
  const float finite = scale > kLargest ? kLargest : scale;
  const uint32_t kept = power_of_two ? kInfinity : ~0U;
  return scale_given(__builtin_bit_cast(float, __builtin_bit_cast(uint32_t, finite) & kept));
}

// For `mxfp8`: the power of two that brings amax just below the largest value, rounded up.
[[gnu::always_inline]] constexpr Scale scale_e8m0(uint32_t amax_bits, DType dtype) {
  const float p = __builtin_bit_cast(float, amax_bits) * (1.0F / info(dtype).max);
  const uint32_t e = encode<DType::e8m0>(p);
  // 2^(127−e): the exponent field is 254 − e. e = 254 gives the subnormal 2^−127.
  const uint32_t power = e == 254 ? 0x00400000U : (254 - e) << 23;
  const uint32_t bits = e == info(DType::e8m0).nan ? 0x7fc00000U : power;
  return {__builtin_bit_cast(float, bits), e};
}

// The scale of one block, for modes that compute their own scales.
constexpr Scale scale_of(uint32_t amax_bits, const Format& f) {
  return info(f.scaling).scale == DType::e8m0 ? scale_e8m0(amax_bits, f.dtype)
                                              : scale_fp32(amax_bits, f.dtype, f.eps, f.powers());
}

// The delayed update: the scale for an amax, or the old scale if the amax is 0 or not finite.
constexpr float scale_delayed(float amax, float old, DType dtype, int margin) {
  constexpr float kLargest = info(DType::f32).max;
  if (!(amax > 0) || amax > kLargest) return old;
  const float scale = info(dtype).max * power_of_two(-margin) / amax;
  return scale > kLargest ? kLargest : scale;
}

}  // namespace tenon
