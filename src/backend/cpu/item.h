// One item of a call: its memory, loads into slots, stores from slots, and its part of every sum. A
// tile runner decides what computes the values between them.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "backend/cpu/encode.h"
#include "backend/cpu/grid.h"
#include "backend/cpu/loops.h"
#include "backend/cpu/sums.h"
#include "backend/cpu/tile_runner.h"
#include "core/scratch.h"
#include "step/backend.h"

namespace tenon::cpu {

// Column c of row r; the dtype's size decides what a column is.
void* element(const View& view, int64_t r, int64_t c);

// Writes step columns [begin, begin + n) through the column map of the store.
void store_columns(StoreLoop loop, const Store& store, const View& view, int64_t row, int64_t begin,
                   int64_t n, const float* from);

class Item {
 public:
  // `slots`: tiles in fp32, first one for each load.
  Item(const Step& step, size_t slots, const Loops& loops, const RunArgs& args, const Grid& grid,
       int64_t index, Leftovers& leftovers, std::span<const ProductRange> product);
  virtual ~Item() = default;
  Item(const Item&) = delete;
  Item& operator=(const Item&) = delete;
  void run();

 protected:
  struct Tile {
    int64_t row, rows, col, cols;
    [[nodiscard]] size_t size() const { return static_cast<size_t>(rows * cols); }
  };

  virtual void fill_constants() = 0;  // values that are the same in every tile of the item
  // Processes the rows of a tile, or of one row of tiles. There are `walk` rows, fewer at the end.
  virtual void walk_rows(int64_t row, int64_t rows) = 0;
  // What a panel holds at the end of a band. nothing: its stores wrote the results.
  enum class Held : uint8_t { nothing, values, codes };
  [[nodiscard]] virtual Held held(const PanelRange& p) const;

  void fill_row(size_t i);  // the values of a row load, repeated for each row of a tile
  void fill_load(size_t i, const Tile& t);
  void fill_column(size_t i, int64_t row, int64_t rows);
  [[nodiscard]] float single(size_t i) const;  // the value of a parameter or scalar
  void add_total(const float* value, const Tile& t);
  // The total of row i of the walk from the tree sums of its pieces: blocks, then pieces of a
  // block.
  void set_total(int64_t i, const float* pieces, size_t blocks, size_t rest);
  void end_total(uint32_t total, int64_t rows);
  void store_column(size_t k, const float* values, int64_t row, int64_t rows) const;
  void store(size_t k, const Tile& t, const float* value);
  // Columns [begin, begin + n) of a column sum over the rows of one walk. Overwrites `piece`.
  void push_columns(size_t k, int64_t row, int64_t begin, float* piece, size_t n);
  // Where push_columns() leaves this piece, all columns. Empty if it is added to others.
  [[nodiscard]] float* even_piece(size_t k, int64_t row) const;
  void join_amax(size_t k, uint32_t most) { most_[k] = std::max(most_[k], most); }

  const Step& step_;
  const Loops& loops_;
  const RunArgs& args_;
  const Grid& grid_;
  Leftovers& leftovers_;
  std::span<const ProductRange> product_;
  int64_t index_, block_, chunk_;
  int64_t row_begin_, row_end_, col_begin_, col_end_;
  int64_t walk_;      // a power of two
  int64_t band_ = 0;  // first row of the band in the panels
  std::vector<PanelRange> panels_;
  std::vector<float*> panel_data_;
  // Scratch memory: tiles (also for loads that are not read in place), row vectors by load, stacks
  // of partial sums by store, and two temporaries for sums. One temporary is as wide as a row
  // vector. The other holds a tile and its tree.
  std::optional<Scratch> scratch_;
  std::vector<float*> slot_, row_, own_, stack_;

 private:
  void prefetch(int64_t row) const;
  [[nodiscard]] uint64_t walk_of(int64_t row) const {
    return static_cast<uint64_t>((row - row_begin_) / walk_);
  }
  void load_transposed(size_t i, const Tile& t);
  void load_blocks(size_t i, const Tile& t);
  void load_random(size_t i, const Tile& t);
  void load_product(size_t i, const Tile& t);
  [[nodiscard]] bool in_place(const PanelRange& p, size_t k) const;
  void store_panel(size_t k, const Tile& t, const float* value);
  void encode_band(int64_t row, int64_t rows);
  [[nodiscard]] Upcoming after_band(int64_t end) const;
  void sum_columns(size_t k, const Tile& t, const float* value);
  void sum_ordered(size_t k, const Tile& t, const float* value);
  void sum_rows(size_t k, const Tile& t, const float* value);
  void close();

  float* wide_ = nullptr;
  float* spare_ = nullptr;
  float* totals_ = nullptr;      // totals of the phase, one value per row
  float* total_tree_ = nullptr;  // stack of the totals if a row has several tiles
  std::vector<uint32_t> most_;   // maximum bits of |value| by store
  std::vector<char*> turned_;    // rows of transposed loads in order of rows
  float* encode_scratch_ = nullptr;
  std::vector<Health> health_;  // by encoder
};

}  // namespace tenon::cpu
