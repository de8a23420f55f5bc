// What an encoder does with a band of its tensor: scales, then data, rowwise and columnwise.
#pragma once

#include "backend/cpu/loops.h"
#include "step/backend.h"

namespace tenon::cpu {

// Rows [row, row + rows) by columns [col, col + cols) of a tensor, fp32, dense. A panel holds whole
// blocks, except at the tensor's end.
struct Panel {
  int64_t row, rows, col, cols;
  const float* data;
};

// How elements fared; each is counted at most once.
struct Health {
  uint64_t saturated = 0, flushed = 0, nonfinite = 0;
  Health& operator+=(const Health& h);
};

// Floats of scratch that encode needs for a panel.
size_t encode_floats(int64_t rows, int64_t cols);

// Writes the panel's data, and its scales where blocks have their own.
void encode(const Loops& loops, const Encoder& e, const RunArgs& args, const Panel& panel,
            float* scratch, Health& health);

// What belongs to the whole tensor: the one scale of delayed and current, zeros in the padding of
// scale tensors, the counts.
void finish_encoder(const Encoder& e, const RunArgs& args, const Health& health);

}  // namespace tenon::cpu
