// Runs the body of a step, whatever its head, on the tiles of an item.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "backend/cpu/grid.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/leftovers.h"
#include "step/backend.h"

namespace tenon::cpu {

// Columns [begin, begin + n) of a product, from the item's first row on.
struct ProductRange {
  int64_t begin = 0, n = 0;
  float* data = nullptr;
  int64_t stride = 0;
};

// A frame of compiled code has room for so many.
inline constexpr size_t kMostCompiledViews = 40;

class TileRunner {
 public:
  virtual ~TileRunner() = default;
  virtual void prepare() const {}  // the one-time work of the first run
  // Item `index` of the grid: loads, formulas, stores, and its part of every sum. A Gemm head gives
  // the columns of the product that the item reads.
  virtual void run(const RunArgs& args, const Grid& grid, int64_t index, Leftovers& left,
                   std::span<const ProductRange> product = {}) const = 0;
};

// Runs words as loops over tiles. Accepts every body.
std::unique_ptr<const TileRunner> interpreter(const Step& step, const Loops& loops);

// Why no body of the step is compiled for the instruction set. Empty: it is.
std::string jit_refusal(const Step& step, const Isa& isa, bool here);
// The body compiled for this processor at its first run.
std::unique_ptr<const TileRunner> compiled(const Step& step, const Isa& isa);

// The best of both.
std::unique_ptr<const TileRunner> tile_runner(const Step& step, const Isa& isa);

}  // namespace tenon::cpu
