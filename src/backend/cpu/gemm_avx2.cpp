// Products for avx2; see the flags of this file in CMakeLists.txt.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backend/cpu/gemm_kernels.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kRows = 6, kCols = 16;  // 12 sums, 2 vectors of b, 1 of a

template <int rows>
void tile_of(int64_t k, const float* a, const float* b, float* c, int64_t stride, bool add,
             const float* ahead) {
  __m256 sum[rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
  for (; k > 0; --k, a += rows, b += kCols) {
    if (k % 4 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + 4 * k - 16), _MM_HINT_T1);
    const __m256 b0 = _mm256_load_ps(b);
    const __m256 b1 = _mm256_load_ps(b + 8);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const __m256 x = _mm256_broadcast_ss(a + r);
      sum[r][0] = _mm256_fmadd_ps(x, b0, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(x, b1, sum[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r, c += stride)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      float* to = c + 8 * j;
      _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), sum[r][j]) : sum[r][j]);
    }
}

using Tile = void (*)(int64_t, const float*, const float*, float*, int64_t, bool, const float*);

template <int... i>
constexpr std::array<Tile, kRows> tiles(std::integer_sequence<int, i...> /*all*/) {
  return {tile_of<i + 1>...};
}

void tile(int64_t rows, int64_t k, const float* a, const float* b, float* c, int64_t stride,
          bool add, const float* ahead) {
  static constexpr auto kTiles = tiles(std::make_integer_sequence<int, kRows>{});
  kTiles[static_cast<size_t>(rows - 1)](k, a, b, c, stride, add, ahead);
}

// The first n of 8 lanes.
__m256i first(int64_t n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(std::clamp<int64_t>(n, 0, 8))),
                            lanes);
}

void copy(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes, int64_t k) {
  const auto* from = static_cast<const char*>(in);
  for (int64_t i = 0; i < k; ++i, out += width, from += stride)
    for (int64_t l = 0; l < width; l += 8)
      _mm256_maskstore_ps(
          out + l, first(width - l),
          _mm256_maskload_ps(reinterpret_cast<const float*>(from) + l, first(lanes - l)));
}

// Lane j of v[i] becomes lane i of v[j].
void transpose_8x8(__m256 (&v)[8]) {
  __m256 t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    v[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    v[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    v[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = t[i];
}

void transpose(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
               int64_t k) {
  const auto* from = static_cast<const char*>(in);
  for (int64_t l = 0; l < width; l += 8)
    for (int64_t i = 0; i < k; i += 8) {
      __m256 v[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r)
        v[r] = l + r < lanes
                   ? _mm256_maskload_ps(reinterpret_cast<const float*>(from + (l + r) * stride) + i,
                                        first(k - i))
                   : _mm256_setzero_ps();
      transpose_8x8(v);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r)
        if (i + r < k) _mm256_maskstore_ps(out + (i + r) * width + l, first(width - l), v[r]);
    }
}

}  // namespace

extern constexpr GemmKernel kGemmAvx2{.rows = kRows,
                                      .cols = kCols,
                                      .block = kInnerBlock,
                                      .tile = tile,
                                      .transpose = transpose,
                                      .copy = copy};

}  // namespace tenon::cpu
