// Adjacent-pair tree sums. This order of additions does not depend on how the work is split.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/cpu/loops.h"

namespace tenon::cpu {

// Tree sum of n ≥ 1 values. scratch holds n + 64 floats: all levels, one after the other.
float tree_sum(const Loops& loops, const float* values, float* scratch, size_t n);

// Tree sum over the rows of a matrix of `rows` ≥ 1 contiguous rows. The result is in row 0.
void tree_sum_rows(const Loops& loops, float* matrix, size_t rows, size_t cols);

// A stack of finished subtrees of one size, each `width` values wide. Pushing the pieces of an
// aligned range in order and collapsing gives the tree sum of the range. Level k holds 2^k pieces.
class TreeStack {
 public:
  // Size for up to `pieces` pieces: levels(pieces)·width floats.
  static size_t levels(uint64_t pieces);

  TreeStack(float* storage, size_t width) : storage_(storage), width_(width) {}
  // Where piece `count` is kept until the next one, if it is an even one.
  [[nodiscard]] float* at_even(uint64_t count, size_t begin) const {
    return count % 2 == 0 ? at(0, begin) : nullptr;
  }
  // Adds piece `count` (0 first), columns [begin, begin + n). Overwrites `piece`, which may be at
  // at_even().
  void push(const Loops& loops, uint64_t count, size_t begin, float* piece, size_t n);
  // Writes the sum of all `count` ≥ 1 pieces, columns [0, n), to `out`.
  void collapse(const Loops& loops, uint64_t count, float* out, size_t n) const;

 private:
  [[nodiscard]] float* at(size_t level, size_t begin) const {
    return storage_ + level * width_ + begin;
  }
  float* storage_;
  size_t width_;
};

// The tree over a range that need not start at a multiple of 2^k: finished subtrees in order. To
// join two ranges, append the later one.
class Forest {
 public:
  explicit Forest(uint64_t begin = 0) : next_(begin) {}
  // The next n values of the sequence. scratch as for tree_sum.
  void push(const Loops& loops, const float* values, size_t n, float* scratch);
  void append(const Forest& later);
  // The tree sum, padded with −0. +0 if nothing was pushed.
  [[nodiscard]] float total() const;

 private:
  struct Tree {
    int level;
    uint64_t index;  // in units of 2^level
    float sum;
  };
  void push(int level, float value);

  uint64_t next_;
  std::vector<Tree> trees_;
};

}  // namespace tenon::cpu
