// Work items are blocks of 2^k rows by chunks of columns; an item walks its tiles row by row.
#include "backend/cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "backend/cpu/loops.h"
#include "backend/cpu/pool.h"
#include "backend/cpu/program.h"
#include "backend/cpu/sums.h"
#include "core/fp_mode.h"
#include "tenon/format.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kTileCols = static_cast<int64_t>(kTile);
constexpr int64_t kChunkCols = 8 * kTileCols;  // a power of two tiles, so that a chunk is a subtree
constexpr int64_t kItemElements = 1 << 15;     // enough work to be worth handing to a thread
constexpr int64_t kSumRows = 128;              // partial column sums then cost under 2 % of traffic

// How a call is cut into items. Bits do not depend on it: items are aligned subtrees of every sum.
struct Grid {
  int64_t rows, cols;
  int64_t tile_rows;   // rows in a tile: more than one only if a tile holds whole rows
  int64_t block_rows;  // rows in an item, a power of two
  int64_t chunk_cols;  // columns in an item
  [[nodiscard]] int64_t blocks() const { return cdiv(rows, block_rows); }
  [[nodiscard]] int64_t chunks() const { return cdiv(cols, chunk_cols); }
  [[nodiscard]] int64_t tile_cols() const { return std::min(cols, kTileCols); }
  // Floats of one row vector of an item, repeated for every row of a tile.
  [[nodiscard]] size_t row_floats() const {
    return static_cast<size_t>(rup(std::max(chunk_cols, tile_rows * cols), 16));
  }
  // Floats of one store's stack of partial sums; 64 levels are enough for any row sum.
  [[nodiscard]] size_t stack_floats() const {
    const size_t levels = TreeStack::levels(static_cast<uint64_t>(block_rows / tile_rows));
    return std::max(levels * row_floats(), size_t{64});
  }
};

// Where a run keeps the partial sums of its items.
struct Partials {
  std::vector<float*> of_store;  // column sums: blocks x cols; row sums: rows x chunks
};

float* at(const View& v, int64_t r, int64_t c) {
  auto* bytes = static_cast<char*>(v.data);
  return reinterpret_cast<float*>(bytes + (r * v.stride + c) * info(v.dtype).bytes);
}

// Runs of the column map: f(first step column, tensor column, count, stride).
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
    loops.load[index(l.dtype)](out + first, at(v, row, c), stride, static_cast<size_t>(count));
  });
}

void store_columns(const Loops& loops, const Store& s, const View& v, int64_t row, int64_t begin,
                   int64_t n, const float* from) {
  for_runs(s.columns, begin, n, [&](int64_t first, int64_t c, int64_t count, int64_t stride) {
    loops.store[index(s.dtype)](at(v, row, c), stride, from + first, static_cast<size_t>(count));
  });
}

// One thread's memory for one item; grows once and is kept.
float* scratch_memory(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats + 16) memory.resize(floats + 16);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

class Executor final : public Kernel {
 public:
  explicit Executor(const Step& step)
      : step_(step), loops_(loops()), program_(compile(step, loops_)) {
    for (const Store& s : step_.stores) {
      sums_columns_ = sums_columns_ || s.to == Store::To::column_sum;
      sums_all_ = sums_all_ || s.to == Store::To::sum;
    }
  }

  [[nodiscard]] size_t workspace(int64_t rows) const override {
    const Grid g = grid(rows);
    size_t floats = 0;
    for (const Store& s : step_.stores) floats += partial_size(g, s);
    return floats * sizeof(float);
  }

  void run(const RunArgs& args) const override {
    const FpMode ieee;  // sums are finished in the calling thread
    const Grid g = grid(args.rows);
    Partials partials;
    auto* memory = static_cast<float*>(args.workspace);
    for (const Store& s : step_.stores) {
      partials.of_store.push_back(memory);
      memory += partial_size(g, s);
    }
    std::vector<std::atomic<uint32_t>> amax(step_.stores.size());
    const bool empty = g.rows == 0 || g.cols == 0;
    const int64_t items = empty ? 0 : g.blocks() * g.chunks();
    // One a store and item, those of a store side by side.
    std::vector<Forest> forests(sums_all_ ? static_cast<size_t>(items) * step_.stores.size() : 0);
    parallel_for(items, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Forest* forest = sums_all_ ? &forests[static_cast<size_t>(i)] : nullptr;
        run_item(args, g, i / g.chunks(), i % g.chunks(), partials, amax, forest,
                 static_cast<size_t>(items));
      }
    });
    for (size_t k = 0; k < step_.stores.size(); ++k) finish(args, g, k, partials, amax, forests);
  }

 private:
  [[nodiscard]] Grid grid(int64_t rows) const {
    Grid g{.rows = rows, .cols = step_.cols, .tile_rows = 1, .block_rows = 1, .chunk_cols = 0};
    const int64_t cols = std::max<int64_t>(g.cols, 1);
    if (cols < kTileCols)
      g.tile_rows = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(kTileCols / cols)));
    // A sum over everything follows the rows, so its items must hold whole rows.
    g.chunk_cols = cols <= kTileCols || sums_all_ ? cols : std::min(cols, kChunkCols);
    g.block_rows = g.tile_rows;
    while (g.block_rows < rows && g.block_rows * g.chunk_cols < kItemElements) g.block_rows *= 2;
    if (sums_columns_)
      while (g.block_rows < rows && g.block_rows < kSumRows) g.block_rows *= 2;
    return g;
  }

  static size_t partial_size(const Grid& g, const Store& s) {
    // Cache lines of different stores stay apart.
    if (s.to == Store::To::column_sum) return static_cast<size_t>(rup(g.blocks() * g.cols, 16));
    if (s.to == Store::To::row_sum) return static_cast<size_t>(rup(g.rows * g.chunks(), 16));
    return 0;
  }

  // The memory of one item: slots, row vectors, column-sum stacks, and two tiles to add in.
  struct Scratch {
    float* slots;
    float* rows;
    float* stacks;
    float* spare;
  };

  [[nodiscard]] Scratch scratch(const Grid& g) const {
    const size_t slots = program_.slots * kTile;
    const size_t rows = (step_.loads.size() + 1) * g.row_floats();  // one more to collapse into
    const size_t stacks = step_.stores.size() * g.stack_floats();
    float* memory = scratch_memory(slots + rows + stacks + 3 * kTile);
    return {memory, memory + slots, memory + slots + rows, memory + slots + rows + stacks};
  }

  // Values that are the same in every tile of an item.
  void prepare(const RunArgs& args, const Grid& g, int64_t c0, int64_t c1, const Scratch& s,
               std::vector<float*>& slot) const {
    for (size_t i = 0; i < slot.size(); ++i) slot[i] = s.slots + i * kTile;
    for (const auto& [id, value] : program_.constants) std::fill_n(slot[id], kTile, value);
    for (size_t i = 0; i < step_.loads.size(); ++i) {
      const Load& l = step_.loads[i];
      if (l.from == Load::From::parameter) {
        std::fill_n(slot[i], kTile, args.parameters[l.arg]);
      } else if (l.from == Load::From::scalar) {
        float value = 0;
        loops_.load[index(l.dtype)](&value, args.in[l.arg].data, 1, 1);
        std::fill_n(slot[i], kTile, value);
      } else if (l.from == Load::From::row) {
        float* row = s.rows + i * g.row_floats();
        load_columns(loops_, l, args.in[l.arg], 0, c0, c1 - c0, row);
        for (int64_t r = 1; r < g.tile_rows; ++r)
          std::memcpy(row + r * (c1 - c0), row, static_cast<size_t>(c1 - c0) * sizeof(float));
      }
    }
    execute(program_.once, slot, kTile);
  }

  static void execute(const std::vector<Instruction>& list, const std::vector<float*>& slot,
                      size_t n) {
    for (const Instruction& i : list) {
      std::array<const float*, 4> in{};
      for (int k = 0; k < i.arity; ++k) in[k] = slot[i.in[k]];
      i.loop(slot[i.out], in.data(), n);
    }
  }

  void run_item(const RunArgs& args, const Grid& g, int64_t block, int64_t chunk,
                const Partials& partials, std::vector<std::atomic<uint32_t>>& amax, Forest* forest,
                size_t items) const {
    const int64_t r0 = block * g.block_rows, r1 = std::min(g.rows, r0 + g.block_rows);
    const int64_t c0 = chunk * g.chunk_cols, c1 = std::min(g.cols, c0 + g.chunk_cols);
    const Scratch s = scratch(g);
    const size_t row_floats = g.row_floats(), stack_floats = g.stack_floats();
    std::vector<float*> slot(program_.slots);
    prepare(args, g, c0, c1, s, slot);
    for (size_t k = 0; forest && k < step_.stores.size(); ++k)
      forest[k * items] = Forest(static_cast<uint64_t>(r0 * g.cols));
    std::vector<uint32_t> most(step_.stores.size(), 0);

    for (int64_t r = r0; r < r1; r += g.tile_rows) {
      const int64_t nr = std::min(g.tile_rows, r1 - r);
      const auto group = static_cast<uint64_t>((r - r0) / g.tile_rows);
      for (int64_t c = c0; c < c1; c += g.tile_cols()) {
        const int64_t nc = std::min(g.tile_cols(), c1 - c);
        const auto n = static_cast<size_t>(nr * nc);
        load_tile(args, r, nr, c, nc, c - c0, s, row_floats, slot);
        execute(program_.tile, slot, n);
        for (size_t k = 0; k < step_.stores.size(); ++k) {
          const Store& store = step_.stores[k];
          const float* value = slot[program_.results[k]];
          float* stack = s.stacks + k * stack_floats;
          switch (store.to) {
            case Store::To::tile:
              for (int64_t i = 0; i < nr; ++i)
                store_columns(loops_, store, args.out[store.arg], r + i, c, nc, value + i * nc);
              break;
            case Store::To::column_sum:
              std::memcpy(s.spare, value, n * sizeof(float));
              tree_sum_rows(loops_, s.spare, static_cast<size_t>(nr), static_cast<size_t>(nc));
              TreeStack(stack, row_floats)
                  .push(loops_, group, static_cast<size_t>(c - c0), s.spare,
                        static_cast<size_t>(nc));
              break;
            case Store::To::row_sum:
              for (int64_t i = 0; i < nr; ++i) {
                float sum = tree_sum(loops_, value + i * nc, s.spare, static_cast<size_t>(nc));
                if (g.tile_rows == 1) {
                  const auto count = static_cast<uint64_t>((c - c0) / kTileCols);
                  TreeStack row(stack, 1);
                  row.push(loops_, count, 0, &sum, 1);
                  if (c + nc == c1) row.collapse(loops_, count + 1, &sum);
                }
                if (c + nc == c1) partials.of_store[k][(r + i) * g.chunks() + chunk] = sum;
              }
              break;
            case Store::To::sum:
              for (size_t i = 0; i < n; ++i) forest[k * items].push(value[i]);
              break;
            case Store::To::amax:
              most[k] = std::max(most[k], loops_.max_bits(value, n));
              break;
          }
        }
      }
    }
    const auto groups = static_cast<uint64_t>(cdiv(r1 - r0, g.tile_rows));
    for (size_t k = 0; k < step_.stores.size(); ++k) {
      if (step_.stores[k].to == Store::To::column_sum) {
        TreeStack(s.stacks + k * stack_floats, row_floats).collapse(loops_, groups, s.rows);
        std::memcpy(partials.of_store[k] + block * g.cols + c0, s.rows,
                    static_cast<size_t>(c1 - c0) * sizeof(float));
      }
      uint32_t seen = amax[k].load(std::memory_order_relaxed);
      while (most[k] > seen && !amax[k].compare_exchange_weak(seen, most[k])) {
      }
    }
  }

  void load_tile(const RunArgs& args, int64_t r, int64_t nr, int64_t c, int64_t nc,
                 int64_t in_chunk, const Scratch& s, size_t row_floats,
                 std::vector<float*>& slot) const {
    for (size_t i = 0; i < step_.loads.size(); ++i) {
      const Load& l = step_.loads[i];
      switch (l.from) {
        case Load::From::tile:
          for (int64_t k = 0; k < nr; ++k)
            load_columns(loops_, l, args.in[l.arg], r + k, c, nc, slot[i] + k * nc);
          break;
        case Load::From::row:
          slot[i] = s.rows + i * row_floats + in_chunk;
          break;
        case Load::From::column:
          for (int64_t k = 0; k < nr; ++k) {
            float value = 0;
            loops_.load[index(l.dtype)](&value, at(args.in[l.arg], r + k, 0), 1, 1);
            std::fill_n(slot[i] + k * nc, nc, value);
          }
          break;
        case Load::From::scalar:
        case Load::From::parameter:
          break;  // filled once an item
      }
    }
  }

  // Joins the items' parts of one store and writes the result.
  void finish(const RunArgs& args, const Grid& g, size_t k, const Partials& partials,
              const std::vector<std::atomic<uint32_t>>& amax,
              const std::vector<Forest>& forests) const {
    const Store& store = step_.stores[k];
    if (store.to == Store::To::tile) return;
    const View& out = args.out[store.arg];
    if (store.to == Store::To::column_sum) {
      parallel_for(cdiv(g.cols, kTileCols), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          finish_columns(g, store, out, partials.of_store[k], i * kTileCols);
      });
    } else if (store.to == Store::To::row_sum) {
      float* scratch = scratch_memory(static_cast<size_t>(2 * g.chunks() + 64));
      for (int64_t r = 0; r < g.rows; ++r) {
        const auto n = static_cast<size_t>(g.chunks());
        const float* parts = partials.of_store[k] + r * g.chunks();
        const float sum = g.cols == 0 ? 0.0F : tree_sum(loops_, parts, scratch, n);
        loops_.store[index(store.dtype)](at(out, r, 0), 1, &sum, 1);
      }
    } else {
      Forest all;
      const size_t items = forests.size() / step_.stores.size();
      for (size_t i = 0; i < items; ++i) all.append(forests[k * items + i]);
      const uint32_t bits = amax[k].load();
      const float value =
          store.to == Store::To::sum ? all.total() : __builtin_bit_cast(float, bits);
      loops_.store[index(store.dtype)](out.data, 1, &value, 1);
    }
  }

  void finish_columns(const Grid& g, const Store& store, const View& out, const float* parts,
                      int64_t c) const {
    const int64_t n = std::min(kTileCols, g.cols - c);
    const auto width = static_cast<size_t>(n);
    const size_t levels = TreeStack::levels(static_cast<uint64_t>(g.blocks()));
    float* memory = scratch_memory((levels + 2) * kTile);
    std::fill_n(memory, kTile, 0.0F);  // the empty sum
    TreeStack stack(memory + 2 * kTile, width);
    for (int64_t b = 0; b < g.blocks(); ++b) {
      std::memcpy(memory + kTile, parts + b * g.cols + c, width * sizeof(float));
      stack.push(loops_, static_cast<uint64_t>(b), 0, memory + kTile, width);
    }
    if (g.rows > 0) stack.collapse(loops_, static_cast<uint64_t>(g.blocks()), memory);
    store_columns(loops_, store, out, 0, c, n, memory);
  }

  Step step_;
  const Loops& loops_;
  Program program_;
  bool sums_columns_ = false, sums_all_ = false;
};

}  // namespace

Attempt make_executor(const Step& step) { return std::make_shared<const Executor>(step); }

}  // namespace tenon::cpu
