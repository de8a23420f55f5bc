// Micro-kernels of matrix products as a table of functions, one table per instruction set.
#pragma once

#include <cstdint>

namespace tenon::cpu {

// A packed matrix consists of 32-bit words. A word holds one fp32 value, or two bf16 values that
// are neighbours in k, the even one in the low half. A panel of b is [k][cols]. A panel of a is
// [k][rows], or [k ÷ 16][rows][16] if `tiles` is set.
struct GemmKernel {
  bool pairs = false;   // words are pairs of bf16
  bool tiles = false;   // panels of a hold 16 words of each row together; rows in multiples of 16
  int64_t rows = 1;     // rows of a full tile
  int64_t cols = 1;     // columns of every tile
  int64_t granule = 1;  // the number of words of k is a multiple of this
  int64_t block = 1;    // words of k per call
  int64_t fetch = 4;    // words to prefetch per word of k
  // c = a·b, or c += a·b if `add`, over `k` words. Rows of c are `stride` floats apart. `ahead` is
  // the memory to prefetch.
  void (*tile)(int64_t rows, int64_t k, const float* a, const float* b, float* c, int64_t stride,
               bool add, const float* ahead) = nullptr;
  // out[k·width + lane] = in[lane][k] or in[k][lane], as words. Lanes from `lanes` to width are 0.
  // Lines of `in` are `stride` bytes apart and need no alignment.
  void (*transpose)(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
                    int64_t k) = nullptr;
  void (*copy)(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
               int64_t k) = nullptr;
  // The same for k lines of 16-bit values: out[i·width + lane] = {in[2i][lane], in[2i+1][lane]}.
  void (*zip)(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
              int64_t k) = nullptr;
  // Called before and after the tiles of a thread: set up and release the matrix unit.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// fp32 products are added in the order of k by fused multiply-adds, starting from 0, within one
// block. Then the blocks are added in order. The result is the same for every instruction set and
// tile size.
inline constexpr int64_t kInnerBlock = 256;

}  // namespace tenon::cpu
