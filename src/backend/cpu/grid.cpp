// The sizes of tiles, blocks and chunks.
#include "backend/cpu/grid.h"

#include <bit>
#include <vector>

namespace tenon::cpu {

namespace {

constexpr int64_t kChunkCols = 8 * kTileCols;
constexpr int64_t kItemElements = 1 << 15;  // enough work to be worth handing to a thread
constexpr int64_t kSumRows = 128;           // partial column sums then cost under 2 % of traffic

bool stores_any(const Step& step, Store::To to) {
  return std::ranges::any_of(step.stores, [&](const Store& s) { return s.to == to; });
}

}  // namespace

Grid make_grid(const Step& step, int64_t rows) {
  Grid g{.rows = rows, .cols = step.cols};
  const int64_t cols = std::max<int64_t>(g.cols, 1);
  if (cols < kTileCols)
    g.tile_rows = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(kTileCols / cols)));
  // A sum over everything follows the rows, so its items must hold whole rows.
  const bool whole_rows = cols <= kTileCols || stores_any(step, Store::To::sum);
  g.chunk_cols = whole_rows ? cols : std::min(cols, kChunkCols);
  g.block_rows = g.tile_rows;
  while (g.block_rows < rows && g.block_rows * g.chunk_cols < kItemElements) g.block_rows *= 2;
  if (stores_any(step, Store::To::column_sum))
    while (g.block_rows < rows && g.block_rows < kSumRows) g.block_rows *= 2;
  return g;
}

float* scratch_memory(size_t floats) {
  constexpr size_t kAlignment = 64;
  thread_local std::vector<float> memory;
  if (memory.size() < floats + kAlignment) memory.resize(floats + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (kAlignment - address % kAlignment) % kAlignment / sizeof(float);
}

}  // namespace tenon::cpu
