// Fused loops over whole rows for norms whose inputs and outputs have one dtype; one table per
// instruction set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tenon::cpu {

// Rows per call. Row vectors and running sums are read once for all of them.
inline constexpr int kNormRows = 2;

// A row vector. `wide` is fp32 in line order. `own` is the original data, which takes half the
// cache. `own` is set only if its dtype is the dtype of the streams and it fills whole lines.
struct NormVector {
  const float* wide = nullptr;
  const char* own = nullptr;
};

// A few adjacent rows. Running sums are fp32 in line order.
struct NormRows {
  int64_t cols = 0;
  const char *x[kNormRows] = {}, *residual[kNormRows] = {}, *grad[kNormRows] = {};
  char *y[kNormRows] = {}, *sum[kNormRows] = {};
  int64_t ahead_x = 0, ahead_residual = 0, ahead_grad = 0;  // bytes to the next rows, to prefetch
  NormVector gamma, beta;
  float mean[kNormRows] = {}, rstdev[kNormRows] = {};
  float total[kNormRows] = {}, second[kNormRows] = {};  // results of the loops, or their means
  float* dgamma = nullptr;                              // running sums over the rows
  float* dbeta = nullptr;
  bool first = false;   // this row starts the sums
  bool clean = false;   // no result is NaN
  bool stream = false;  // results bypass the cache; they are aligned
  float* scratch = nullptr;
};

using NormLoop = void (*)(NormRows&);
// Index 0: one row; index 1: kNormRows rows.
using NormPair = std::array<NormLoop, 2>;

// The template parameters of the loops of a step.
struct NormShape {
  bool centred = false, residual = false, gamma = false, beta = false;
  bool l2 = false;   // backward of the L2 norm
  uint8_t sums = 0;  // backward: 1 for dgamma, 2 for dgamma and dbeta
};

struct NormLoops {
  int64_t line;  // elements per line; row vectors are padded to whole lines
  // Reorders columns [0, cols) of a row vector to line order, and back.
  void (*to_lines)(float* out, const float* in, int64_t cols);
  void (*from_lines)(float* out, const float* in, int64_t cols);
  NormPair total;  // x; LayerNorm's mean
  NormPair (*squares)(const NormShape&);
  NormPair (*forward)(const NormShape&);
  NormPair (*products)(const NormShape&);
  NormPair (*backward)(const NormShape&);
  NormPair total_residual;
};

struct NormTable {
  const NormLoops* f32 = nullptr;
  const NormLoops* bf16 = nullptr;
};

}  // namespace tenon::cpu
