// Runs the body of a step, whatever its head, on the tiles of an item.
#pragma once

#include <memory>
#include <span>

#include "backend/cpu/grid.h"
#include "backend/cpu/leftovers.h"
#include "step/backend.h"

namespace tenon::cpu {

// Columns [begin, begin + n) of a product, from the item's first row on.
struct ProductRange {
  int64_t begin = 0, n = 0;
  float* data = nullptr;
  int64_t stride = 0;
};

class TileRunner {
 public:
  virtual ~TileRunner() = default;
  // Item `index` of the grid: loads, formulas, stores, and its part of every sum. A Gemm head gives
  // the columns of the product that the item reads.
  virtual void run(const RunArgs& args, const Grid& grid, int64_t index, Leftovers& left,
                   std::span<const ProductRange> product = {}) const = 0;
};

// Runs words as loops over tiles. Accepts every body.
std::unique_ptr<const TileRunner> interpreter(const Step& step, const Loops& loops);

}  // namespace tenon::cpu
