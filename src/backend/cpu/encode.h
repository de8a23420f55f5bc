// Encodes panels of a tensor: scales first, then data, rowwise and columnwise.
#pragma once

#include "backend/cpu/loops.h"
#include "step/backend.h"

namespace tenon::cpu {

// Rows [row, row + rows) by columns [col, col + cols) of a tensor, contiguous: values in fp32, or
// codes. A panel holds whole blocks, except at the end of the tensor.
struct Panel {
  int64_t row, rows, col, cols;
  const void* data;
};

// Counts of elements that changed in encoding. Each element is counted at most once.
struct Health {
  uint64_t saturated = 0, flushed = 0, nonfinite = 0;
  Health& operator+=(const Health& h);
};

// What the caller reads after this panel. A row of it is prefetched for each row that is encoded:
// encoding takes long and reads nothing from memory.
struct Upcoming {
  const char* first = nullptr;
  int64_t pitch = 0, bytes = 0;

  void prefetch(int64_t row) const {
    constexpr int64_t kLine = 64;
    for (int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(first + row * pitch + b, 0, 2);
  }
};

// The multiplier of a tensor with a single scale.
float single_multiplier(const Encoder& e, const RunArgs& args);

// Size of the scratch memory of encode for one panel, in floats.
size_t encode_floats(int64_t rows, int64_t cols);

// Writes the data of the panel of values. Writes the scales too if each block has its own.
// `stream`: data bypass the cache.
void encode(const Loops& loops, const Encoder& e, const RunArgs& args, const Panel& panel,
            float* scratch, Health& health, const Upcoming& upcoming, bool stream);

// Writes the data of a panel of codes, all of which have the same scale.
void put_codes(const Loops& loops, const Encoder& e, const RunArgs& args, const Panel& panel,
               float* scratch, bool stream);

// Writes the results of the whole tensor: the single scale of delayed and current scaling, zeros in
// the padding of scale tensors, and the counts.
void finish_encoder(const Encoder& e, const RunArgs& args, const Health& health);

}  // namespace tenon::cpu
