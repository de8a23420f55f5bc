// How a call is cut into items. Bits do not depend on it: items are aligned subtrees of every sum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/cpu/program.h"
#include "backend/cpu/sums.h"
#include "tenon/format.h"

namespace tenon::cpu {

inline constexpr int64_t kTileCols = static_cast<int64_t>(kTile);
inline constexpr int64_t kOrderedRows = 32;  // rows that an ordered column sum adds one by one
inline constexpr size_t kTreeLevels = 64;    // enough for the sum of any row
// Less than this is likely read from the cache next.
inline constexpr int64_t kStreamBytes = 1 << 20;

// Items are blocks of 2^k rows by chunks of columns; an item walks its tiles row by row.
struct Grid {
  int64_t rows = 0, cols = 0;
  int64_t tile_rows = 1;   // more than one only if a tile holds whole rows
  int64_t band_rows = 1;   // a power of two tiles: what encoders look at together
  int64_t block_rows = 1;  // a power of two bands
  int64_t chunk_cols = 1;  // a power of two tiles, or all columns
  bool stream = false;     // results go past the cache; each item ends with end_stream()
  bool columns = false;    // numbers that only depend on the row are stored, even if it is empty

  [[nodiscard]] int64_t blocks() const { return cdiv(rows, block_rows); }
  [[nodiscard]] int64_t chunks() const { return cdiv(cols, chunk_cols); }
  // Items side by side; one for an empty row that is stored all the same.
  [[nodiscard]] int64_t item_chunks() const { return columns && cols == 0 ? 1 : chunks(); }
  [[nodiscard]] int64_t items() const { return rows == 0 ? 0 : blocks() * item_chunks(); }
  [[nodiscard]] int64_t tile_cols() const { return std::min(cols, kTileCols); }

  // Floats of one row vector of an item, repeated for every row of a tile.
  [[nodiscard]] size_t row_floats() const {
    return static_cast<size_t>(rup(chunk_cols * tile_rows, 16));
  }
  // Floats of one store's stack of partial sums; an ordered sum has a row to add to besides.
  [[nodiscard]] size_t stack_floats(const Store& s) const {
    if (s.to == Store::To::row_sum) return kTreeLevels;
    if (s.to != Store::To::column_sum) return 0;
    const int64_t pieces = s.ordered ? cdiv(block_rows, kOrderedRows) : block_rows / tile_rows;
    return (TreeStack::levels(static_cast<uint64_t>(pieces)) + (s.ordered ? 1 : 0)) * row_floats();
  }
};

Grid make_grid(const Step& step, int64_t rows);

// The part of an encoder's tensor that an item holds a band of, in fp32: columns [begin, begin +
// n).
struct PanelRange {
  size_t encoder = 0;
  std::vector<size_t> stores;  // where its elements come from
  int64_t begin = 0, n = 0;
};
// The panels of the step columns [begin, begin + n), which are a chunk of the grid.
std::vector<PanelRange> panels(const Step& step, int64_t begin, int64_t n);

// Before other threads may read what this one wrote past the cache.
void end_stream();

}  // namespace tenon::cpu
