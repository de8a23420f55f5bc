// The inner parts of a product as a table of functions, one table an instruction set.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tenon::cpu {

// A packed matrix is made of 32-bit words: a word holds one fp32 number, or the bf16 numbers of two
// neighbours in k, the even one in the low half. A panel of b is [k][cols]; a panel of a is
// [k][rows], or where `tiles` says so [k ÷ 16][rows][16].
struct GemmKernel {
  std::string_view isa;
  bool pairs = false;   // words are pairs of bf16
  bool tiles = false;   // a's panels have 16 words of each row together; rows in multiples of 16
  int64_t rows = 1;     // of a full tile
  int64_t cols = 1;     // of every tile
  int64_t granule = 1;  // words of k come in multiples of it
  int64_t block = 1;    // words of k in one go
  int64_t fetch = 4;    // words that a tile fetches ahead for each word of k
  // c = a·b, or c += a·b, over `k` words; c's rows lie `stride` floats apart. What is read next
  // lies at `ahead`.
  void (*tile)(int64_t rows, int64_t k, const float* a, const float* b, float* c, int64_t stride,
               bool add, const float* ahead) = nullptr;
  // out[k·width + lane] = in[lane][k] or in[k][lane] as words, 0 for lanes from `lanes` up to
  // width. Lines of `in` lie `stride` bytes apart, at any address.
  void (*transpose)(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
                    int64_t k) = nullptr;
  void (*copy)(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
               int64_t k) = nullptr;
  // The same from k lines of 16-bit numbers: out[i·width + lane] = {in[2i][lane], in[2i+1][lane]}.
  void (*zip)(float* out, int64_t width, const void* in, int64_t stride, int64_t lanes,
              int64_t k) = nullptr;
  // Around the tiles of a thread: the state of the matrix unit.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// fp32 numbers of one block are added in the order of k by fused multiply-adds from 0, blocks in
// order to their sum: the same on every instruction set, whatever the tiles.
inline constexpr int64_t kInnerBlock = 256;

// All that this processor runs.
std::span<const GemmKernel* const> gemm_kernels();

const GemmKernel& gemm_baseline();
#if defined(__x86_64__)
const GemmKernel& gemm_avx2();
const GemmKernel& gemm_avx512();
const GemmKernel& gemm_avx512bf16();
const GemmKernel& gemm_amx();
#endif

}  // namespace tenon::cpu
