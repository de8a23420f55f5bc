// Splits a call into items. Items are aligned subtrees of every sum, so bits do not depend on the
// split.
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
inline constexpr int64_t kOrderedRows = 32;  // rows that an ordered column sum adds in sequence
inline constexpr int64_t kGroupRows = 4;     // most rows whose column sums a compiled body adds
inline constexpr int64_t kTurnedRows = 64;   // rows of a transposed tensor that are read together
inline constexpr size_t kTreeLevels = 64;    // enough for a row of any length
// Smaller results are probably read again from the cache, so they are not streamed.
inline constexpr int64_t kStreamBytes = 1 << 20;

// An item is a block of 2^k rows by a chunk of columns. It processes its tiles row by row.
struct Grid {
  int64_t rows = 0, cols = 0;
  int64_t tile_rows = 1;      // above 1 only if a tile holds whole rows
  int64_t band_rows = 1;      // a power of two tiles; panels hold one band at a time
  int64_t block_rows = 1;     // a power of two bands
  int64_t chunk_cols = 1;     // a power of two tiles, or all columns
  bool stream = false;        // results bypass the cache; each item ends with end_stream()
  bool stream_codes = false;  // the same for the codes of encoders
  bool columns = false;       // values of one per row are stored, even if rows are empty

  [[nodiscard]] bool streams() const { return stream || stream_codes; }
  [[nodiscard]] int64_t blocks() const { return cdiv(rows, block_rows); }
  [[nodiscard]] int64_t chunks() const { return cdiv(cols, chunk_cols); }
  // Number of items across the columns. An empty row has one item if it stores a value per row.
  [[nodiscard]] int64_t item_chunks() const { return columns && cols == 0 ? 1 : chunks(); }
  [[nodiscard]] int64_t items() const { return rows == 0 ? 0 : blocks() * item_chunks(); }
  [[nodiscard]] int64_t tile_cols() const { return std::min(cols, kTileCols); }

  // Size of one row vector of an item, repeated for every row of a tile, in floats.
  [[nodiscard]] size_t row_floats() const {
    return static_cast<size_t>(rup(chunk_cols * tile_rows, 16));
  }
  // Size of the stack of partial sums of one store, in floats. An ordered sum needs one more row.
  [[nodiscard]] size_t stack_floats(const Store& s) const {
    if (s.to == Store::To::row_sum) return kTreeLevels;
    if (s.to != Store::To::column_sum) return 0;
    const int64_t pieces = s.ordered ? cdiv(block_rows, kOrderedRows) : block_rows / tile_rows;
    return (TreeStack::levels(static_cast<uint64_t>(pieces)) + (s.ordered ? 1 : 0)) * row_floats();
  }
};

Grid make_grid(const Step& step, int64_t rows);

// A range of columns [begin, begin + n) of the tensor of an encoder. An item holds one band of it
// in fp32.
struct PanelRange {
  size_t encoder = 0;
  std::vector<size_t> stores;  // stores that write its elements
  int64_t begin = 0, n = 0;
};
// The panels for step columns [begin, begin + n). The range is one chunk of the grid.
std::vector<PanelRange> panels(const Step& step, int64_t begin, int64_t n);

// Makes streamed stores visible to other threads.
void end_stream();

}  // namespace tenon::cpu
