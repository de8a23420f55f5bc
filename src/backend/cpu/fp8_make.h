// fp32 to FP8 with the vectors of an instruction set: the conversion of encode() in tenon/dtype.h,
// which compilers turn into twice as many instructions. Included by files of one instruction set.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "tenon/dtype.h"

namespace tenon::cpu {

#if defined(__AVX512BW__)
template <class tag>
struct Vectors {
  using F = __m512;
  using I = __m512i;
  static F load(const float* from) { return _mm512_loadu_ps(from); }
  static F all(float v) { return _mm512_set1_ps(v); }
  static I all(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
  static I bits(F v) { return _mm512_castps_si512(v); }
  static F floats(I v) { return _mm512_castsi512_ps(v); }
  static F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  static I smaller(I a, I b) { return _mm512_min_epu32(a, b); }
  static I larger(I a, I b) { return _mm512_max_epu32(a, b); }
  static F smaller(F a, F b) { return _mm512_min_ps(a, b); }  // b if either is NaN
  template <int n>
  static I right(I v) {
    return _mm512_srli_epi32(v, n);
  }
  // Bit 7 from the sign of v, except of a NaN. Bits 0 to 6 from the code.
  static I with_sign(I code, F v) {
    const __mmask16 number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
    const I sign = _mm512_maskz_srli_epi32(number, bits(v), 24);
    return _mm512_ternarylogic_epi32(all(0x7fU), code, sign, 0xca);  // mask ? code : sign
  }
  // 16-bit lanes, in an order that store() of two vectors undoes.
  static I pack(I a, I b) { return _mm512_packus_epi32(a, b); }
  static I all16(uint16_t v) { return _mm512_set1_epi16(static_cast<int16_t>(v)); }
  static I load16(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static void store16(uint16_t* to, I v) { _mm512_storeu_si512(to, v); }
  static I minus16(I a, I b) { return _mm512_subs_epu16(a, b); }  // at least 0
  template <int n>
  static I right16(I v) {
    return _mm512_srli_epi16(v, n);
  }
  // Bits of a where mask is set, else of b.
  static I merged(I mask, I a, I b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }
  // Whether any lane of a is below `least` where b is not 0.
  using Any = __mmask32;
  static Any below16(I a, uint16_t least, I b) {
    return _mm512_mask_cmplt_epu16_mask(_mm512_test_epi16_mask(b, b), a, all16(least));
  }
  static bool none(Any a, Any b) { return _kortestz_mask32_u8(a, b) != 0; }
  static void store(void* to, I a, I b, I c, I d, bool stream) {
    store(to, pack(a, b), pack(c, d), stream);
  }
  static void store(void* to, I a, I b, bool stream) {
    const I lanes = _mm512_packus_epi16(a, b);
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I line = _mm512_permutexvar_epi32(order, lanes);
    stream ? _mm512_stream_si512(static_cast<I*>(to), line) : _mm512_storeu_si512(to, line);
  }
};
#else
template <class tag>
struct Vectors {
  using F = __m256;
  using I = __m256i;
  static F load(const float* from) { return _mm256_loadu_ps(from); }
  static F all(float v) { return _mm256_set1_ps(v); }
  static I all(uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
  static I bits(F v) { return _mm256_castps_si256(v); }
  static F floats(I v) { return _mm256_castsi256_ps(v); }
  static F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  static I smaller(I a, I b) { return _mm256_min_epu32(a, b); }
  static I larger(I a, I b) { return _mm256_max_epu32(a, b); }
  static F smaller(F a, F b) { return _mm256_min_ps(a, b); }  // b if either is NaN
  template <int n>
  static I right(I v) {
    return _mm256_srli_epi32(v, n);
  }
  // Bit 7 from the sign of v, except of a NaN. Bits 0 to 6 from the code.
  static I with_sign(I code, F v) {
    const F number = _mm256_cmp_ps(v, v, _CMP_ORD_Q);
    const I sign = both(right<24>(both(bits(v), bits(number))), all(0x80U));
    return _mm256_or_si256(both(code, all(0x7fU)), sign);
  }
  static I pack(I a, I b) { return _mm256_packus_epi32(a, b); }
  static I all16(uint16_t v) { return _mm256_set1_epi16(static_cast<int16_t>(v)); }
  static I load16(const uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const I*>(from));
  }
  static void store16(uint16_t* to, I v) { _mm256_storeu_si256(reinterpret_cast<I*>(to), v); }
  static I minus16(I a, I b) { return _mm256_subs_epu16(a, b); }
  template <int n>
  static I right16(I v) {
    return _mm256_srli_epi16(v, n);
  }
  static I merged(I mask, I a, I b) {
    return _mm256_or_si256(both(mask, a), _mm256_andnot_si256(mask, b));
  }
  using Any = I;
  static Any below16(I a, uint16_t least, I b) {
    const I below = _mm256_cmpeq_epi16(_mm256_min_epu16(a, all16(least - 1)), a);
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(b, _mm256_setzero_si256()), below);
  }
  static bool none(Any a, Any b) {
    const I either = _mm256_or_si256(a, b);
    return _mm256_testz_si256(either, either) != 0;
  }
  static void store(void* to, I a, I b, I c, I d, bool stream) {
    store(to, pack(a, b), pack(c, d), stream);
  }
  static void store(void* to, I a, I b, bool stream) {
    const I lanes = _mm256_packus_epi16(a, b);
    const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const I half = _mm256_permutevar8x32_epi32(lanes, order);
    auto* const line = static_cast<I*>(to);
    stream ? _mm256_stream_si256(line, half) : _mm256_storeu_si256(line, half);
  }
};
#endif

template <class tag, DType d>
struct Fp8 {
  using W = Vectors<tag>;
  using F = typename W::F;
  using I = typename W::I;
  static constexpr size_t kLanes = sizeof(F) / sizeof(float);
  static constexpr size_t kStep = 4 * kLanes;

  // The names and the derivation of the constants are those of encode().
  static I code(F v) {
    constexpr DTypeInfo kFormat = info(d);
    constexpr int kShift = 23 - kFormat.mantissa_bits;
    constexpr uint32_t kLeast = static_cast<uint32_t>(128 - kFormat.bias) << 23;
    constexpr uint32_t kFix = -((kShift + 128 - kFormat.bias) << kFormat.mantissa_bits) & 127;
    constexpr uint32_t kNan =
        __builtin_bit_cast(uint32_t, kFormat.max) + ((kFormat.nan - kFormat.largest) << kShift);
    const F magnitude = W::floats(W::both(W::bits(v), W::all(0x7fffffffU)));
    const F most = W::smaller(W::all(kFormat.max), magnitude);
    const I a = W::smaller(W::bits(most), W::all(kNan));  // NaN patterns are above all others
    const I exponent = W::larger(W::both(a, W::all(0x7f800000U)), W::all(kLeast));
    const I binade = W::add(exponent, W::all((static_cast<uint32_t>(kShift) << 23) + kFix));
    const I rounded = W::bits(W::add(W::floats(a), W::floats(binade)));
    return W::with_sign(W::add(rounded, W::template right<kShift>(rounded)), v);
  }

  // kStep codes of from[i] times the scales that scale(i) gives for i, i + kLanes, … `stream`: they
  // bypass the cache, and their address is a multiple of kStep.
  template <class Scale>
  static void store(void* to, const float* from, Scale scale, bool stream) {
    const auto at = [&](size_t k) __attribute__((always_inline)) {
      return code(W::multiply(W::load(from + k * kLanes), scale(k * kLanes)));
    };
    W::store(to, at(0), at(1), at(2), at(3), stream);
  }

  // Values that are multiplied by several powers of two are rounded once: to sign, exponent and the
  // mantissa of the format, in 16 bits. A power of two is then an integer to subtract. This is
  // exact unless the code is subnormal. Both orders of elements are that of pack().
  static constexpr size_t kHalf = kStep / 2;
  static constexpr int kMantissa = info(d).mantissa_bits;

  // kStep values. Infinities and NaNs give any number.
  static void round(uint16_t* to, const float* from) {
    constexpr int kShift = 23 - kMantissa;
    const auto at = [&](size_t k) __attribute__((always_inline)) {
      const I v = W::bits(W::load(from + k * kLanes));
      const I odd = W::both(W::template right<kShift>(v), W::all(1U));
      const I sum = W::add(v, W::all((1U << (kShift - 1)) - 1));
      return W::template right<kShift>(W::add(sum, odd));
    };
    W::store16(to, W::pack(at(0), at(1)));
    W::store16(to + kHalf, W::pack(at(2), at(3)));
  }

  // What is subtracted for the multiplier with this inverse.
  static constexpr uint32_t kBias = info(d).bias;
  static constexpr uint16_t offset(uint32_t inverse) {
    return static_cast<uint16_t>(inverse < kBias ? 0 : (inverse - kBias) << kMantissa);
  }
  // Whether this holds for a block. Tiny values lose bits, but their codes may not: below kBias a
  // block must be zero.
  static constexpr bool has_offset(uint32_t inverse, uint32_t most) {
    return (inverse >= kBias || most == 0) && inverse < info(DType::e8m0).largest;
  }

  // kStep codes. `offset` gives those of kHalf elements from an index on. False, and nothing is
  // written, if a code is subnormal.
  template <class Offset>
  static bool store_rounded(void* to, const uint16_t* rounded, Offset offset, bool stream) {
    typename W::Any small[2];
    I codes[2];
    for (size_t k = 0; k < 2; ++k) {
      const I v = W::load16(rounded + k * kHalf);
      const I magnitude = W::both(v, W::all16((1U << (8 + kMantissa)) - 1));
      const I code = W::minus16(magnitude, offset(k * kHalf));
      small[k] = W::below16(code, 1U << kMantissa, magnitude);
      codes[k] = W::merged(W::all16(0x7f), code, W::template right16<1 + kMantissa>(v));
    }
    if (!W::none(small[0], small[1])) return false;
    W::store(to, codes[0], codes[1], stream);
    return true;
  }
};

}  // namespace tenon::cpu
#endif
