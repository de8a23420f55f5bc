// The interpreter on one item: loads tiles, runs the program, stores, and keeps its part of every
// sum.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "backend/cpu/encode.h"
#include "backend/cpu/grid.h"
#include "backend/cpu/loops.h"
#include "backend/cpu/program.h"
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
  Item(const Step& step, const LoopProgram& program, const Loops& loops, const RunArgs& args,
       const Grid& grid, int64_t index, Leftovers& leftovers,
       std::span<const ProductRange> product = {});
  void run();

 private:
  struct Tile {
    int64_t row, rows, col, cols;
    [[nodiscard]] size_t size() const { return static_cast<size_t>(rows * cols); }
  };

  void fill_constants();
  void walk_rows(int64_t row, int64_t rows);
  void run_row(const Phase& phase, int64_t rows);
  void load(const Phase& phase, const Tile& t);
  void add_total(const float* value, const Tile& t);
  void end_total(uint32_t total, int64_t rows);
  void store_column(size_t k, int64_t row, int64_t rows) const;
  void execute(const std::vector<Instruction>& list, size_t n) const;
  void load_blocks(size_t i, const Tile& t);
  void load_random(size_t i, const Tile& t);
  void load_product(size_t i, const Tile& t);
  void store(size_t k, const Tile& t);
  void store_panel(size_t k, const Tile& t, const float* value);
  void encode_band(int64_t row, int64_t rows);
  void sum_columns(size_t k, const Tile& t, const float* value);
  void sum_ordered(size_t k, const Tile& t, const float* value);
  void sum_rows(size_t k, const Tile& t, const float* value);
  void close();

  const Step& step_;
  const LoopProgram& program_;
  const Loops& loops_;
  const RunArgs& args_;
  const Grid& grid_;
  Leftovers& leftovers_;
  std::span<const ProductRange> product_;
  int64_t index_, block_, chunk_;
  int64_t row_begin_, row_end_, col_begin_, col_end_;
  // Scratch memory: tiles (also for loads that are not read in place), row vectors by load, stacks
  // of partial sums by store, and two temporaries for sums. One temporary is as wide as a row
  // vector. The other holds a tile and its tree.
  std::optional<Scratch> scratch_;
  std::vector<float*> slot_, row_, own_, stack_;
  float* wide_ = nullptr;
  float* spare_ = nullptr;
  float* totals_ = nullptr;      // totals of the phase, one value per row
  float* total_tree_ = nullptr;  // stack of the totals if a row has several tiles
  std::vector<uint32_t> most_;   // maximum bits of |value| by store
  std::vector<PanelRange> panels_;
  std::vector<float*> panel_data_;
  float* encode_scratch_ = nullptr;
  int64_t band_ = 0;            // first row of the band in the panels
  std::vector<Health> health_;  // by encoder
};

}  // namespace tenon::cpu
