// The number formats, one table row each, with exact conversions from and to fp32.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace tenon {

enum class DType : uint8_t { f32, f16, bf16, e4m3, e5m2, e8m0 };

struct DTypeInfo {
  std::string_view name;
  int bytes;
  int exponent_bits, mantissa_bits, bias;
  uint32_t largest;  // code of the largest finite value
  uint32_t nan;      // the NaN that a conversion writes
  float max;         // the largest finite value
  bool saturates;    // overflow gives the largest finite value, not infinity
  bool plain;        // may be read and written without a scale
};

inline constexpr std::array<DTypeInfo, 6> kDTypes{{
    {"f32", 4, 8, 23, 127, 0x7f7fffff, 0x7fc00000, 0x1.fffffep127F, false, true},
    {"f16", 2, 5, 10, 15, 0x7bff, 0x7e00, 65504.0F, false, true},
    {"bf16", 2, 8, 7, 127, 0x7f7f, 0x7fc0, 0x1.fep127F, false, true},
    {"e4m3", 1, 4, 3, 7, 0x7e, 0x7f, 448.0F, true, false},
    {"e5m2", 1, 5, 2, 15, 0x7b, 0x7f, 57344.0F, true, false},
    {"e8m0", 1, 8, 0, 127, 0xfe, 0xff, 0x1p127F, true, false},
}};

constexpr size_t index(DType d) { return static_cast<size_t>(d); }
constexpr const DTypeInfo& info(DType d) { return kDTypes[index(d)]; }

constexpr std::optional<DType> dtype_named(std::string_view name) {
  for (size_t i = 0; i < kDTypes.size(); ++i)
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  return std::nullopt;
}

// The unsigned integer type of one element.
template <DType d>
using Storage = std::conditional_t<info(d).bytes == 4, uint32_t,
                                   std::conditional_t<info(d).bytes == 2, uint16_t, uint8_t>>;

// 2^n for a normal fp32 result. A constant expression, unlike std::ldexp.
constexpr float power_of_two(int n) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(n + 127) << 23);
}

// Conversions are always inlined: they are compiled once per instruction set. A shared out-of-line
// copy could run on processors without that instruction set.
template <DType d>
[[gnu::always_inline]] constexpr float decode(uint32_t code) {
  constexpr DTypeInfo kFormat = info(d);
  if constexpr (d == DType::f32) {
    return __builtin_bit_cast(float, code);
  } else if constexpr (d == DType::e8m0) {
    const uint32_t bits = code == 0 ? 0x00400000U : code == kFormat.nan ? 0x7fc00000U : code << 23;
    return __builtin_bit_cast(float, bits);
  } else {
    constexpr int kShift = 23 - kFormat.mantissa_bits;
    constexpr uint32_t kSign = 1U << (kFormat.exponent_bits + kFormat.mantissa_bits);
    constexpr uint32_t kInfinity = kFormat.largest + 1;
    const uint32_t mag = code & (kSign - 1);
    uint32_t bits = (mag << kShift) + (static_cast<uint32_t>(127 - kFormat.bias) << 23);
    if constexpr (kFormat.bias != 127) {
      const float small = static_cast<float>(static_cast<int32_t>(mag)) *
                          power_of_two(1 - kFormat.bias - kFormat.mantissa_bits);
      const bool subnormal = mag < (1U << kFormat.mantissa_bits);
      bits = subnormal ? __builtin_bit_cast(uint32_t, small) : bits;
    }
    if constexpr (d == DType::e4m3)
      bits = mag == kFormat.nan ? 0x7fc00000U : bits;  // no infinity, one NaN
    else
      bits = mag >= kInfinity ? 0x7f800000U | ((mag - kInfinity) << kShift) : bits;
    return __builtin_bit_cast(float, bits | ((code & kSign) ? 0x80000000U : 0U));
  }
}

// Rounds to nearest even. Exception: e8m0 gives the smallest power of two that is at least |v|, for
// MXFP8 scales.
template <DType d>
[[gnu::always_inline]] constexpr uint32_t encode(float v) {
  constexpr DTypeInfo kFormat = info(d);
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  const uint32_t mag = bits & 0x7fffffffU;
  if constexpr (d == DType::f32) {
    return bits;
  } else if constexpr (d == DType::e8m0) {
    // Without branches, so that loops over blocks use vectors. Infinity gives the largest code.
    const uint32_t up = (mag + 0x7fffffU) >> 23;
    const uint32_t raised = mag > 0x400000U ? up : 0;  // 2^−127 is the smallest power
    const uint32_t finite = raised < kFormat.largest ? raised : kFormat.largest;
    return mag > 0x7f800000U ? kFormat.nan : finite;
  } else if constexpr (kFormat.bytes == 1) {
    // |v| + 2^n with n chosen by the exponent of |v|: the addition rounds to the spacing of the
    // codes, for subnormals too, and leaves the number of spacings in the low bits. kFix makes the
    // remaining bits of the sum a multiple of 128.
    constexpr int kShift = 23 - kFormat.mantissa_bits;
    constexpr int32_t kLeast = (128 - kFormat.bias) << 23;  // the smallest normal value
    constexpr int32_t kFix = -((kShift + 128 - kFormat.bias) << kFormat.mantissa_bits) & 127;
    constexpr auto kMost = __builtin_bit_cast(int32_t, kFormat.max);
    constexpr auto kNan = kMost + static_cast<int32_t>((kFormat.nan - kFormat.largest) << kShift);
    constexpr int32_t kInfinity = 0x7f800000;
    const auto magnitude = static_cast<int32_t>(mag);
    const bool nan = magnitude > kInfinity;
    const int32_t most = magnitude < kMost ? magnitude : kMost;
    const int32_t a = nan ? kNan : most;
    const int32_t exponent = a & kInfinity;
    const int32_t binade = (exponent > kLeast ? exponent : kLeast) + (kShift << 23) + kFix;
    const float sum = __builtin_bit_cast(float, a) + __builtin_bit_cast(float, binade);
    const auto rounded = __builtin_bit_cast(uint32_t, sum);
    const uint32_t sign = nan ? 0 : bits >> 24 & 0x80U;
    return ((rounded + (rounded >> kShift)) & 0x7fU) | sign;
  } else {
    constexpr int kShift = 23 - kFormat.mantissa_bits;
    const uint32_t rounded = mag + ((1U << (kShift - 1)) - 1) + ((mag >> kShift) & 1U);
    uint32_t code =
        (rounded >> kShift) - (static_cast<uint32_t>(127 - kFormat.bias) << kFormat.mantissa_bits);
    if constexpr (kFormat.bias != 127) {
      // Adds the power of two whose ulp is the subnormal spacing. This rounds to that spacing.
      constexpr float kMagic = power_of_two(24 - kFormat.bias - kFormat.mantissa_bits);
      const float sum = __builtin_bit_cast(float, mag) + kMagic;
      const uint32_t small =
          __builtin_bit_cast(uint32_t, sum) - __builtin_bit_cast(uint32_t, kMagic);
      code = mag < (static_cast<uint32_t>(128 - kFormat.bias) << 23) ? small : code;
    }
    constexpr uint32_t kInfinity = kFormat.largest + 1;
    code = static_cast<int32_t>(code) > static_cast<int32_t>(kInfinity) ? kInfinity : code;
    code |= (bits >> 31) << (kFormat.exponent_bits + kFormat.mantissa_bits);
    return mag > 0x7f800000U ? kFormat.nan : code;
  }
}

// Rounds to a format and back.
template <DType d>
[[gnu::always_inline]] constexpr float rounded_to(float v) {
  return decode<d>(encode<d>(v));
}

// Calls f with the dtype as a compile-time constant: `visit(d, [&](auto tag) { … tag() … })`.
template <DType d>
using DTypeTag = std::integral_constant<DType, d>;

template <class Result, class F, DType d>
constexpr Result call_with(F& f) {
  return f(DTypeTag<d>{});
}

template <class Result, class F, size_t... i>
constexpr Result visit(DType d, F& f, std::index_sequence<i...> /*all*/) {
  constexpr std::array<Result (*)(F&), sizeof...(i)> kCalls{
      call_with<Result, F, static_cast<DType>(i)>...};
  return kCalls[index(d)](f);
}

template <class F>
constexpr auto visit(DType d, F f) {
  using Result = decltype(f(DTypeTag<DType::f32>{}));
  return visit<Result>(d, f, std::make_index_sequence<kDTypes.size()>{});
}

// The same conversions for a dtype that is known only at run time.
constexpr float decode(DType d, uint32_t code) {
  return visit(d, [&](auto tag) { return decode<tag()>(code); });
}
constexpr uint32_t encode(DType d, float v) {
  return visit(d, [&](auto tag) { return encode<tag()>(v); });
}

}  // namespace tenon

#endif
