// Products for avx512; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/gemm_make512.h"

namespace tenon::cpu {

namespace {

struct Fma {
  [[gnu::always_inline]] static __m512 run(__m512 a, __m512 b, __m512 sum) {
    return _mm512_fmadd_ps(a, b, sum);
  }
};

}  // namespace

extern constexpr GemmKernel kGemmAvx512{.rows = kRows,
                                        .cols = kCols,
                                        .block = kInnerBlock,
                                        .tile = tile<Fma>,
                                        .transpose = transpose,
                                        .copy = copy};

}  // namespace tenon::cpu
