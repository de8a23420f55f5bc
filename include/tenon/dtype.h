// The number formats, one table row each, and their exact conversions from and to fp32.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

namespace tenon {

enum class DType : uint8_t { f32, f16, bf16, e4m3, e5m2, e8m0 };

struct DTypeInfo {
  std::string_view name;
  int bytes;
  int exponent_bits, mantissa_bits, bias;
  uint32_t largest;  // code of the largest finite number
  uint32_t nan;      // the NaN that a conversion writes
  float max;         // the largest finite number
  bool saturates;    // overflow gives the largest finite number, not infinity
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

// The unsigned integer that holds one element.
template <DType d>
using Storage = std::conditional_t<info(d).bytes == 4, uint32_t,
                                   std::conditional_t<info(d).bytes == 2, uint16_t, uint8_t>>;

// 2^n for a normal fp32 result; a constant expression, unlike std::ldexp.
constexpr float power_of_two(int n) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(n + 127) << 23);
}

// Conversions are inlined everywhere: they are compiled once per instruction set, and one shared
// out-of-line copy would run on processors that lack it.
template <DType d>
[[gnu::always_inline]] constexpr float decode(uint32_t code) {
  constexpr DTypeInfo f = info(d);
  if constexpr (d == DType::f32) {
    return __builtin_bit_cast(float, code);
  } else if constexpr (d == DType::e8m0) {
    const uint32_t bits = code == 0 ? 0x00400000U : code == f.nan ? 0x7fc00000U : code << 23;
    return __builtin_bit_cast(float, bits);
  } else {
    constexpr int shift = 23 - f.mantissa_bits;
    constexpr uint32_t sign = 1U << (f.exponent_bits + f.mantissa_bits);
    constexpr uint32_t infinity = f.largest + 1;
    const uint32_t mag = code & (sign - 1);
    uint32_t bits = (mag << shift) + (static_cast<uint32_t>(127 - f.bias) << 23);
    if constexpr (f.bias != 127) {
      const float small = static_cast<float>(static_cast<int32_t>(mag)) *
                          power_of_two(1 - f.bias - f.mantissa_bits);
      const bool subnormal = mag < (1U << f.mantissa_bits);
      bits = subnormal ? __builtin_bit_cast(uint32_t, small) : bits;
    }
    if constexpr (d == DType::e4m3)
      bits = mag == f.nan ? 0x7fc00000U : bits;  // no infinity, one NaN
    else
      bits = mag >= infinity ? 0x7f800000U | ((mag - infinity) << shift) : bits;
    return __builtin_bit_cast(float, bits | ((code & sign) ? 0x80000000U : 0U));
  }
}

// Nearest, ties to even. e8m0 is the exception: the least power of two not below |v|, as MXFP8
// scales want it (spec: E8M0 rule).
template <DType d>
[[gnu::always_inline]] constexpr uint32_t encode(float v) {
  constexpr DTypeInfo f = info(d);
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  const uint32_t mag = bits & 0x7fffffffU;
  if constexpr (d == DType::f32) {
    return bits;
  } else if constexpr (d == DType::e8m0) {
    const uint32_t exponent = mag >> 23;
    const uint32_t mantissa = mag & 0x7fffffU;
    const uint32_t up = exponent == 0 ? mantissa > 0x400000U : mantissa != 0 && exponent < 254;
    const uint32_t finite = exponent + up;
    return mag > 0x7f800000U ? f.nan : mag == 0x7f800000U ? f.largest : finite;
  } else {
    constexpr int shift = 23 - f.mantissa_bits;
    const uint32_t rounded = mag + ((1U << (shift - 1)) - 1) + ((mag >> shift) & 1U);
    uint32_t code = (rounded >> shift) - (static_cast<uint32_t>(127 - f.bias) << f.mantissa_bits);
    if constexpr (f.bias != 127) {
      // Adding the power of two whose ulp is the subnormal spacing rounds to that spacing.
      constexpr float magic = power_of_two(24 - f.bias - f.mantissa_bits);
      const float sum = __builtin_bit_cast(float, mag) + magic;
      const uint32_t small = __builtin_bit_cast(uint32_t, sum) - __builtin_bit_cast(uint32_t, magic);
      code = mag < (static_cast<uint32_t>(128 - f.bias) << 23) ? small : code;
    }
    constexpr uint32_t ceiling = f.saturates ? f.largest : f.largest + 1;
    code = static_cast<int32_t>(code) > static_cast<int32_t>(ceiling) ? ceiling : code;
    code |= (bits >> 31) << (f.exponent_bits + f.mantissa_bits);
    return mag > 0x7f800000U ? f.nan : code;
  }
}

// To the nearest number of a format and back.
template <DType d>
[[gnu::always_inline]] constexpr float rounded_to(float v) {
  return decode<d>(encode<d>(v));
}

// Calls f with the dtype as a compile-time constant: `visit(d, [&](auto tag) { … tag() … })`.
template <class F>
constexpr decltype(auto) visit(DType d, F&& f) {
  using Result = decltype(f(std::integral_constant<DType, DType::f32>{}));
  using Call = Result (*)(F&);
  constexpr auto call = []<DType t>() -> Call {
    return [](F& g) -> Result { return g(std::integral_constant<DType, t>{}); };
  };
  constexpr std::array<Call, kDTypes.size()> kCalls{
      call.template operator()<DType::f32>(),  call.template operator()<DType::f16>(),
      call.template operator()<DType::bf16>(), call.template operator()<DType::e4m3>(),
      call.template operator()<DType::e5m2>(), call.template operator()<DType::e8m0>()};
  return kCalls[index(d)](f);
}

// The same conversions with the dtype known only at run time.
constexpr float decode(DType d, uint32_t code) {
  return visit(d, [&](auto tag) { return decode<tag()>(code); });
}
constexpr uint32_t encode(DType d, float v) {
  return visit(d, [&](auto tag) { return encode<tag()>(v); });
}

}  // namespace tenon
