// Shared code of the products for avx512, avx512bf16 and AMX. Everything has internal linkage,
// because each file compiles it with its own flags.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backend/cpu/gemm_kernels.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kRows = 14, kCols = 32;  // 28 sums, 2 vectors of b, 1 of a

// The first n of 16 lanes.
[[gnu::always_inline]] inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>((1U << std::clamp<int64_t>(n, 0, 16)) - 1);
}

// Lines may be on different pages, which hardware prefetchers do not follow.
constexpr int64_t kAhead = 8;       // lines of k
constexpr int64_t kLinesAhead = 4;  // lines ahead of each of 16 lanes

[[maybe_unused]] void copy(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
                           int64_t k) {
  const auto* from = static_cast<const char*>(in);
  for (int64_t i = 0; i < k; ++i, out += width, from += stride)
    for (int64_t l = 0; l < width; l += 16) {
      _mm_prefetch(from + kAhead * stride + 4 * l, _MM_HINT_T0);
      _mm512_mask_storeu_ps(
          out + l, first(width - l),
          _mm512_maskz_loadu_ps(first(lanes - l), reinterpret_cast<const float*>(from) + l));
    }
}

// Lane j of v[i] becomes lane i of v[j]. Order: pairs, groups of four, then blocks of four lanes.
[[gnu::always_inline]] inline void transpose_16x16(__m512 (&v)[16]) {
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    v[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    v[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    v[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
    const __m512 low2 = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
    t[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
    t[i + 8] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    t[i + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

[[maybe_unused]] void transpose(float* out, int64_t width, const void* in, int64_t stride,
                                int64_t lanes, int64_t k) {
  const auto* from = static_cast<const char*>(in);
  for (int64_t l = 0; l < width; l += 16)
    for (int64_t i = 0; i < k; i += 16) {
      __m512 v[16];
      const __mmask16 some = first(k - i);
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        const auto* line = reinterpret_cast<const float*>(from + (l + r) * stride) + i;
        _mm_prefetch(reinterpret_cast<const char*>(line + kLinesAhead * 16), _MM_HINT_T0);
        v[r] = l + r < lanes ? _mm512_maskz_loadu_ps(some, line) : _mm512_setzero_ps();
      }
      transpose_16x16(v);
      float* to = out + i * width + l;
      const __mmask16 store = first(width - l);
      const int64_t left = k - i;
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r)
        if (r < left) _mm512_mask_storeu_ps(to + r * width, store, v[r]);
    }
}

[[maybe_unused]] void zip(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
                          int64_t k) {
  const auto* from = static_cast<const char*>(in);
  for (int64_t i = 0; i < k; i += 2, out += width, from += 2 * stride)
    for (int64_t l = 0; l < width; l += 16) {
      _mm_prefetch(from + kAhead * stride + 2 * l, _MM_HINT_T0);
      _mm_prefetch(from + (kAhead + 1) * stride + 2 * l, _MM_HINT_T0);
      const __mmask16 some = first(lanes - l);
      const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from + 2 * l));
      const __m512i odd =
          i + 1 < k ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from + stride + 2 * l))
                    : _mm512_setzero_si512();
      const __m512i pair = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      _mm512_mask_storeu_epi32(out + l, first(width - l), pair);
    }
}

// Step adds one word of k: sums += a·b.
template <int rows, class Step>
void tile_of(int64_t k, const float* a, const float* b, float* c, int64_t stride, bool add,
             const float* ahead) {
  __m512 sum[rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    _mm_prefetch(reinterpret_cast<const char*>(c + r * stride), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(c + r * stride + 16), _MM_HINT_T0);
  }
  const auto word = [&]() __attribute__((always_inline)) {
    const __m512 b0 = _mm512_load_ps(b);
    const __m512 b1 = _mm512_load_ps(b + 16);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const __m512 x = _mm512_set1_ps(a[r]);
      sum[r][0] = Step::run(x, b0, sum[r][0]);
      sum[r][1] = Step::run(x, b1, sum[r][1]);
    }
    a += rows;
    b += kCols;
  };
  for (; k >= 4; k -= 4, ahead += 16) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    word();
    word();
    word();
    word();
  }
  for (; k > 0; --k) word();
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r, c += stride)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      float* to = c + 16 * j;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), sum[r][j]) : sum[r][j]);
    }
}

using Tile = void (*)(int64_t, const float*, const float*, float*, int64_t, bool, const float*);

template <class Step, int... i>
constexpr std::array<Tile, kRows> tiles(std::integer_sequence<int, i...> /*all*/) {
  return {tile_of<i + 1, Step>...};
}

template <class Step>
void tile(int64_t rows, int64_t k, const float* a, const float* b, float* c, int64_t stride,
          bool add, const float* ahead) {
  static constexpr auto kTiles = tiles<Step>(std::make_integer_sequence<int, kRows>{});
  kTiles[static_cast<size_t>(rows - 1)](k, a, b, c, stride, add, ahead);
}

}  // namespace

}  // namespace tenon::cpu
