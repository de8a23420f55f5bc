// The inner loops of the executor as a table of functions, one table per instruction set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tenon/dtype.h"
#include "tenon/expr.h"

namespace tenon::cpu {

// `out` never overlaps the inputs. `in` has one pointer per operand of the word.
using WordLoop = void (*)(float* out, const float* const* in, size_t n);
// Elements are `stride` elements apart and need no alignment.
using LoadLoop = void (*)(float* out, const void* from, int64_t stride, size_t n);
using StoreLoop = void (*)(void* to, int64_t stride, const float* from, size_t n);
// Contiguous elements from[i]·scale, and from[i]·scales[i].
using ScaleLoop = void (*)(void* to, const float* from, size_t n, float scale);
using ScalesLoop = void (*)(void* to, const float* from, size_t n, const float* scales);

struct Loops {
  std::array<WordLoop, kWords.size()> strict, native;
  std::array<WordLoop, kRels.size()> select;
  std::array<WordLoop, kDTypes.size()> round;
  std::array<LoadLoop, kDTypes.size()> load;
  std::array<StoreLoop, kDTypes.size()> store;
  std::array<StoreLoop, kDTypes.size()> stream;  // the same; whole cache lines bypass the cache
  std::array<ScaleLoop, kDTypes.size()> store_scaled;
  std::array<ScalesLoop, kDTypes.size()> store_scales;
  void (*add_into)(float* sum, const float* in, size_t n);       // sum[i] = sum[i] + in[i]
  void (*add_pairs)(float* out, const float* in, size_t pairs);  // out[i] = in[2i] + in[2i+1]
  uint32_t (*max_bits)(const float* in, size_t n);  // maximum of the bits of |v| as integers
  void (*max_bits_into)(uint32_t* most, const float* in, size_t n);  // the same per lane
  // Values 8·first … 8·(first + blocks) of the random stream, as 0 to 65535.
  void (*random)(float* out, uint64_t key, uint64_t first, uint64_t high, size_t blocks);
};

}  // namespace tenon::cpu
