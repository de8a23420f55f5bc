// The inner loops of the executor as a table of functions, one table per instruction set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tenon/dtype.h"
#include "tenon/expr.h"
#include "tenon/format.h"

namespace tenon::cpu {

// `out` never overlaps the inputs. `in` has one pointer per operand of the word.
using WordLoop = void (*)(float* out, const float* const* in, size_t n);
// Elements are `stride` elements apart and need no alignment.
using LoadLoop = void (*)(float* out, const void* from, int64_t stride, size_t n);
using StoreLoop = void (*)(void* to, int64_t stride, const float* from, size_t n);
// Contiguous elements from[i]·scale, and from[i]·scales[i]. `stream`: whole cache lines may bypass
// the cache.
using ScaleLoop = void (*)(void* to, const float* from, size_t n, float scale, bool stream);
using ScalesLoop = void (*)(void* to, const float* from, size_t n, const float* scales,
                            bool stream);
// The same with one scale for each `width` elements, 32 or 128. The last block may be shorter.
using BlocksLoop = void (*)(void* to, const float* from, size_t n, size_t width,
                            const float* scales, bool stream);

// Values to be encoded with several powers of two as scales. Null pointers: the instruction set has
// no such loops, and the others are to be used.
struct RoundedLoops {
  // Rounds to the precision of the format, in 16 bits per value.
  void (*round)(uint16_t* to, const float* from, size_t n);
  // What store() subtracts for blocks of `width` elements, 1 or 32, from their scales (e8m0) and
  // maxima. False if it does not encode one of them: there are infinities, NaNs or tiny values.
  bool (*offsets)(uint16_t* to, const uint32_t* inverses, const uint32_t* most, size_t n,
                  size_t width);
  // The same codes as store_scales or store_blocks with the values and scales.
  void (*store)(void* to, const uint16_t* rounded, const uint16_t* offsets, const float* from,
                const float* scales, size_t n, size_t width, bool stream);
};

struct Loops {
  std::array<WordLoop, kWords.size()> strict, native;
  std::array<WordLoop, kRels.size()> select;
  std::array<WordLoop, kDTypes.size()> round;
  std::array<LoadLoop, kDTypes.size()> load;
  std::array<StoreLoop, kDTypes.size()> store;
  std::array<StoreLoop, kDTypes.size()> stream;  // the same; whole cache lines bypass the cache
  std::array<ScaleLoop, kDTypes.size()> store_scaled;
  std::array<ScalesLoop, kDTypes.size()> store_scales;
  std::array<BlocksLoop, kDTypes.size()> store_blocks;
  std::array<RoundedLoops, kDTypes.size()> rounded;
  void (*add)(float* sum, const float* a, const float* b, size_t n);  // sum may be a or b
  void (*add_pairs)(float* out, const float* in, size_t pairs);       // out[i] = in[2i] + in[2i+1]
  uint32_t (*max_bits)(const float* in, size_t n);  // maximum of the bits of |v| as integers
  void (*max_bits_into)(uint32_t* most, const float* in, size_t n);  // the same per lane
  // The maximum for each `width` elements, 32 or 128.
  void (*block_max)(uint32_t* most, const float* in, size_t n, size_t width);
  // The scales of blocks with these maxima.
  void (*scales)(const Format& format, const uint32_t* most, size_t n, float* multiplier,
                 uint32_t* inverse);
  void (*stream_bytes)(void* to, const void* from, size_t n);  // whole lines bypass the cache
  // to[c·to_stride + r] = from[r·from_stride + c]. `stream` as in stream_bytes.
  void (*transpose_bytes)(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride,
                          int64_t rows, int64_t cols, bool stream);
  // Values 8·first … 8·(first + blocks) of the random stream, as 0 to 65535.
  void (*random)(float* out, uint64_t key, uint64_t first, uint64_t high, size_t blocks);
};

}  // namespace tenon::cpu
