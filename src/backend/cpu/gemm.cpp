// Packs, multiplies and runs the body, by groups of row blocks and column chunks that bound the
// memory.
#include "backend/cpu/gemm.h"

#include <algorithm>
#include <vector>

#include "backend/cpu/finish.h"
#include "backend/cpu/gemm_pack.h"
#include "backend/cpu/pool.h"
#include "backend/cpu/tile_runner.h"
#include "core/scratch.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kThinRows = 512;  // up to so many rows, packing all of b does not pay
constexpr int64_t kThinPanels = 8;  // panels of b that are packed and used together
// If k is contiguous, lines are read over a long span of k. Otherwise they are read across all the
// panels, a few words of k at a time: so many lines stay in the first-level cache, even if their
// stride is a power of two.
constexpr int64_t kThinSpan = 1024;
constexpr int64_t kSlice = 4;
constexpr int64_t kDecodedSlice = 16;  // decoding has a cost per call
// Words of k of a row block that a thread packs at a time. Divides the block of every kernel.
constexpr int64_t kPackWords = 64;
constexpr int64_t kOwnBlocks = 16;  // so many row blocks divide evenly among threads
constexpr int64_t kSkew = 16;       // puts rows of a tile into different cache sets

size_t bytes_of(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

struct Columns {
  int64_t begin, n;
};

// The columns of the product that a chunk reads, as separate ranges of whole panels.
std::vector<Columns> product_columns(const Step& step, const Grid& g, int64_t chunk,
                                     int64_t width) {
  const int64_t begin = chunk * g.chunk_cols;
  const int64_t end = std::min(g.cols, begin + g.chunk_cols);
  std::vector<Columns> all;
  for (const Load& l : step.loads) {
    if (l.from != Load::From::product) continue;
    const int64_t low = l.columns(begin) / width * width;
    all.push_back({low, rup(l.columns(end - 1) + 1, width) - low});
  }
  std::ranges::sort(all, {}, &Columns::begin);
  std::vector<Columns> apart;
  for (const Columns& c : all) {
    if (apart.empty() || apart.back().begin + apart.back().n < c.begin)
      apart.push_back(c);
    else
      apart.back().n = std::max(apart.back().n, c.begin + c.n - apart.back().begin);
  }
  return apart;
}

// How a call is split, and the offsets of its parts in the workspace.
struct Blocking {
  Blocking(const Step& step, const GemmKernel& kernel, int64_t group_floats, int64_t given)
      : kernel(kernel),
        rows(step.body_rows(given)),
        inner(step.gemm()->inner_for(given)),
        words(rup(cdiv(inner, kernel.pairs ? 2 : 1), kernel.granule)),
        cols(rup(step.gemm()->cols, kernel.cols)),
        stride(cols + kSkew),
        grid(make_grid(step, rows)),
        thin(rows <= kThinRows),
        sums(leftover_floats(step, grid)) {
    if (thin) {
      a_floats = padded(rows) * words;
      product_floats = padded(rows) * stride;
      return;
    }
    for (int64_t c = 0; c < grid.chunks(); ++c) {
      chunks.push_back(product_columns(step, grid, c, kernel.cols));
      int64_t n = 0;
      for (const Columns& range : chunks.back()) n += range.n;
      chunk_width = std::max(chunk_width, n);
    }
    const int64_t block = padded(std::min(rows, grid.block_rows)) * words;
    group_blocks =
        std::clamp<int64_t>(group_floats / std::max<int64_t>(block, 1), 1, grid.blocks());
    group_chunks = std::clamp<int64_t>(group_floats / std::max<int64_t>(chunk_width * words, 1), 1,
                                       std::max<int64_t>(grid.chunks(), 1));
    own = group_chunks == grid.chunks() && grid.blocks() >= kOwnBlocks;
    a_floats = own ? 0 : group_blocks * padded(grid.block_rows) * words;
    b_floats = group_chunks * chunk_width * words;
  }

  // Number of rows of a panel of a, or of a product, in memory.
  [[nodiscard]] int64_t padded(int64_t n) const { return kernel.tiles ? rup(n, kernel.rows) : n; }
  [[nodiscard]] int64_t total() const {
    return static_cast<int64_t>(sums) + rup(a_floats, 16) + rup(b_floats, 16) + product_floats;
  }

  const GemmKernel& kernel;
  int64_t rows, inner, words, cols;
  int64_t stride;  // stride of a product in memory
  Grid grid;
  bool thin;
  bool own = false;  // each thread packs the row blocks that it uses
  size_t sums;
  int64_t a_floats = 0, b_floats = 0, product_floats = 0;
  std::vector<std::vector<Columns>> chunks;
  int64_t chunk_width = 0, group_blocks = 1, group_chunks = 1;
};

// Panels of a row block have nearly equal sizes, so that none is too thin to be efficient.
struct RowPanels {
  const GemmKernel& kernel;
  int64_t rows;

  [[nodiscard]] int64_t count() const { return cdiv(rows, kernel.rows); }
  [[nodiscard]] int64_t begin(int64_t p) const {
    return kernel.tiles ? std::min(p * kernel.rows, rows) : p * rows / count();
  }
  [[nodiscard]] int64_t size(int64_t p) const { return begin(p + 1) - begin(p); }
  // Rows of panel p in memory: whole tiles.
  [[nodiscard]] int64_t width(int64_t p) const { return kernel.tiles ? rup(size(p), 16) : size(p); }
};

class Product {
 public:
  Product(const Step& step, const GemmKernel& kernel, const Loops& loops, const TileRunner& body,
          const RunArgs& args, const Blocking& blocking)
      : step_(step),
        kernel_(kernel),
        body_(body),
        args_(args),
        blocking_(blocking),
        a_(kernel, loops, step.gemm()->a, Packer::Side::a, args, blocking.inner),
        b_(kernel, loops, step.gemm()->b, Packer::Side::b, args, blocking.inner),
        packed_a_(static_cast<float*>(args.workspace) + blocking.sums),
        packed_b_(packed_a_ + rup(blocking.a_floats, 16)),
        product_(packed_b_ + rup(blocking.b_floats, 16)) {}

  void run(Leftovers& left) const {
    const Grid& g = blocking_.grid;
    if (g.cols == 0) return run_items(left, {});  // only values that empty rows store
    if (blocking_.thin) return run_thin(left);
    if (blocking_.own) return run_blocks(left);
    bool packed = false;  // all of b is packed
    for (int64_t block = 0; block < g.blocks(); block += blocking_.group_blocks) {
      const int64_t blocks = std::min(blocking_.group_blocks, g.blocks() - block);
      pack_blocks(block, blocks);
      for (int64_t chunk = 0; chunk < g.chunks(); chunk += blocking_.group_chunks) {
        const int64_t chunks = std::min(blocking_.group_chunks, g.chunks() - chunk);
        if (!packed) pack_chunks(chunk, chunks);
        packed = chunks == g.chunks();
        parallel_for(blocks * chunks, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i)
            run_item(block + i / chunks, chunk, i % chunks, block_of(i / chunks), left);
        });
      }
    }
  }

 private:
  [[nodiscard]] RowPanels row_panels(int64_t block) const {
    const int64_t row = block * blocking_.grid.block_rows;
    return {kernel_, std::min(blocking_.grid.block_rows, blocking_.rows - row)};
  }

  // Many row blocks: the thread that uses a block also packs it, into its own cache.
  void run_blocks(Leftovers& left) const {
    const Grid& g = blocking_.grid;
    pack_chunks(0, g.chunks());
    parallel_for(g.blocks(), [&](int64_t begin, int64_t end) {
      const Scratch scratch(bytes_of(blocking_.padded(g.block_rows) * blocking_.words));
      float* const a = scratch.floats();
      for (int64_t block = begin; block < end; ++block) {
        const RowPanels panels = row_panels(block);
        for (int64_t i = 0; i < parts_of_a(panels); ++i) pack_a(panels, a, block * g.block_rows, i);
        for (int64_t chunk = 0; chunk < g.chunks(); ++chunk) run_item(block, 0, chunk, a, left);
      }
    });
  }

  // Address of block i of the group.
  [[nodiscard]] float* block_of(int64_t i) const {
    return packed_a_ + i * blocking_.padded(blocking_.grid.block_rows) * blocking_.words;
  }

  void pack_blocks(int64_t first, int64_t count) const {
    const int64_t most = parts_of_a({kernel_, blocking_.grid.block_rows});
    parallel_for(count * most, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t block = first + i / most;
        const RowPanels panels = row_panels(block);
        if (i % most < parts_of_a(panels))
          pack_a(panels, block_of(i / most), block * blocking_.grid.block_rows, i % most);
      }
    });
  }

  // A row block is packed in parts. If k is contiguous, a part is one panel for one block of k.
  // Otherwise it is all panels for kPackWords words, because lines are read across the panels.
  [[nodiscard]] bool by_panel() const { return a_.k_inside() || kernel_.tiles; }
  [[nodiscard]] int64_t parts_of_a(const RowPanels& panels) const {
    return by_panel() ? cdiv(blocking_.words, kernel_.block) * panels.count()
                      : cdiv(blocking_.words, kPackWords);
  }

  // A row block in memory is [k block][panel], so that one pass over k reads contiguous memory.
  void pack_a(const RowPanels& panels, float* to, int64_t row, int64_t part) const {
    const int64_t n = panels.count();
    const int64_t k = by_panel() ? part / n * kernel_.block : part * kPackWords;
    const int64_t from = k / kernel_.block * kernel_.block;  // begin of the block of k
    const int64_t words = std::min(kernel_.block, blocking_.words - from);
    const auto pack = [&](int64_t p, int64_t begin, int64_t count) {
      float* out = to + from * blocking_.padded(panels.rows) + panels.begin(p) * words;
      a_.panel(out + (begin - from) * panels.width(p), row + panels.begin(p), panels.size(p),
               panels.width(p), begin, count);
    };
    if (by_panel()) return pack(part % n, k, words);
    const int64_t end = std::min(k + kPackWords, blocking_.words);
    const int64_t slice = a_.decodes() ? kDecodedSlice : kSlice;
    for (int64_t done = k; done < end; done += slice)
      for (int64_t p = 0; p < n; ++p) pack(p, done, std::min(slice, end - done));
  }

  // Packs one panel of b, which holds all of k.
  void pack_b(float* out, int64_t column, int64_t k, int64_t words) const {
    const int64_t lanes = std::min(kernel_.cols, step_.gemm()->cols - column);
    b_.panel(out, column, lanes, kernel_.cols, k, words);
  }

  void pack_chunks(int64_t first, int64_t count) const {
    struct Panel {
      float* to;
      int64_t column;
    };
    std::vector<Panel> panels;
    for (int64_t i = 0; i < count; ++i) {
      float* to = packed_b_ + i * blocking_.chunk_width * blocking_.words;
      for (const Columns& range : blocking_.chunks[static_cast<size_t>(first + i)])
        for (int64_t c = 0; c < range.n; c += kernel_.cols, to += kernel_.cols * blocking_.words)
          panels.push_back({to, range.begin + c});
    }
    const auto n = static_cast<int64_t>(panels.size());
    const int64_t steps = cdiv(blocking_.words, kernel_.block);
    const bool inside = b_.k_inside();
    parallel_for(steps * n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {  // in the order of b in memory
        const Panel& p = panels[static_cast<size_t>(inside ? i / steps : i % n)];
        const int64_t k = (inside ? i % steps : i / n) * kernel_.block;
        pack_b(p.to + k * kernel_.cols, p.column, k, std::min(kernel_.block, blocking_.words - k));
      }
    });
  }

  // All rows of a block times one panel of b, for one block of k.
  void multiply(const RowPanels& panels, const float* a, const float* b, int64_t k, float* c,
                int64_t stride, const float* next) const {
    const int64_t words = std::min(kernel_.block, blocking_.words - k);
    const float* from = a + k * blocking_.padded(panels.rows);
    for (int64_t p = 0; p < panels.count(); ++p)
      kernel_.tile(panels.size(p), words, from + panels.begin(p) * words, b,
                   c + panels.begin(p) * stride, stride, k > 0, next + p * kernel_.fetch * words);
  }

  // Order for the scales of whole tensors: the finished sum times the scale of a, then of b.
  void scale(float* c, int64_t rows, int64_t n, int64_t stride) const {
    for (const Packer* side : {&a_, &b_}) {
      if (side->scale() == 1.0F) continue;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) c[r * stride + i] *= side->scale();
    }
  }

  // A row block, packed at `a`, times chunk j of the group that begins with `chunk`.
  void run_item(int64_t block, int64_t chunk, int64_t j, const float* a, Leftovers& left) const {
    const Grid& g = blocking_.grid;
    const RowPanels panels = row_panels(block);
    const float* b = packed_b_ + j * blocking_.chunk_width * blocking_.words;
    const std::vector<Columns>& columns = blocking_.chunks[static_cast<size_t>(chunk + j)];
    const int64_t stride = blocking_.chunk_width + kSkew;
    const Scratch scratch(bytes_of(blocking_.padded(panels.rows) * stride));
    std::vector<ProductRange> ranges;
    if (kernel_.begin) kernel_.begin();
    float* c = scratch.floats();
    const float* panel = b;
    for (const Columns& range : columns) {
      ranges.push_back({range.begin, range.n, c, stride});
      // k is the inner loop: all of a and one panel of the product stay in the second-level cache
      // while b is read in memory order. With k outside, the product would compete with a.
      for (int64_t n = 0; n < range.n; n += kernel_.cols)
        for (int64_t k = 0; k < blocking_.words; k += kernel_.block) {
          const float* here = panel + n * blocking_.words + k * kernel_.cols;
          multiply(panels, a, here, k, c + n, stride, here + kernel_.block * kernel_.cols);
        }
      if (blocking_.words == 0)
        for (int64_t r = 0; r < panels.rows; ++r) std::fill_n(c + r * stride, range.n, 0.0F);
      scale(c, panels.rows, range.n, stride);
      c += range.n;
      panel += range.n * blocking_.words;
    }
    if (kernel_.end) kernel_.end();
    body_.run(args_, g, block * g.chunks() + chunk + j, left, ranges);
  }

  // Few rows: b is read once, a few panels at a time, and the whole product is in memory.
  void run_thin(Leftovers& left) const {
    const Grid& g = blocking_.grid;
    if (g.items() == 0) return;
    const RowPanels panels{kernel_, blocking_.rows};
    parallel_for(parts_of_a(panels), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) pack_a(panels, packed_a_, 0, i);
    });
    // Narrow products have few panels; every thread takes some.
    const int64_t each =
        std::clamp<int64_t>(cdiv(blocking_.cols / kernel_.cols, threads()), 1, kThinPanels);
    const int64_t width = each * kernel_.cols;
    parallel_for(cdiv(blocking_.cols, width), [&](int64_t begin, int64_t end) {
      if (kernel_.begin) kernel_.begin();
      for (int64_t i = begin; i < end; ++i)
        thin_columns(panels, i * width, std::min(width, blocking_.cols - i * width));
      if (kernel_.end) kernel_.end();
    });
    run_items(left, {0, blocking_.cols, product_, blocking_.stride});
  }

  // Runs only the body, on a product in memory.
  void run_items(Leftovers& left, const ProductRange& whole) const {
    const Grid& g = blocking_.grid;
    parallel_for(g.items(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        ProductRange rows = whole;
        if (g.cols > 0) rows.data += i / g.chunks() * g.block_rows * whole.stride;
        body_.run(args_, g, i, left, std::span(&rows, 1));
      }
    });
  }

  void thin_columns(const RowPanels& panels, int64_t column, int64_t n) const {
    const bool inside = b_.k_inside();
    const int64_t span = inside ? kThinSpan : kernel_.block;
    const int64_t slice = b_.decodes() ? kDecodedSlice : kSlice;
    const Scratch scratch(bytes_of((inside ? kernel_.cols : n) * span));
    float* const b = scratch.floats();
    float* c = product_ + column;
    for (int64_t k = 0; k < blocking_.words; k += span) {
      const int64_t words = std::min(span, blocking_.words - k);
      for (int64_t done = 0; done < words && !inside; done += slice)
        for (int64_t i = 0; i < n; i += kernel_.cols)
          pack_b(b + i * words + done * kernel_.cols, column + i, k + done,
                 std::min(slice, words - done));
      for (int64_t i = 0; i < n; i += kernel_.cols) {
        if (inside) pack_b(b, column + i, k, words);
        const float* from = inside ? b : b + i * words;
        for (int64_t done = 0; done < words; done += kernel_.block)
          multiply(panels, packed_a_, from + done * kernel_.cols, k + done, c + i, blocking_.stride,
                   from);
      }
    }
    if (blocking_.words == 0)
      for (int64_t r = 0; r < blocking_.rows; ++r) std::fill_n(c + r * blocking_.stride, n, 0.0F);
    scale(c, blocking_.rows, n, blocking_.stride);
  }

  const Step& step_;
  const GemmKernel& kernel_;
  const TileRunner& body_;
  const RunArgs& args_;
  const Blocking& blocking_;
  Packer a_, b_;
  float *packed_a_, *packed_b_, *product_;
};

class GemmStep final : public Kernel {
 public:
  GemmStep(const Step& step, const GemmKernel& kernel, int64_t group_floats, const Isa& isa)
      : step_(step),
        kernel_(kernel),
        group_floats_(group_floats),
        loops_(*isa.loops),
        body_(tile_runner(step, isa)) {}

  void prepare() const override { body_->prepare(); }

  [[nodiscard]] size_t workspace(int64_t rows) const override {
    return static_cast<size_t>(Blocking(step_, kernel_, group_floats_, rows).total()) *
           sizeof(float);
  }

  void run(const RunArgs& given) const override {
    const Blocking blocking(step_, kernel_, group_floats_, given.rows);
    RunArgs args = given;
    args.rows = blocking.rows;  // rows of the body
    Leftovers left = no_leftovers(step_, blocking.grid, static_cast<float*>(args.workspace));
    Product(step_, kernel_, loops_, *body_, args, blocking).run(left);
    finish(step_, loops_, args, blocking.grid, left);
  }

 private:
  Step step_;
  const GemmKernel& kernel_;
  int64_t group_floats_;
  const Loops& loops_;
  std::unique_ptr<const TileRunner> body_;
};

}  // namespace

Attempt make_gemm(const Step& step, const Target& target) {
  if (!step.gemm()) return Refusal{"the step has no product", true};
  if (!target.here) return kernel_elsewhere(target);
  const bool narrow = step.precision == Precision::native && exact_in_bf16(step.gemm()->a.format) &&
                      exact_in_bf16(step.gemm()->b.format);
  const Isa& isa = isa_of(target);
  return gemm_with(step, narrow && isa.bf16 ? *isa.bf16 : *isa.fp32, kGroupFloats, isa);
}

std::shared_ptr<const Kernel> gemm_with(const Step& step, const GemmKernel& kernel,
                                        int64_t group_floats, const Isa& isa) {
  return std::make_shared<const GemmStep>(step, kernel, group_floats, isa);
}

}  // namespace tenon::cpu
