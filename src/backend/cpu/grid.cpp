// Chooses the sizes of tiles, blocks and chunks.
#include "backend/cpu/grid.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <bit>
#include <vector>

namespace tenon::cpu {

namespace {

constexpr int64_t kChunkCols = 8 * kTileCols;
constexpr int64_t kItemElements = 1 << 15;   // enough work to pay for handing it to a thread
constexpr int64_t kFlatRows = 8;             // panels of at most so many rows may be wide
constexpr int64_t kSumRows = 128;            // partial column sums then cost under 2 % of traffic
constexpr int64_t kProductRows = 128;        // rows per read of a panel of b
constexpr int64_t kProductFloats = 1 << 18;  // product of an item; fits the second-level cache
constexpr int64_t kProductItems = 48;        // divide evenly among many threads, unless too thin

bool stores_any(const Step& step, Store::To to) {
  return std::ranges::any_of(step.stores, [&](const Store& s) { return s.to == to; });
}

std::vector<size_t> stores_of(const Step& step, size_t encoder) {
  std::vector<size_t> found;
  for (size_t k = 0; k < step.stores.size(); ++k)
    if (step.stores[k].to == Store::To::encoded && step.stores[k].arg == encoder)
      found.push_back(k);
  return found;
}

// Columns and rows that share a scale.
int64_t block_cols(const Encoder& e) {
  int64_t most = 1;
  for (const Orientation o : kOrientations)
    if (e.has(o)) most = std::max(most, e.format.blocks(o).cols);
  return most;
}
// Whether the store alone writes whole blocks of its tensor.
bool aligned(const Encoder& e, const Store& s, int64_t cols) {
  const int64_t n = block_cols(e);
  const bool ends = cols % n == 0 || s.columns.offset + cols == e.cols;
  return s.columns.contiguous() && s.columns.offset % n == 0 && ends;
}

// Panels of an encoder: one per store, one for all stores of a range, or one whole row.
enum class PanelKind { store, range, row };
PanelKind panel_kind(const Step& step, size_t encoder) {
  const Encoder& e = step.encoders[encoder];
  const std::vector<size_t> stores = stores_of(step, encoder);
  const auto all = [&](auto rule) {
    return std::ranges::all_of(stores, [&](size_t k) { return rule(step.stores[k]); });
  };
  if (all([&](const Store& s) { return aligned(e, s, step.cols); })) return PanelKind::store;
  // Interleaved halves: a chunk is one range if it holds whole pieces of both halves.
  const auto pieces = [&](const Store& s) {
    return !s.columns.contiguous() && kTileCols % s.columns.block == 0;
  };
  return all(pieces) ? PanelKind::range : PanelKind::row;
}

// Transposing 64 rows of codes writes whole lines. More lines of a column at a time take less time,
// but values in fp32, or a product, would not fit the cache with them.
int64_t block_rows(const Step& step, size_t encoder, int64_t rows) {
  const Encoder& e = step.encoders[encoder];
  constexpr int64_t kLine = 64, kLines = 4, kItems = 16;  // enough items for the threads
  int64_t most = 1;
  const bool codes = e.format.blocks(Orientation::columnwise).single() && step.is_map() &&
                     panel_kind(step, encoder) != PanelKind::row;
  if (e.columnwise && info(e.format.scaling).transposes) {
    most = kLine;
    const int64_t chunks = cdiv(step.cols, kTileCols);
    while (codes && most < kLines * kLine && rows / (2 * most) * chunks >= kItems) most *= 2;
  }
  for (const Orientation o : kOrientations)
    if (e.has(o)) most = std::max(most, e.format.blocks(o).rows);
  return most;
}

// Products need tall items. The cache and the number of items limit the height.
void grow_for_product(const Step& step, Grid& g) {
  const int64_t gates = std::max<int64_t>(1, cdiv(step.gemm()->cols, std::max<int64_t>(g.cols, 1)));
  const int64_t width = g.chunk_cols * gates;
  const auto fits = [&](int64_t rows) {
    return rows <= kProductRows && rows * width <= kProductFloats &&
           (rows <= 32 || cdiv(g.rows, rows) * g.chunks() >= kProductItems);
  };
  while (g.block_rows < g.rows && fits(2 * g.block_rows)) g.block_rows *= 2;
}

}  // namespace

std::vector<PanelRange> panels(const Step& step, int64_t begin, int64_t n) {
  std::vector<PanelRange> list;
  for (size_t i = 0; i < step.encoders.size(); ++i) {
    const std::vector<size_t> stores = stores_of(step, i);
    switch (panel_kind(step, i)) {
      case PanelKind::store:
        for (const size_t k : stores)
          list.push_back({i, {k}, begin + step.stores[k].columns.offset, n});
        break;
      case PanelKind::range: {
        const ColumnMap& m = step.stores[stores[0]].columns;
        const int64_t share = m.stride / m.block;  // 2 if the halves are side by side
        list.push_back({i, stores, begin * share, n * share});
        break;
      }
      case PanelKind::row:
        list.push_back({i, stores, 0, step.encoders[i].cols});
        break;
    }
  }
  return list;
}

Grid make_grid(const Step& step, int64_t rows) {
  int64_t stored = 0;
  for (const Store& s : step.stores)
    if (s.to == Store::To::tile) stored += rows * step.cols * info(s.dtype).bytes;
  int64_t encoded = 0;
  for (const Encoder& e : step.encoders) encoded += rows * e.cols * info(e.format.dtype).bytes;
  Grid g{.rows = rows,
         .cols = step.cols,
         .stream = stored >= kStreamBytes,
         .stream_codes = encoded >= kStreamBytes};
  const int64_t cols = std::max<int64_t>(g.cols, 1);
  if (cols < kTileCols)
    g.tile_rows = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(kTileCols / cols)));
  // Items must hold whole rows in three cases: a sum over all elements, which follows the rows; a
  // row total; a panel that cannot be split.
  bool whole_rows = cols <= kTileCols || !step.totals().empty() || stores_any(step, Store::To::sum);
  g.columns = stores_any(step, Store::To::column);
  g.band_rows = g.tile_rows;
  for (size_t i = 0; i < step.encoders.size(); ++i) {
    whole_rows = whole_rows || panel_kind(step, i) == PanelKind::row;
    g.band_rows = std::max(g.band_rows, block_rows(step, i, rows));
  }
  if (!step.encoders.empty() && stores_any(step, Store::To::column_sum))
    g.band_rows = std::max(g.band_rows, kGroupRows);
  // Tall panels are narrow, to fit the second-level cache.
  const bool turned = std::ranges::any_of(step.loads, &Load::transposed);
  const bool wide = !step.gemm() && !turned && (step.encoders.empty() || g.band_rows <= kFlatRows);
  // Reading whole rows takes less time than reading strips of them. Few rows are split for the sake
  // of the threads. Sums and panels stay narrow for the sake of the cache.
  const bool tall = rows >= kItemElements / kChunkCols;
  const bool narrow =
      stores_any(step, Store::To::column_sum) ||
      std::ranges::any_of(step.encoders, [](const Encoder& e) {
        return e.counts || e.columnwise || !e.format.blocks(Orientation::rowwise).single();
      });
  const int64_t chunk = !wide ? kTileCols : tall && !narrow ? kItemElements : kChunkCols;
  g.chunk_cols = whole_rows ? cols : std::min(cols, chunk);
  g.block_rows = g.band_rows;
  if (step.gemm()) {
    grow_for_product(step, g);
    return g;
  }
  while (g.block_rows < rows && g.block_rows * g.chunk_cols < kItemElements) g.block_rows *= 2;
  if (turned)
    while (g.block_rows < rows && g.block_rows < kTurnedRows) g.block_rows *= 2;
  if (stores_any(step, Store::To::column_sum))
    while (g.block_rows < rows && g.block_rows < kSumRows) g.block_rows *= 2;
  return g;
}

void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace tenon::cpu
