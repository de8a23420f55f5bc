// Products of bf16 values by AMX; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/gemm_make512.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kTile = 16;    // rows of a tile, and 4-byte words per row
constexpr int64_t kBlock = 128;  // panels of a and b, 16 KB each, share the first-level cache

// Eight tiles of 16 rows of 64 bytes: 0 to 3 are sums, 4 and 5 are a, 6 and 7 are b.
struct alignas(64) Config {
  uint8_t palette = 1, start = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Config) == 64);

void begin() {
  static constexpr Config kConfig;
  _tile_loadconfig(&kConfig);
}
void end() { _tile_release(); }

// Tiles of a are contiguous. Tiles of b are next to each other in lines of 32 words. The sums start
// from c. The caller pads the rows of c to whole tiles.
void tile_amx(int64_t rows, int64_t k, const float* a, const float* b, float* c, int64_t stride,
              bool add, const float* ahead) {
  constexpr int64_t kBytes = kTile * 4, kLine = kCols * 4;
  const int64_t bytes = stride * 4;
  float* const below = c + kTile * stride;
  if (rows > kTile) {
    if (add) {
      _tile_loadd(0, c, bytes);
      _tile_loadd(1, c + kTile, bytes);
      _tile_loadd(2, below, bytes);
      _tile_loadd(3, below + kTile, bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (; k > 0; k -= kTile, a += 2 * kTile * kTile, b += kTile * kCols) {
      _tile_loadd(6, b, kLine);
      _tile_loadd(4, a, kBytes);
      _tile_loadd(7, b + kTile, kLine);
      _tile_dpbf16ps(0, 4, 6);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i, ahead += 16)
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      _tile_loadd(5, a + kTile * kTile, kBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + kTile, bytes);
  } else {
    if (add) {
      _tile_loadd(0, c, bytes);
      _tile_loadd(1, c + kTile, bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    for (; k > 0; k -= kTile, a += kTile * kTile, b += kTile * kCols) {
      _tile_loadd(4, a, kBytes);
      _tile_loadd(6, b, kLine);
      _tile_loadd(7, b + kTile, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + kTile, bytes);
}

}  // namespace

extern constexpr GemmKernel kGemmAmx{.pairs = true,
                                     .tiles = true,
                                     .rows = 2 * kTile,
                                     .cols = kCols,
                                     .granule = kTile,
                                     .block = kBlock,
                                     .fetch = 8,
                                     .tile = tile_amx,
                                     .transpose = transpose,
                                     .copy = copy,
                                     .zip = zip,
                                     .begin = begin,
                                     .end = end};

}  // namespace tenon::cpu
