// Fused loops over whole rows for norms whose streams share a dtype; one table an instruction set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tenon::cpu {

// Rows that the loops take at once: row vectors and running sums are then read once for all of
// them.
inline constexpr int kNormRows = 2;

// A row vector as fp32 in the order of the loops' lines, and its own elements where they are of the
// streams' dtype and fill whole lines: those take half the cache.
struct NormVector {
  const float* wide = nullptr;
  const char* own = nullptr;
};

// A few neighbouring rows. Running sums are fp32 in the order of the loops' lines.
struct NormRows {
  int64_t cols = 0;
  const char *x[kNormRows] = {}, *residual[kNormRows] = {}, *grad[kNormRows] = {};
  char *y[kNormRows] = {}, *sum[kNormRows] = {};
  int64_t ahead_x = 0, ahead_residual = 0, ahead_grad = 0;  // bytes to the rows that come next
  NormVector gamma, beta;
  float mean[kNormRows] = {}, rstdev[kNormRows] = {};
  float total[kNormRows] = {}, second[kNormRows] = {};  // what the loops found, or their means
  float* dgamma = nullptr;                              // running sums over the rows
  float* dbeta = nullptr;
  bool first = false;   // the first row starts the sums
  bool clean = false;   // no result is NaN
  bool stream = false;  // results go past the cache; they are aligned then
  float* scratch = nullptr;
};

using NormLoop = void (*)(NormRows&);
// By whether there are one or kNormRows rows.
using NormPair = std::array<NormLoop, 2>;

// What the loops of a step are compiled for.
struct NormShape {
  bool centred = false, residual = false, gamma = false, beta = false;
  bool l2 = false;   // backward: of the L2 norm
  uint8_t sums = 0;  // backward: dgamma, or dgamma and dbeta
};

struct NormLoops {
  int64_t line;  // elements of a line: row vectors are padded to whole ones
  // Writes columns [0, cols) of a row vector in the order of lines, and back.
  void (*to_lines)(float* out, const float* in, int64_t cols);
  void (*from_lines)(float* out, const float* in, int64_t cols);
  NormPair total;  // x; LayerNorm's mean
  NormPair (*squares)(const NormShape&);
  NormPair (*forward)(const NormShape&);
  NormPair (*products)(const NormShape&);
  NormPair (*backward)(const NormShape&);
  NormPair total_residual;
};

// Null where the instruction set has none.
struct NormTable {
  const NormLoops* f32 = nullptr;
  const NormLoops* bf16 = nullptr;
};

#if defined(__x86_64__)
const NormTable& norms_avx2();
const NormTable& norms_avx512();
#endif

}  // namespace tenon::cpu
