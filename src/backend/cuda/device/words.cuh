// The operations of lowered formulas and the number formats, with the same bits as on the CPU.
// Follows arguments.h.

// All 64 bits of a·b + c in one instruction.
__device__ inline TenonU64 tenon_wide(TenonU32 a, TenonU32 b, TenonU64 c = 0) {
#if defined(__CUDA_ARCH__)
  asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(c) : "r"(a), "r"(b));
  return c;
#else
  return static_cast<TenonU64>(a) * b + c;
#endif
}

__device__ inline float tenon_bits(TenonU32 bits) { return __uint_as_float(bits); }
__device__ inline float tenon_abs(float a) { return fabsf(a); }
__device__ inline float tenon_sqrt(float a) { return __fsqrt_rn(a); }
__device__ inline float tenon_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// IEEE 754-2019 minimum and maximum: a NaN propagates, and -0 < +0 (equal values differ only in
// sign).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ inline float tenon_min(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ inline float tenon_max(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
#else
__device__ inline float tenon_min(float a, float b) {
  const float ordered = a < b ? a : b;
  const float zeros = tenon_bits(__float_as_uint(a) | __float_as_uint(b));
  return a != a ? a : a == b ? zeros : ordered;
}
__device__ inline float tenon_max(float a, float b) {
  const float ordered = a > b ? a : b;
  const float zeros = tenon_bits(__float_as_uint(a) & __float_as_uint(b));
  return a != a ? a : a == b ? zeros : ordered;
}
#endif

// Hardware approximations for native precision. Error: a few ulp (log2 near 1: 2^-22). Subnormal
// values are flushed to 0; only log2 reads them.
#if defined(__CUDA_ARCH__)
__device__ inline float tenon_ex2(float a) {
  float b;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
__device__ inline float tenon_lg2(float a) {
  float b;
  asm("lg2.approx.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
__device__ inline float tenon_rcp(float a) {
  float b;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
#else
__device__ inline float tenon_flushed(float a) { return fabsf(a) < 0x1p-126f ? a * 0.0f : a; }
__device__ inline float tenon_ex2(float a) { return tenon_flushed(exp2f(a)); }
__device__ inline float tenon_lg2(float a) { return log2f(a); }
__device__ inline float tenon_rcp(float a) { return tenon_flushed(1.0f / tenon_flushed(a)); }
#endif

// 1/x, correctly rounded, for x in [2^-125, 2^126). Compilers use the same sequence for the IEEE
// reciprocal in that range.
__device__ inline float tenon_inverse(float x) {
  const float y = tenon_rcp(x);
  return tenon_fma(tenon_fma(-x, y, 1.0f), y, y);
}
// 2^n from n + 1.5*2^23 + 127, whose low bits are n + 127, for an integer n in [-127, 128].
__device__ inline float tenon_pow2(float n) { return tenon_bits(__float_as_uint(n) << 23); }
// x = mantissa*2^exponent with the mantissa in [sqrt(1/2), sqrt(2)), for positive normal x.
__device__ inline int tenon_exponent_bits(float x) {
  return static_cast<int>(__float_as_uint(x) - 0x3f3504f3u) >> 23;
}
__device__ inline float tenon_exponent(float x) {
  return static_cast<float>(tenon_exponent_bits(x));
}
__device__ inline float tenon_mantissa(float x) {
  return tenon_bits(__float_as_uint(x) - (static_cast<TenonU32>(tenon_exponent_bits(x)) << 23));
}

// 2^n for a normal fp32 result.
__device__ inline float tenon_power_of_two(int n) {
  return tenon_bits(static_cast<TenonU32>(n + 127) << 23);
}

// A signed format. The parameters are those of its row in dtype.h.
template <int bytes_, int exponent_bits, int mantissa_bits, int bias, TenonU32 largest,
          TenonU32 nan, bool saturates>
struct TenonFormat {
  static constexpr int bytes = bytes_;
  static constexpr int shift = 23 - mantissa_bits;
  static constexpr TenonU32 sign = 1u << (exponent_bits + mantissa_bits);
  static constexpr bool has_infinity = nan != largest + 1;

  __device__ static float decode(TenonU32 code) {
    const TenonU32 magnitude = code & (sign - 1);
    TenonU32 bits = (magnitude << shift) + (static_cast<TenonU32>(127 - bias) << 23);
    if (bias != 127 && magnitude < (1u << mantissa_bits))  // subnormal
      bits = __float_as_uint(static_cast<float>(static_cast<int>(magnitude)) *
                             tenon_power_of_two(1 - bias - mantissa_bits));
    if (has_infinity && magnitude > largest)
      bits = 0x7f800000u | ((magnitude - (largest + 1)) << shift);
    if (!has_infinity && magnitude == nan) bits = 0x7fc00000u;
    return tenon_bits(bits | ((code & sign) != 0 ? 0x80000000u : 0u));
  }

  // Rounds to nearest even.
  __device__ static TenonU32 encode(float v) {
    const TenonU32 bits = __float_as_uint(v);
    const TenonU32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return nan;
    const TenonU32 rounded = magnitude + ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1u);
    TenonU32 code = (rounded >> shift) - (static_cast<TenonU32>(127 - bias) << mantissa_bits);
    if (bias != 127 && magnitude < (static_cast<TenonU32>(128 - bias) << 23)) {
      // Adds the power of two whose ulp is the subnormal spacing. This rounds to that spacing.
      const float magic = tenon_power_of_two(24 - bias - mantissa_bits);
      code = __float_as_uint(tenon_bits(magnitude) + magic) - __float_as_uint(magic);
    }
    const TenonU32 ceiling = saturates ? largest : largest + 1;
    if (code > ceiling) code = ceiling;
    return code | (bits >> 31) << (exponent_bits + mantissa_bits);
  }
};

struct tenon_f32 {
  static constexpr int bytes = 4;
  __device__ static float decode(TenonU32 code) { return tenon_bits(code); }
  __device__ static TenonU32 encode(float v) { return __float_as_uint(v); }
};
using tenon_f16 = TenonFormat<2, 5, 10, 15, 0x7bff, 0x7e00, false>;
using tenon_bf16 = TenonFormat<2, 8, 7, 127, 0x7f7f, 0x7fc0, false>;
using tenon_e4m3 = TenonFormat<1, 4, 3, 7, 0x7e, 0x7f, true>;
using tenon_e5m2 = TenonFormat<1, 5, 2, 15, 0x7b, 0x7f, true>;

// Scales: the smallest power of two that is at least |v|, at most 2^127.
struct tenon_e8m0 {
  static constexpr int bytes = 1;
  __device__ static float decode(TenonU32 code) {
    return tenon_bits(code == 0 ? 0x00400000u : code == 0xff ? 0x7fc00000u : code << 23);
  }
  __device__ static TenonU32 encode(float v) {
    const TenonU32 magnitude = __float_as_uint(v) & 0x7fffffffu;
    const TenonU32 exponent = magnitude >> 23;
    const TenonU32 mantissa = magnitude & 0x7fffffu;
    if (magnitude > 0x7f800000u) return 0xff;
    if (magnitude == 0x7f800000u) return 0xfe;
    const bool up = exponent == 0 ? mantissa > 0x400000u : mantissa != 0 && exponent < 254;
    return exponent + (up ? 1u : 0u);
  }
};

// Rounds to a format and back.
__device__ inline float tenon_round_f16(float v) { return tenon_f16::decode(tenon_f16::encode(v)); }
__device__ inline float tenon_round_bf16(float v) {
  return tenon_bf16::decode(tenon_bf16::encode(v));
}
__device__ inline float tenon_round_e4m3(float v) {
  return tenon_e4m3::decode(tenon_e4m3::encode(v));
}
__device__ inline float tenon_round_e5m2(float v) {
  return tenon_e5m2::decode(tenon_e5m2::encode(v));
}
__device__ inline float tenon_round_e8m0(float v) {
  return tenon_e8m0::decode(tenon_e8m0::encode(v));
}

__device__ inline bool tenon_aligned(const void* at, int bytes) {
  return reinterpret_cast<unsigned long long>(at) % static_cast<unsigned>(bytes) == 0;
}

// One element at any address. A misaligned element is read byte by byte.
template <class Format>
__device__ inline float tenon_read(const TenonU8* from) {
  TenonU32 code = 0;
  if (Format::bytes == 4 && tenon_aligned(from, 4))
    code = *reinterpret_cast<const TenonU32*>(from);
  else if (Format::bytes == 2 && tenon_aligned(from, 2))
    code = *reinterpret_cast<const TenonU16*>(from);
  else
    for (int i = 0; i < Format::bytes; ++i) code |= static_cast<TenonU32>(from[i]) << (8 * i);
  return Format::decode(code);
}

template <class Format>
__device__ inline void tenon_write(TenonU8* to, float v) {
  const TenonU32 code = Format::encode(v);
  if (Format::bytes == 4 && tenon_aligned(to, 4))
    *reinterpret_cast<TenonU32*>(to) = code;
  else if (Format::bytes == 2 && tenon_aligned(to, 2))
    *reinterpret_cast<TenonU16*>(to) = static_cast<TenonU16>(code);
  else
    for (int i = 0; i < Format::bytes; ++i) to[i] = static_cast<TenonU8>(code >> (8 * i));
}
