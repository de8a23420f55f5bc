// Builds the trees bottom up.
#include "backend/cpu/sums.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tenon::cpu {

namespace {}  // namespace

float tree_sum(const Loops& loops, const float* values, float* scratch, size_t n) {
  const float* from = values;
  float* to = scratch;
  while (n > 1) {
    const size_t pairs = n / 2;
    loops.add_pairs(to, from, pairs);
    if (n % 2) to[pairs] = from[n - 1];
    n = pairs + n % 2;
    from = to;
    to += n;
  }
  return from[0];
}

void tree_sum_rows(const Loops& loops, float* matrix, size_t rows, size_t cols) {
  while (rows > 1) {
    for (size_t i = 0; i < rows / 2; ++i) {
      const float* const left = matrix + 2 * i * cols;
      loops.add(matrix + i * cols, left, left + cols, cols);
    }
    if (rows % 2 && rows > 1)
      std::memmove(matrix + rows / 2 * cols, matrix + (rows - 1) * cols, cols * sizeof(float));
    rows = rows / 2 + rows % 2;
  }
}

size_t TreeStack::levels(uint64_t pieces) { return std::bit_width(pieces); }

void TreeStack::push(const Loops& loops, uint64_t count, size_t begin, float* piece, size_t n) {
  const auto level = static_cast<size_t>(std::countr_one(count));
  for (size_t k = 0; k < level; ++k) {
    float* const sum = k + 1 < level ? piece : at(level, begin);
    loops.add(sum, at(k, begin), piece, n);
  }
  if (level == 0 && piece != at(0, begin)) std::memcpy(at(0, begin), piece, n * sizeof(float));
}

void TreeStack::collapse(const Loops& loops, uint64_t count, float* out, size_t n) const {
  bool first = true;
  for (size_t level = 0; count >> level; ++level) {
    if (!((count >> level) & 1)) continue;
    const float* part = storage_ + level * width_;
    if (first)
      std::memcpy(out, part, n * sizeof(float));
    else
      loops.add(out, part, out, n);
    first = false;
  }
}

void Forest::push(const Loops& loops, const float* values, size_t n, float* scratch) {
  while (n > 0) {
    // The largest subtree that starts here and is complete in the input.
    const uint64_t aligned = next_ == 0 ? n : next_ & (~next_ + 1);
    const size_t size = std::bit_floor(std::min<uint64_t>(aligned, n));
    push(std::countr_zero(size), tree_sum(loops, values, scratch, size));
    values += size;
    n -= size;
  }
}

void Forest::push(int level, float value) {
  uint64_t at = next_ >> level;
  next_ += uint64_t{1} << level;
  // A subtree with an odd index joins its left sibling if that is complete here too.
  while (at % 2 == 1 && !trees_.empty() && trees_.back().level == level &&
         trees_.back().index == at - 1) {
    value = trees_.back().sum + value;
    trees_.pop_back();
    ++level;
    at /= 2;
  }
  trees_.push_back({level, at, value});
}

void Forest::append(const Forest& later) {
  for (const Tree& t : later.trees_) push(t.level, t.sum);
}

float Forest::total() const {
  if (trees_.empty()) return 0;
  // From the right end: a tree without a right sibling moves up unchanged until it meets one.
  std::vector<Tree> rest = trees_;
  while (rest.size() > 1) {
    Tree right = rest.back();
    rest.pop_back();
    const Tree& left = rest.back();
    while (right.level < left.level) right.level += 1, right.index /= 2;
    rest.back() = {left.level + 1, left.index / 2, left.sum + right.sum};
  }
  return rest.back().sum;
}

}  // namespace tenon::cpu
