// Products in plain C++. Runs on every processor and defines the order of additions.
#include <algorithm>
#include <cstring>

#include "backend/cpu/gemm_kernels.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kRows = 4, kCols = 16;

// A multiply-add with one rounding, also without an fma instruction. The product is exact in
// float64. The sum is rounded to odd in float64, so the rounding to fp32 is the only one that
// counts.
[[gnu::always_inline]] inline float fused(float a, float b, float c) {
#if defined(__x86_64__) && !defined(__FMA__)
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = c;
  const double sum = product + addend;
  const double part = sum - product;
  const double lost = (product - (sum - part)) + (addend - part);  // NaN if either is infinite
  const auto bits = __builtin_bit_cast(int64_t, sum);
  const int64_t inexact = (lost > 0) | (lost < 0);
  const int64_t away = (lost > 0) == (sum > 0) ? 1 : -1;
  const int64_t odd = bits + ((inexact & ~bits & 1) ? away : 0);
  return static_cast<float>(__builtin_bit_cast(double, odd));
#else
  return __builtin_fmaf(a, b, c);
#endif
}

void tile(int64_t rows, int64_t k, const float* __restrict a, const float* __restrict b,
          float* __restrict c, int64_t stride, bool add, const float* /*ahead*/) {
  float sum[kRows][kCols] = {};
  for (int64_t i = 0; i < k; ++i)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < kCols; ++j)
        sum[r][j] = fused(a[i * rows + r], b[i * kCols + j], sum[r][j]);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < kCols; ++j)
      c[r * stride + j] = add ? c[r * stride + j] + sum[r][j] : sum[r][j];
}

void copy(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes, int64_t k) {
  const auto* from = static_cast<const char*>(in);
  for (int64_t i = 0; i < k; ++i, out += width, from += stride) {
    std::memcpy(out, from, static_cast<size_t>(lanes) * sizeof(float));
    std::fill(out + lanes, out + width, 0.0F);
  }
}

void transpose(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
               int64_t k) {
  const auto* from = static_cast<const char*>(in);
  for (int64_t i = 0; i < k; ++i, out += width, from += sizeof(float)) {
    for (int64_t lane = 0; lane < lanes; ++lane)
      std::memcpy(out + lane, from + lane * stride, sizeof(float));
    std::fill(out + lanes, out + width, 0.0F);
  }
}

}  // namespace

extern constexpr GemmKernel kGemmBaseline{.rows = kRows,
                                          .cols = kCols,
                                          .block = kInnerBlock,
                                          .tile = tile,
                                          .transpose = transpose,
                                          .copy = copy};

}  // namespace tenon::cpu
