// Products of bf16 values with avx512bf16; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/gemm_make512.h"

namespace tenon::cpu {

namespace {

// Two exact products, then two additions in fp32. Subnormal values count as 0.
struct Dot {
  [[gnu::always_inline]] static __m512 run(__m512 a, __m512 b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
  }
};

}  // namespace

extern constexpr GemmKernel kGemmAvx512Bf16{.pairs = true,
                                            .rows = kRows,
                                            .cols = kCols,
                                            .block = kInnerBlock,
                                            .tile = tile<Dot>,
                                            .transpose = transpose,
                                            .copy = copy,
                                            .zip = zip};

}  // namespace tenon::cpu
