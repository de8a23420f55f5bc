// The loads, stores and sums of an item.
#include "backend/cpu/item.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tenon::cpu {

namespace {

// Contiguous runs of a column map: f(first step column, tensor column, count, stride).
template <class F>
void for_runs(const ColumnMap& map, int64_t begin, int64_t n, F f) {
  if (map.contiguous()) return f(0, begin + map.offset, n, 1);
  if (map.block == 1) return f(0, map(begin), n, map.stride);
  for (int64_t c = begin; c < begin + n;) {
    const int64_t run = std::min(map.block - c % map.block, begin + n - c);
    f(c - begin, map(c), run, 1);
    c += run;
  }
}

void load_columns(const Loops& loops, const Load& l, const View& v, int64_t row, int64_t begin,
                  int64_t n, float* out) {
  for_runs(l.columns, begin, n, [&](int64_t first, int64_t c, int64_t count, int64_t stride) {
    loops.load[index(l.dtype)](out + first, element(v, row, c), stride, static_cast<size_t>(count));
  });
}

// to[c·to_stride + r] = from[r·from_stride + c], in blocks whose lines stay in the cache.
template <class T>
void transpose(T* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t rows,
               int64_t cols) {
  constexpr int64_t kBlock = 16;
  const auto* p = static_cast<const char*>(from);
  for (int64_t r0 = 0; r0 < rows; r0 += kBlock)
    for (int64_t c0 = 0; c0 < cols; c0 += kBlock)
      for (int64_t r = r0; r < std::min(r0 + kBlock, rows); ++r)
        for (int64_t c = c0; c < std::min(c0 + kBlock, cols); ++c)
          std::memcpy(to + c * to_stride + r, p + (r * from_stride + c) * int64_t{sizeof(T)},
                      sizeof(T));
}

// Short pieces of rows end before the prefetcher of the processor has seen their direction.
constexpr int64_t kPrefetchRows = 4;
bool chunk_bound(const Grid& g) { return g.chunk_cols <= kTileCols && g.chunks() > 1; }

float load_one(const Loops& loops, const Load& l, const void* from) {
  float value = 0;
  loops.load[index(l.dtype)](&value, from, 1, 1);
  return value;
}

}  // namespace

void* element(const View& v, int64_t r, int64_t c) {
  return static_cast<char*>(v.data) + (r * v.stride + c) * info(v.dtype).bytes;
}

void store_columns(StoreLoop loop, const Store& s, const View& v, int64_t row, int64_t begin,
                   int64_t n, const float* from) {
  for_runs(s.columns, begin, n, [&](int64_t first, int64_t c, int64_t count, int64_t stride) {
    loop(element(v, row, c), stride, from + first, static_cast<size_t>(count));
  });
}

Item::Item(const Step& step, size_t slots, const Loops& loops, const RunArgs& args,
           const Grid& grid, int64_t index, Leftovers& leftovers,
           std::span<const ProductRange> product)
    : step_(step),
      loops_(loops),
      args_(args),
      grid_(grid),
      leftovers_(leftovers),
      product_(product),
      index_(index),
      block_(index / grid.item_chunks()),
      chunk_(index % grid.item_chunks()),
      row_begin_(block_ * grid.block_rows),
      row_end_(std::min(grid.rows, row_begin_ + grid.block_rows)),
      col_begin_(chunk_ * grid.chunk_cols),
      col_end_(std::min(grid.cols, col_begin_ + grid.chunk_cols)),
      walk_(grid.tile_rows),
      panels_(panels(step, col_begin_, col_end_ - col_begin_)),
      slot_(slots),
      most_(step.stores.size(), 0),
      health_(step.encoders.size()) {
  const auto row_floats = [&](const Load& l) {
    return l.from == Load::From::row ? grid_.row_floats() : 0;
  };
  const auto turned_floats = [&](const Load& l) {
    const int64_t bytes = l.transposed ? kTurnedRows * grid_.chunk_cols * info(l.dtype).bytes : 0;
    return static_cast<size_t>(rup(cdiv(bytes, 4), 16));
  };
  const int64_t band = std::min(grid_.band_rows, row_end_ - row_begin_);
  size_t encode_most = 0;
  size_t panel_floats = 0;
  for (const PanelRange& p : panels_) {
    encode_most = std::max(encode_most, encode_floats(band, p.n));
    panel_floats += static_cast<size_t>(rup(band * p.n, 16));
  }
  size_t floats = slots * kTile + grid_.row_floats() + 4 * kTile + kTreeLevels;
  floats += panel_floats + encode_most;
  for (const Load& l : step_.loads) floats += row_floats(l) + turned_floats(l);
  for (const Store& s : step_.stores) floats += grid_.stack_floats(s);
  float* memory = scratch_.emplace(floats * sizeof(float)).floats();
  const auto take = [&](size_t n) { return std::exchange(memory, memory + n); };
  for (float*& slot : slot_) slot = take(kTile);
  own_.assign(slot_.begin(), slot_.begin() + static_cast<int64_t>(step_.loads.size()));
  for (const Load& l : step_.loads) row_.push_back(take(row_floats(l)));
  for (const Load& l : step_.loads)
    turned_.push_back(reinterpret_cast<char*>(take(turned_floats(l))));
  for (const Store& s : step_.stores) stack_.push_back(take(grid_.stack_floats(s)));
  wide_ = take(grid_.row_floats());
  spare_ = take(3 * kTile);
  totals_ = take(kTile);
  total_tree_ = take(kTreeLevels);
  for (const PanelRange& p : panels_)
    panel_data_.push_back(take(static_cast<size_t>(rup(band * p.n, 16))));
  encode_scratch_ = take(encode_most);
}

void Item::run() {
  fill_constants();
  for (size_t k = 0; k < step_.stores.size(); ++k)
    if (step_.stores[k].to == Store::To::sum)
      leftovers_.forests[k][static_cast<size_t>(index_)] =
          Forest(static_cast<uint64_t>(row_begin_ * grid_.cols));
  const int64_t band = std::max(grid_.band_rows, walk_);
  for (band_ = row_begin_; band_ < row_end_; band_ += band) {
    const int64_t end = std::min(band_ + band, row_end_);
    for (int64_t r = band_; r < end; r += walk_) {
      if (chunk_bound(grid_)) prefetch(r + kPrefetchRows);
      walk_rows(r, std::min(walk_, end - r));
    }
    encode_band(band_, end - band_);
  }
  if (grid_.streams()) end_stream();
  close();
}

void Item::prefetch(int64_t row) const {
  constexpr int64_t kLine = 64;
  if (row >= row_end_) return;
  for (const Load& l : step_.loads) {
    if (l.from != Load::From::tile || l.transposed || !l.columns.contiguous()) continue;
    const auto* from =
        static_cast<const char*>(element(args_.in[l.arg], row, l.columns(col_begin_)));
    const int64_t bytes = (col_end_ - col_begin_) * info(l.dtype).bytes;
    for (int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(from + b);
  }
}

void Item::add_total(const float* value, const Tile& t) {
  for (int64_t i = 0; i < t.rows; ++i) {
    float sum = tree_sum(loops_, value + i * t.cols, spare_, static_cast<size_t>(t.cols));
    if (grid_.tile_rows == 1) {
      const auto count = static_cast<uint64_t>((t.col - col_begin_) / kTileCols);
      TreeStack stack(total_tree_, 1);
      stack.push(loops_, count, 0, &sum, 1);
      if (t.col + t.cols == col_end_) stack.collapse(loops_, count + 1, &sum, 1);
    }
    totals_[i] = sum;
  }
}

void Item::set_total(int64_t i, const float* pieces, size_t blocks, size_t rest) {
  const Scratch scratch((2 * (blocks + rest) + kTreeLevels) * sizeof(float));
  float* const all = scratch.floats();
  float* const memory = all + blocks + 1;
  std::copy_n(pieces, blocks, all);
  if (rest > 0) all[blocks] = tree_sum(loops_, pieces + blocks, memory, rest);
  totals_[i] = tree_sum(loops_, all, memory, blocks + (rest > 0 ? 1 : 0));
}

void Item::end_total(uint32_t total, int64_t rows) {
  if (grid_.cols == 0) std::fill_n(totals_, rows, 0.0F);  // the empty sum
  for (size_t i = 0; i < step_.loads.size(); ++i)
    if (step_.loads[i].from == Load::From::total && step_.loads[i].arg == total)
      std::copy_n(totals_, rows, slot_[i]);
}

void Item::store_column(size_t k, const float* values, int64_t row, int64_t rows) const {
  const Store& s = step_.stores[k];
  const View& v = args_.out[s.arg];
  loops_.store[index(s.dtype)](element(v, row, 0), v.stride, values, static_cast<size_t>(rows));
}

float Item::single(size_t i) const {
  const Load& l = step_.loads[i];
  if (l.from == Load::From::parameter) return args_.parameters[l.arg];
  return load_one(loops_, l, args_.in[l.arg].data);
}

void Item::fill_row(size_t i) {
  const Load& l = step_.loads[i];
  const int64_t width = col_end_ - col_begin_;
  float* row = row_[i];
  load_columns(loops_, l, args_.in[l.arg], 0, col_begin_, width, row);
  for (int64_t r = 1; r < grid_.tile_rows; ++r)
    std::memcpy(row + r * width, row, static_cast<size_t>(width) * sizeof(float));
}

void Item::fill_column(size_t i, int64_t row, int64_t rows) {
  const Load& l = step_.loads[i];
  const View& v = args_.in[l.arg];
  loops_.load[index(l.dtype)](slot_[i], element(v, row, 0), v.stride, static_cast<size_t>(rows));
}

void Item::fill_load(size_t i, const Tile& t) {
  const Load& l = step_.loads[i];
  switch (l.from) {
    case Load::From::tile:
      if (l.transposed) return load_transposed(i, t);
      for (int64_t k = 0; k < t.rows; ++k)
        load_columns(loops_, l, args_.in[l.arg], t.row + k, t.col, t.cols, slot_[i] + k * t.cols);
      break;
    case Load::From::row:
      slot_[i] = row_[i] + (t.col - col_begin_);
      break;
    case Load::From::block:
      load_blocks(i, t);
      break;
    case Load::From::random:
      load_random(i, t);
      break;
    case Load::From::product:
      load_product(i, t);
      break;
    case Load::From::column:
    case Load::From::total:
    case Load::From::scalar:
    case Load::From::parameter:
      break;  // the same in every tile
  }
}

// The first of every kTurnedRows rows transposes the codes of all of them.
void Item::load_transposed(size_t i, const Tile& t) {
  const Load& l = step_.loads[i];
  const View& v = args_.in[l.arg];
  const int64_t width = grid_.chunk_cols;
  const int64_t bytes = info(l.dtype).bytes;
  for (int64_t k = 0; k < t.rows; ++k) {
    const int64_t row = t.row + k;
    const int64_t in_turn = (row - row_begin_) % kTurnedRows;
    char* const turned = turned_[i] + (t.col - col_begin_) * bytes;
    for_runs(l.columns, t.col, t.cols, [&](int64_t first, int64_t c, int64_t n, int64_t stride) {
      if (in_turn != 0) return;
      const int64_t rows = std::min(kTurnedRows, row_end_ - row);
      const void* const from = element(v, c, row);
      char* const to = turned + first * bytes;
      const int64_t pitch = n > 1 ? stride * v.stride : 0;  // of one row it may be any number
      if (bytes == 1)
        loops_.transpose_bytes(reinterpret_cast<uint8_t*>(to), width,
                               static_cast<const uint8_t*>(from), pitch, n, rows, false);
      else if (bytes == 2)
        transpose(reinterpret_cast<uint16_t*>(to), width, from, pitch, n, rows);
      else
        transpose(reinterpret_cast<uint32_t*>(to), width, from, pitch, n, rows);
    });
    loops_.load[index(l.dtype)](slot_[i] + k * t.cols, turned + in_turn * width * bytes, 1,
                                static_cast<size_t>(t.cols));
  }
}

// One scale per element. Along a block they are runs of one value. If blocks are one column wide,
// they are a row of values.
void Item::load_blocks(size_t i, const Tile& t) {
  const Load& l = step_.loads[i];
  const View& v = args_.in[l.arg];
  const Blocks blocks = l.format.blocks(l.orientation);
  const auto at = [&](int64_t row, int64_t column) {
    return element(v, 0,
                   scale_offset(l.format, l.orientation, row / blocks.rows, column / blocks.cols,
                                {v.rows, v.cols}, v.stride));
  };
  const bool row_of_scales = blocks.cols == 1 && !blocks.transposed && !l.format.swizzled;
  for (int64_t k = 0; k < t.rows; ++k) {
    float* const out = slot_[i] + k * t.cols;
    const int64_t row = t.row + k;
    for_runs(l.columns, t.col, t.cols, [&](int64_t first, int64_t c, int64_t n, int64_t stride) {
      if (row_of_scales)
        return loops_.load[index(l.dtype)](out + first, at(row, c), stride, static_cast<size_t>(n));
      if (stride == 1 && !l.format.swizzled) {
        const int64_t begin = c / blocks.cols;
        const int64_t end = cdiv(c + n, blocks.cols);
        loops_.load[index(l.dtype)](spare_, at(row, c), blocks.transposed ? v.stride : 1,
                                    static_cast<size_t>(end - begin));
        for (int64_t b = begin; b < end; ++b) {
          const int64_t from = std::max(c, b * blocks.cols);
          const int64_t to = std::min(c + n, (b + 1) * blocks.cols);
          std::fill_n(out + first + from - c, to - from, spare_[b - begin]);
        }
        return;
      }
      for (int64_t done = 0; done < n;) {
        const int64_t column = c + done * stride;
        const int64_t end = (column / blocks.cols + 1) * blocks.cols;
        const int64_t run = std::min(cdiv(end - column, stride), n - done);
        std::fill_n(out + first + done, run, load_one(loops_, l, at(row, column)));
        done += run;
      }
    });
  }
}

void Item::load_random(size_t i, const Tile& t) {
  const uint64_t* const state = args_.random;  // seed, offset, row0, col0, columns
  const uint64_t high = state[1] + step_.loads[i].arg;
  for (int64_t k = 0; k < t.rows; ++k) {
    const uint64_t first = (state[2] + static_cast<uint64_t>(t.row + k)) * state[4] + state[3] +
                           static_cast<uint64_t>(t.col);
    const uint64_t skipped = first % 8;
    const auto n = static_cast<size_t>(t.cols);
    if (first % 8 == 0 && n % 8 == 0) {
      loops_.random(slot_[i] + k * t.cols, state[0], first / 8, high, n / 8);
      continue;
    }
    loops_.random(spare_, state[0], first / 8, high, (skipped + n + 7) / 8);
    std::memcpy(slot_[i] + k * t.cols, spare_ + skipped, n * sizeof(float));
  }
}

// Reads in place if a tile is one run of one row.
void Item::load_product(size_t i, const Tile& t) {
  const ColumnMap& map = step_.loads[i].columns;
  const auto at = [&](int64_t row, int64_t c) {
    const auto range = std::ranges::find_if(
        product_, [&](const ProductRange& p) { return p.begin <= c && c < p.begin + p.n; });
    return range->data + (row - row_begin_) * range->stride + (c - range->begin);
  };
  slot_[i] = map.contiguous() && t.rows == 1 ? at(t.row, map(t.col)) : own_[i];
  if (slot_[i] != own_[i]) return;
  for (int64_t k = 0; k < t.rows; ++k)
    for_runs(map, t.col, t.cols, [&](int64_t first, int64_t c, int64_t n, int64_t stride) {
      loops_.load[index(DType::f32)](slot_[i] + k * t.cols + first, at(t.row + k, c), stride,
                                     static_cast<size_t>(n));
    });
}

void Item::store(size_t k, const Tile& t, const float* value) {
  const Store& s = step_.stores[k];
  switch (s.to) {
    case Store::To::tile:
      for (int64_t i = 0; i < t.rows; ++i)
        store_columns((grid_.stream ? loops_.stream : loops_.store)[index(s.dtype)], s,
                      args_.out[s.arg], t.row + i, t.col, t.cols, value + i * t.cols);
      break;
    case Store::To::column_sum:
      s.ordered ? sum_ordered(k, t, value) : sum_columns(k, t, value);
      break;
    case Store::To::row_sum:
      sum_rows(k, t, value);
      break;
    case Store::To::sum: {
      Forest& forest = leftovers_.forests[k][static_cast<size_t>(index_)];
      forest.push(loops_, value, t.size(), spare_);
      break;
    }
    case Store::To::amax:
      join_amax(k, loops_.max_bits(value, t.size()));
      break;
    case Store::To::encoded:
      store_panel(k, t, value);
      break;
    case Store::To::column:
      break;  // one value per row
  }
}

// Whether each tile of the store is a panel: one row, whole blocks.
bool Item::in_place(const PanelRange& p, size_t k) const {
  const ColumnMap& map = step_.stores[k].columns;
  return grid_.band_rows == 1 && map.contiguous() && p.stores.size() == 1 &&
         p.begin == col_begin_ + map.offset && p.n == col_end_ - col_begin_;
}

void Item::store_panel(size_t k, const Tile& t, const float* value) {
  for (size_t i = 0; i < panels_.size(); ++i) {
    const PanelRange& p = panels_[i];
    if (std::ranges::find(p.stores, k) == p.stores.end()) continue;
    if (in_place(p, k)) {
      const int64_t column = t.col + step_.stores[k].columns.offset;
      for (int64_t r = 0; r < t.rows; ++r)
        encode(loops_, step_.encoders[p.encoder], args_,
               {t.row + r, 1, column, t.cols, value + r * t.cols}, encode_scratch_,
               health_[p.encoder], {}, grid_.stream_codes);
      continue;
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      float* row = panel_data_[i] + (t.row + r - band_) * p.n;
      for_runs(step_.stores[k].columns, t.col, t.cols,
               [&](int64_t first, int64_t c, int64_t count, int64_t stride) {
                 loops_.store[index(DType::f32)](row + c - p.begin, stride,
                                                 value + r * t.cols + first,
                                                 static_cast<size_t>(count));
               });
    }
  }
}

Item::Held Item::held(const PanelRange& p) const {
  return in_place(p, p.stores[0]) ? Held::nothing : Held::values;
}

// The next band of this item, or of the next item, if the body reads one tensor. The rows of two
// would take longer to prefetch than encoding takes.
Upcoming Item::after_band(int64_t end) const {
  const Load* only = nullptr;
  for (const Load& l : step_.loads) {
    if (l.from != Load::From::tile) continue;
    if (only || l.transposed || !l.columns.contiguous()) return {};
    only = &l;
  }
  const bool below = end < row_end_, beside = col_end_ < grid_.cols;
  const int64_t row = below ? end : beside ? row_begin_ : row_end_;
  const int64_t col = below ? col_begin_ : beside ? col_end_ : 0;
  if (!only || row >= grid_.rows) return {};
  const View& v = args_.in[only->arg];
  const int64_t bytes = info(only->dtype).bytes;
  return {static_cast<const char*>(element(v, row, only->columns(col))),
          v.rows > 1 ? v.stride * bytes : 0,  // one row may have any stride
          std::min(grid_.chunk_cols, grid_.cols - col) * bytes};
}

void Item::encode_band(int64_t row, int64_t rows) {
  const Upcoming upcoming = panels_.empty() ? Upcoming() : after_band(row + rows);
  for (size_t i = 0; i < panels_.size(); ++i) {
    const PanelRange& p = panels_[i];
    const Held content = p.n == 0 ? Held::nothing : held(p);
    const Encoder& e = step_.encoders[p.encoder];
    const Panel panel{row, rows, p.begin, p.n, panel_data_[i]};
    if (content == Held::values)
      encode(loops_, e, args_, panel, encode_scratch_, health_[p.encoder],
             i == 0 ? upcoming : Upcoming(), grid_.stream_codes);
    else if (content == Held::codes)
      put_codes(loops_, e, args_, panel, encode_scratch_, grid_.stream_codes);
  }
}

void Item::sum_columns(size_t k, const Tile& t, const float* value) {
  const auto cols = static_cast<size_t>(t.cols);
  std::memcpy(spare_, value, t.size() * sizeof(float));
  tree_sum_rows(loops_, spare_, static_cast<size_t>(t.rows), cols);
  push_columns(k, t.row, t.col - col_begin_, spare_, cols);
}

void Item::push_columns(size_t k, int64_t row, int64_t begin, float* piece, size_t n) {
  TreeStack stack(stack_[k], grid_.row_floats());
  stack.push(loops_, walk_of(row), static_cast<size_t>(begin), piece, n);
}

float* Item::even_piece(size_t k, int64_t row) const {
  return TreeStack(stack_[k], grid_.row_floats()).at_even(walk_of(row), 0);
}

void Item::sum_ordered(size_t k, const Tile& t, const float* value) {
  const auto cols = static_cast<size_t>(t.cols);
  const auto begin = static_cast<size_t>(t.col - col_begin_);
  float* const sum = stack_[k] + begin;
  TreeStack stack(stack_[k] + grid_.row_floats(), grid_.row_floats());
  for (int64_t i = 0; i < t.rows; ++i) {
    const int64_t row = t.row + i;
    if (row % kOrderedRows == 0)
      std::memcpy(sum, value + i * t.cols, cols * sizeof(float));
    else
      loops_.add(sum, sum, value + i * t.cols, cols);
    if ((row + 1) % kOrderedRows != 0 && row + 1 != row_end_) continue;
    std::memcpy(spare_, sum, cols * sizeof(float));
    stack.push(loops_, static_cast<uint64_t>((row - row_begin_) / kOrderedRows), begin, spare_,
               cols);
  }
}

void Item::sum_rows(size_t k, const Tile& t, const float* value) {
  const bool last = t.col + t.cols == col_end_;
  for (int64_t i = 0; i < t.rows; ++i) {
    float sum = tree_sum(loops_, value + i * t.cols, spare_, static_cast<size_t>(t.cols));
    if (grid_.tile_rows == 1) {
      const auto count = static_cast<uint64_t>((t.col - col_begin_) / kTileCols);
      TreeStack stack(stack_[k], 1);
      stack.push(loops_, count, 0, &sum, 1);
      if (last) stack.collapse(loops_, count + 1, &sum, 1);
    }
    if (last) leftovers_.partials[k][(t.row + i) * grid_.chunks() + chunk_] = sum;
  }
}

void Item::close() {
  const auto width = static_cast<size_t>(col_end_ - col_begin_);
  for (size_t k = 0; k < step_.stores.size(); ++k) {
    if (step_.stores[k].to == Store::To::column_sum) {
      const bool ordered = step_.stores[k].ordered;
      const int64_t piece = ordered ? kOrderedRows : walk_;
      const TreeStack stack(stack_[k] + (ordered ? grid_.row_floats() : 0), grid_.row_floats());
      stack.collapse(loops_, static_cast<uint64_t>(cdiv(row_end_ - row_begin_, piece)), wide_,
                     width);
      std::memcpy(leftovers_.partials[k] + block_ * grid_.cols + col_begin_, wide_,
                  width * sizeof(float));
    }
    if (step_.stores[k].to != Store::To::amax) continue;
    raise(leftovers_.amax[k], most_[k]);
  }
  for (size_t i = 0; i < health_.size(); ++i) {
    leftovers_.health[i][0] += health_[i].saturated;
    leftovers_.health[i][1] += health_[i].flushed;
    leftovers_.health[i][2] += health_[i].nonfinite;
  }
}

}  // namespace tenon::cpu
