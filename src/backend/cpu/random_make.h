// Philox 4x32-10 with one counter per 64-bit lane: the function of core/philox.h. Included by files
// of one instruction set.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "core/philox.h"

namespace tenon::cpu {

#if defined(__AVX512BW__)
template <class tag>
struct Counters {
  using V = __m512i;
  static constexpr size_t kCount = 8;
  static V all(uint64_t v) { return _mm512_set1_epi64(static_cast<int64_t>(v)); }
  static V add_lanes(V v) { return _mm512_add_epi64(v, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)); }
  static V both(V a, V b) { return _mm512_and_si512(a, b); }
  static V product(V a, V b) { return _mm512_mul_epu32(a, b); }  // of the low halves
  static V high(V v) { return _mm512_srli_epi64(v, 32); }
  static V differ(V a, V b, V c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  // 16-bit draws of each counter in turn. Words are in the low halves.
  static void store(float* out, V w0, V w1, V w2, V w3) {
    const V a = _mm512_mask_blend_epi32(0xaaaa, w0, _mm512_slli_epi64(w1, 32));
    const V b = _mm512_mask_blend_epi32(0xaaaa, w2, _mm512_slli_epi64(w3, 32));
    const V first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const V second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    half(out, _mm512_permutex2var_epi64(a, first, b));
    half(out + 32, _mm512_permutex2var_epi64(a, second, b));
  }

 private:
  static void half(float* out, V draws) {
    const auto put = [](float* to, __m256i v) {
      _mm512_storeu_ps(to, _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(v)));
    };
    put(out, _mm512_castsi512_si256(draws));
    put(out + 16, _mm512_extracti64x4_epi64(draws, 1));
  }
};
#else
template <class tag>
struct Counters {
  using V = __m256i;
  static constexpr size_t kCount = 4;
  static V all(uint64_t v) { return _mm256_set1_epi64x(static_cast<int64_t>(v)); }
  static V add_lanes(V v) { return _mm256_add_epi64(v, _mm256_setr_epi64x(0, 1, 2, 3)); }
  static V both(V a, V b) { return _mm256_and_si256(a, b); }
  static V product(V a, V b) { return _mm256_mul_epu32(a, b); }  // of the low halves
  static V high(V v) { return _mm256_srli_epi64(v, 32); }
  static V differ(V a, V b, V c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  // 16-bit draws of each counter in turn. Words are in the low halves.
  static void store(float* out, V w0, V w1, V w2, V w3) {
    const V a = _mm256_blend_epi32(w0, _mm256_slli_epi64(w1, 32), 0xaa);
    const V b = _mm256_blend_epi32(w2, _mm256_slli_epi64(w3, 32), 0xaa);
    const V even = _mm256_unpacklo_epi64(a, b);
    const V odd = _mm256_unpackhi_epi64(a, b);
    const auto put = [](float* to, __m128i v) {
      _mm256_storeu_ps(to, _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(v)));
    };
    put(out, _mm256_castsi256_si128(even));
    put(out + 8, _mm256_castsi256_si128(odd));
    put(out + 16, _mm256_extracti128_si256(even, 1));
    put(out + 24, _mm256_extracti128_si256(odd, 1));
  }
};
#endif

// The draws of counters first … first + kCount − 1 modulo 2^61.
template <class tag>
void store_draws(float* out, uint64_t key, uint64_t first, uint64_t high) {
  using W = Counters<tag>;
  using V = typename W::V;
  const V m0 = W::all(kPhiloxMultiplier0), m1 = W::all(kPhiloxMultiplier1);
  V c0 = W::both(W::add_lanes(W::all(first)), W::all(~uint64_t{0} >> 3));
  V c1 = W::high(c0);
  V c2 = W::all(high);
  V c3 = W::all(high >> 32);
  auto k0 = static_cast<uint32_t>(key);
  auto k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const V p0 = W::product(m0, c0);
    const V p1 = W::product(m1, c2);
    c0 = W::differ(W::high(p1), c1, W::all(k0));
    c1 = p1;
    c2 = W::differ(W::high(p0), c3, W::all(k1));
    c3 = p0;
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  W::store(out, c0, c1, c2, c3);
}

}  // namespace tenon::cpu
#endif
