// Runs words as loops over tiles.
#include <algorithm>
#include <array>

#include "backend/cpu/item.h"
#include "backend/cpu/program.h"
#include "backend/cpu/tile_runner.h"

namespace tenon::cpu {

namespace {

class InterpretedItem final : public Item {
 public:
  InterpretedItem(const Step& step, const LoopProgram& program, const Loops& loops,
                  const RunArgs& args, const Grid& grid, int64_t index, Leftovers& left,
                  std::span<const ProductRange> product)
      : Item(step, program.slots, loops, args, grid, index, left, product), program_(program) {}

 private:
  void fill_constants() override {
    // The size of the largest tile. Row values have one element per row.
    const int64_t rows = std::min(grid_.tile_rows, row_end_ - row_begin_);
    const auto n = static_cast<size_t>(rows * std::max<int64_t>(grid_.tile_cols(), 1));
    for (const auto& [id, value] : program_.constants) std::fill_n(slot_[id], n, value);
    for (size_t i = 0; i < step_.loads.size(); ++i) {
      const Load::From from = step_.loads[i].from;
      if (from == Load::From::parameter || from == Load::From::scalar)
        std::fill_n(slot_[i], n, single(i));
      else if (from == Load::From::row)
        fill_row(i);
    }
    execute(program_.once, n);
  }

  // Phase by phase. The rows stay in the cache until the last phase.
  void walk_rows(int64_t row, int64_t rows) override {
    for (size_t i = 0; i < step_.loads.size(); ++i)
      if (step_.loads[i].from == Load::From::column) fill_column(i, row, rows);
    const size_t last = program_.phases.size() - 1;
    for (size_t p = 0; p <= last; ++p) {
      const Phase& phase = program_.phases[p];
      run_row(phase, rows);
      for (int64_t c = col_begin_; c < col_end_; c += grid_.tile_cols()) {
        const Tile t{row, rows, c, std::min(grid_.tile_cols(), col_end_ - c)};
        for (const uint32_t i : phase.loads) fill_load(i, t);
        execute(phase.tile, t.size());
        if (p < last)
          add_total(slot_[phase.result], t);
        else
          for (size_t k = 0; k < step_.stores.size(); ++k) store(k, t, slot_[program_.results[k]]);
      }
      if (p < last) end_total(static_cast<uint32_t>(p), rows);
    }
    for (size_t k = 0; chunk_ == 0 && k < step_.stores.size(); ++k)
      if (step_.stores[k].to == Store::To::column)
        store_column(k, slot_[program_.results[k]], row, rows);
  }

  void run_row(const Phase& phase, int64_t rows) {
    execute(phase.row, static_cast<size_t>(rows));
    const int64_t width = grid_.tile_cols();
    for (const auto& [from, to] : phase.spread)
      for (int64_t r = 0; r < rows; ++r) std::fill_n(slot_[to] + r * width, width, slot_[from][r]);
  }

  void execute(const std::vector<Instruction>& list, size_t n) const {
    for (const Instruction& i : list) {
      std::array<const float*, 4> in{};
      for (int k = 0; k < i.arity; ++k) in[k] = slot_[i.in[k]];
      i.loop(slot_[i.out], in.data(), n);
    }
  }

  const LoopProgram& program_;
};

class Interpreter final : public TileRunner {
 public:
  Interpreter(const Step& step, const Loops& loops)
      : step_(step), loops_(loops), program_(compile(step, loops)) {}

  void run(const RunArgs& args, const Grid& grid, int64_t index, Leftovers& left,
           std::span<const ProductRange> product) const override {
    InterpretedItem(step_, program_, loops_, args, grid, index, left, product).run();
  }

 private:
  Step step_;
  const Loops& loops_;
  LoopProgram program_;
};

}  // namespace

std::unique_ptr<const TileRunner> interpreter(const Step& step, const Loops& loops) {
  return std::make_unique<const Interpreter>(step, loops);
}

}  // namespace tenon::cpu
