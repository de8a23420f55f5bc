// Recognises a norm by its formulas, then runs it a few rows at a time: totals, then results.
#include "backend/cpu/norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "backend/cpu/grid.h"
#include "backend/cpu/item.h"
#include "backend/cpu/pool.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kLeastCols = 128;  // shorter rows go better several to a tile
constexpr int64_t kSumRows = 128;    // rows that leave one partial sum a column

// A norm's loads and stores; none: it has no such.
struct Norm {
  NormShape shape;
  bool backward = false, divides = true;  // l2 does not divide its total by n
  bool shifts_gamma = false;
  DType dtype = DType::f32;
  std::optional<uint32_t> x, residual, grad, gamma, beta, mean_in, rstdev_in;  // loads
  std::optional<uint32_t> y, sum, mean, rstdev, dgamma, dbeta;                 // stores
  std::optional<uint32_t> eps;
};

// Equal nodes of a graph are one node: a formula built again in a copy of the graph has the id of
// the step's own, or a new one.
class Recogniser {
 public:
  explicit Recogniser(const Step& step) : step_(step), graph_(*step.graph) {
    for (uint32_t i = 0; i < step.loads.size(); ++i)
      by_[static_cast<size_t>(step.loads[i].from)].push_back(i);
  }

  std::optional<Norm> run() {
    if (step_.totals.empty() || step_.totals.size() > 2) return std::nullopt;
    const auto& tiles = loads(Load::From::tile);
    const bool column = !loads(Load::From::column).empty();
    if (tiles.empty() || tiles.size() > 2) return std::nullopt;
    for (const bool turned : {false, true}) {
      if (turned && tiles.size() == 1) break;
      const uint32_t first = tiles[turned ? 1 : 0];
      const std::optional<uint32_t> second =
          tiles.size() == 2 ? std::optional(tiles[turned ? 0 : 1]) : std::nullopt;
      if (column && !second) return std::nullopt;
      if (auto found = column ? backward(first, *second) : forward(first, second)) return found;
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] const std::vector<uint32_t>& loads(Load::From from) const {
    return by_[static_cast<size_t>(from)];
  }
  Expr at(uint32_t slot) { return graph_.load(slot); }
  std::optional<Expr> total(uint32_t i, Expr of) {
    if (i >= step_.totals.size() || step_.totals[i] != graph_.id(of)) return std::nullopt;
    for (const uint32_t slot : loads(Load::From::total))
      if (step_.loads[slot].arg == i) return at(slot);
    return std::nullopt;
  }
  // y·gamma, or y·(gamma + 1), or y; the load is noted.
  std::vector<std::pair<Norm, Expr>> scaled(const Norm& norm, Expr y) {
    std::vector<std::pair<Norm, Expr>> list{{norm, y}};
    for (const uint32_t slot : loads(Load::From::row))
      for (const bool shifted : {false, true}) {
        Norm n = norm;
        n.gamma = slot;
        n.shape.gamma = true;
        n.shifts_gamma = shifted;
        list.emplace_back(n, y * (shifted ? at(slot) + 1.0F : at(slot)));
      }
    return list;
  }

  std::optional<Norm> forward(uint32_t x_slot, std::optional<uint32_t> residual) {
    if (loads(Load::From::parameter).size() != 1) return std::nullopt;
    Norm norm;
    norm.x = x_slot;
    norm.residual = residual;
    norm.shape.residual = residual.has_value();
    norm.eps = loads(Load::From::parameter)[0];
    const Expr x = residual ? at(x_slot) + at(*residual) : at(x_slot);
    const auto n = static_cast<float>(step_.cols);
    Expr centred = x;
    std::optional<Expr> mean;
    norm.shape.centred = step_.totals.size() == 2;
    if (norm.shape.centred) {
      const auto sum = total(0, x);
      if (!sum) return std::nullopt;
      mean = *sum / n;
      centred = x - *mean;
    }
    const auto squares = total(norm.shape.centred ? 1 : 0, centred * centred);
    if (!squares) return std::nullopt;
    for (const bool divides : {true, false}) {
      norm.divides = divides;
      const Expr rstdev = rsqrt((divides ? *squares / n : *squares) + at(*norm.eps));
      for (auto& [candidate, y] : scaled(norm, centred * rstdev)) {
        if (auto found = forward_stores(candidate, y, x, mean, rstdev)) return found;
        for (const uint32_t beta : loads(Load::From::row)) {
          Norm with = candidate;
          with.beta = beta;
          with.shape.beta = true;
          if (auto found = forward_stores(with, y + at(beta), x, mean, rstdev)) return found;
        }
      }
    }
    return std::nullopt;
  }

  std::optional<Norm> forward_stores(Norm norm, Expr y, Expr x, std::optional<Expr> mean,
                                     Expr rstdev) {
    for (uint32_t k = 0; k < step_.stores.size(); ++k) {
      const Store& s = step_.stores[k];
      const auto is = [&](Expr e) { return s.value == graph_.id(e); };
      if (s.to == Store::To::tile && is(y) && !norm.y)
        norm.y = k;
      else if (s.to == Store::To::tile && norm.residual && is(x) && !norm.sum)
        norm.sum = k;
      else if (s.to == Store::To::column && mean && is(*mean) && !norm.mean)
        norm.mean = k;
      else if (s.to == Store::To::column && is(rstdev) && !norm.rstdev)
        norm.rstdev = k;
      else
        return std::nullopt;
    }
    return norm.y ? std::optional(norm) : std::nullopt;
  }

  std::optional<Norm> backward(uint32_t grad_slot, uint32_t x_slot) {
    const auto& columns = loads(Load::From::column);
    if (columns.size() > 2) return std::nullopt;
    for (const bool turned : {false, true}) {
      if (turned && columns.size() == 1) break;
      Norm norm;
      norm.backward = true;
      norm.grad = grad_slot;
      norm.x = x_slot;
      norm.rstdev_in = columns[turned ? 1 : 0];
      norm.shape.centred = columns.size() == 2;
      if (norm.shape.centred) norm.mean_in = columns[turned ? 0 : 1];
      const Expr r = at(*norm.rstdev_in);
      const Expr g = at(grad_slot);
      const Expr x = at(x_slot);
      if (!norm.shape.centred) {
        if (const auto t = total(0, x * g)) {
          Norm l2 = norm;
          l2.shape.l2 = true;
          l2.divides = false;
          if (auto found = backward_stores(l2, r * (g - x * (r * r) * *t), g, g)) return found;
        }
      }
      const Expr normal = (norm.shape.centred ? x - at(*norm.mean_in) : x) * r;
      const auto n = static_cast<float>(step_.cols);
      for (auto& [candidate, w] : scaled(norm, g)) {
        Expr dx = w;
        if (norm.shape.centred) {
          const auto sum = total(0, w);
          if (!sum) continue;
          dx = dx - *sum / n;
        }
        const auto t = total(norm.shape.centred ? 1 : 0, w * normal);
        if (!t) continue;
        dx = r * (dx - normal * (*t / n));
        if (auto found = backward_stores(candidate, dx, g, normal)) return found;
      }
    }
    return std::nullopt;
  }

  std::optional<Norm> backward_stores(Norm norm, Expr dx, Expr g, Expr normal) {
    for (uint32_t k = 0; k < step_.stores.size(); ++k) {
      const Store& s = step_.stores[k];
      const auto is = [&](Expr e) { return s.value == graph_.id(e); };
      if (s.to == Store::To::tile && is(dx) && !norm.y)
        norm.y = k;
      else if (s.to == Store::To::column_sum && s.ordered && is(g * normal) && !norm.dgamma)
        norm.dgamma = k;
      else if (s.to == Store::To::column_sum && s.ordered && is(g) && !norm.dbeta)
        norm.dbeta = k;
      else
        return std::nullopt;
    }
    if (!norm.y || (norm.dbeta && !norm.dgamma)) return std::nullopt;
    norm.shape.sums = static_cast<uint8_t>((norm.dgamma ? 1 : 0) + (norm.dbeta ? 1 : 0));
    return norm;
  }

  const Step& step_;
  Graph graph_;
  std::array<std::vector<uint32_t>, kLoadNames.size()> by_;
};

class NormKernel final : public Kernel {
 public:
  NormKernel(const Step& step, const Norm& norm, const Loops& loops, const NormLoops& norms)
      : step_(step),
        norm_(norm),
        loops_(loops),
        norms_(norms),
        width_(rup(step.cols, norms.line)),
        total_(norm.shape.residual ? norms.total_residual : norms.total),
        squares_(norms.squares(norm.shape)),
        forward_(norms.forward(norm.shape)),
        products_(norms.products(norm.shape)),
        backward_(norms.backward(norm.shape)) {}

  [[nodiscard]] size_t workspace(int64_t rows) const override {
    const int64_t vectors = (norm_.gamma ? 1 : 0) + (norm_.beta ? 1 : 0);
    return static_cast<size_t>((vectors + norm_.shape.sums * cdiv(rows, kSumRows)) * width_) *
           sizeof(float);
  }

  void run(const RunArgs& args) const override {
    Call call{.args = args, .gamma = {}, .beta = {}};
    auto* memory = static_cast<float*>(args.workspace);
    if (norm_.gamma) call.gamma = row_vector(args, *norm_.gamma, norm_.shifts_gamma, memory);
    if (norm_.beta) call.beta = row_vector(args, *norm_.beta, false, memory);
    for (const float* v = static_cast<float*>(args.workspace); v < memory; ++v)
      call.finite = call.finite && std::isfinite(*v);
    call.partials = memory;
    const int64_t item = norm_.shape.sums ? kSumRows : kNormRows;
    call.stream = step_.bytes(args.rows) >= 2 * kStreamBytes;
    parallel_for(cdiv(args.rows, item), [&](int64_t begin, int64_t end) {
      rows(call, begin * item, std::min(end * item, args.rows));
      end_stream();
    });
    if (norm_.dgamma) finish(call, *norm_.dgamma, 0);
    if (norm_.dbeta) finish(call, *norm_.dbeta, 1);
  }

 private:
  struct Call {
    const RunArgs& args;
    NormVector gamma, beta;
    float* partials = nullptr;  // by sum, then block, then column
    bool stream = false;
    bool finite = true;  // gamma and beta are
  };

  NormVector row_vector(const RunArgs& args, uint32_t load, bool shifted, float*& memory) const {
    const Load& l = step_.loads[load];
    const Scratch scratch(static_cast<size_t>(width_) * sizeof(float));
    float* const plain = scratch.floats();
    loops_.load[index(l.dtype)](plain, element(args.in[l.arg], 0, l.columns.offset), 1,
                                static_cast<size_t>(step_.cols));
    if (shifted)
      for (int64_t c = 0; c < step_.cols; ++c) plain[c] = plain[c] + 1.0F;
    norms_.to_lines(memory, plain, step_.cols);
    const bool own = !shifted && l.dtype == norm_.dtype && step_.cols % norms_.line == 0;
    const void* data = element(args.in[l.arg], 0, l.columns.offset);
    return {std::exchange(memory, memory + width_), own ? static_cast<const char*>(data) : nullptr};
  }

  [[nodiscard]] char* row_of(std::span<const View> views, std::optional<uint32_t> arg,
                             int64_t row) const {
    return arg ? static_cast<char*>(element(views[*arg], row, 0)) : nullptr;
  }
  [[nodiscard]] std::optional<uint32_t> in(std::optional<uint32_t> load) const {
    return load ? std::optional(step_.loads[*load].arg) : std::nullopt;
  }
  [[nodiscard]] std::optional<uint32_t> out(std::optional<uint32_t> store) const {
    return store ? std::optional(step_.stores[*store].arg) : std::nullopt;
  }
  [[nodiscard]] float column(const RunArgs& args, std::optional<uint32_t> load, int64_t row) const {
    float value = 0;
    if (!load) return value;
    const Load& l = step_.loads[*load];
    loops_.load[index(l.dtype)](&value, element(args.in[l.arg], row, 0), 1, 1);
    return value;
  }
  void store_column(const RunArgs& args, std::optional<uint32_t> store, int64_t row,
                    float value) const {
    if (!store) return;
    const Store& s = step_.stores[*store];
    loops_.store[index(s.dtype)](element(args.out[s.arg], row, 0), 1, &value, 1);
  }

  // Rows [begin, end), which hold whole blocks of kSumRows where there are sums.
  void rows(const Call& call, int64_t begin, int64_t end) const {
    const RunArgs& args = call.args;
    const auto width = static_cast<size_t>(width_);
    constexpr size_t kLevels = 3;  // of kSumRows ÷ kOrderedRows pieces
    const size_t sums = norm_.shape.sums;
    const Scratch scratch((width * (2 + sums * (1 + kLevels)) + 4 * norms_.line) * sizeof(float));
    float* memory = scratch.floats();
    NormRows n;
    n.cols = step_.cols;
    n.gamma = call.gamma;
    n.beta = call.beta;
    n.scratch = std::exchange(memory, memory + width + 4 * norms_.line);
    if (sums > 0) n.dgamma = std::exchange(memory, memory + width);
    if (sums > 1) n.dbeta = std::exchange(memory, memory + width);
    const std::array<float*, 2> running{n.dgamma, n.dbeta};
    const bool aligned = streams(call);
    for (int64_t row = begin; row < end;) {
      const int count = end - row >= kNormRows ? kNormRows : 1;
      const size_t which = count == 1 ? 0 : 1;
      const int64_t ahead = row + 2 * count <= end ? count : 0;
      for (int r = 0; r < count; ++r) {
        n.x[r] = row_of(args.in, in(norm_.x), row + r);
        // A stream that is absent is never read, but its address is counted on.
        n.residual[r] = row_of(args.in, in(norm_.residual ? norm_.residual : norm_.x), row + r);
        n.grad[r] = row_of(args.in, in(norm_.grad ? norm_.grad : norm_.x), row + r);
        n.y[r] = row_of(args.out, out(norm_.y), row + r);
        n.sum[r] = row_of(args.out, out(norm_.sum), row + r);
        n.mean[r] = column(args, norm_.mean_in, row + r);
        n.rstdev[r] = column(args, norm_.rstdev_in, row + r);
      }
      const auto step = [&](std::optional<uint32_t> load) {
        return load ? ahead * args.in[step_.loads[*load].arg].stride * info(norm_.dtype).bytes : 0;
      };
      n.ahead_x = step(norm_.x);
      n.ahead_residual = step(norm_.residual);
      n.ahead_grad = step(norm_.grad);
      n.stream = aligned;
      n.first = row % kOrderedRows == 0;
      norm_.backward ? run_backward(n, which, count) : run_forward(call, n, which, row, count);
      row += count;
      if (sums > 0 && (row % kOrderedRows == 0 || row == end)) {
        const int64_t block = (row - 1) / kSumRows;
        const auto piece = static_cast<uint64_t>((row - 1) % kSumRows / kOrderedRows);
        for (size_t k = 0; k < sums; ++k) {
          TreeStack stack(memory + k * kLevels * width, width);
          stack.push(loops_, piece, 0, running[k], width);
          if (row % kSumRows == 0 || row == end)
            stack.collapse(loops_, piece + 1, partial(call, k, block), width);
        }
      }
    }
  }

  [[nodiscard]] float* partial(const Call& call, size_t sum, int64_t block) const {
    return call.partials +
           (static_cast<int64_t>(sum) * cdiv(call.args.rows, kSumRows) + block) * width_;
  }

  // Whether results may go past the cache: every row starts at a line of it.
  [[nodiscard]] bool streams(const Call& call) const {
    const auto aligned = [&](std::optional<uint32_t> store) {
      if (!store) return true;
      const View& v = call.args.out[step_.stores[*store].arg];
      return reinterpret_cast<uintptr_t>(v.data) % 64 == 0 &&
             v.stride * info(v.dtype).bytes % 64 == 0;
    };
    return call.stream && aligned(norm_.y) && aligned(norm_.sum);
  }

  void run_forward(const Call& call, NormRows& n, size_t which, int64_t row, int count) const {
    const auto divisor = static_cast<float>(step_.cols);
    if (norm_.shape.centred) {
      total_[which](n);
      for (int r = 0; r < count; ++r) n.mean[r] = n.total[r] / divisor;
    }
    squares_[which](n);
    const float eps = call.args.parameters[step_.loads[*norm_.eps].arg];
    for (int r = 0; r < count; ++r) {
      const float variance = norm_.divides ? n.total[r] / divisor : n.total[r];
      n.rstdev[r] = 1.0F / std::sqrt(variance + eps);
      store_column(call.args, norm_.mean, row + r, n.mean[r]);
      store_column(call.args, norm_.rstdev, row + r, n.rstdev[r]);
    }
    // Then |(x − mean)·rstdev| ≤ √n, and finite factors leave no way to a NaN.
    n.clean = call.finite && eps >= 0;
    for (int r = 0; r < count; ++r)
      n.clean = n.clean && std::isfinite(n.total[r]) && std::isfinite(n.rstdev[r]);
    forward_[which](n);
  }

  void run_backward(NormRows& n, size_t which, int count) const {
    products_[which](n);
    // An infinite or undefined w or x̂ would have left its mark on their total.
    n.clean = true;
    for (int r = 0; r < count; ++r)
      n.clean = n.clean && std::isfinite(n.total[r]) && std::isfinite(n.rstdev[r]);
    const auto divisor = static_cast<float>(step_.cols);
    for (int r = 0; r < count && norm_.divides; ++r) {
      n.total[r] = n.total[r] / divisor;
      n.second[r] = n.second[r] / divisor;
    }
    backward_[which](n);
  }

  // The blocks' sums form the tree.
  void finish(const Call& call, uint32_t store, size_t k) const {
    const Store& s = step_.stores[store];
    const auto blocks = static_cast<uint64_t>(cdiv(call.args.rows, kSumRows));
    const int64_t piece = kTileCols;  // whole lines
    parallel_for(cdiv(step_.cols, piece), [&](int64_t begin, int64_t end) {
      const Scratch scratch((TreeStack::levels(blocks) + 2) * kTile * sizeof(float));
      float* const sum = scratch.floats();
      float* const part = sum + kTile;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t c = i * piece;
        const auto n = static_cast<size_t>(std::min(piece, width_ - c));
        TreeStack stack(part + kTile, n);
        std::fill_n(sum, kTile, 0.0F);  // the empty sum
        for (uint64_t b = 0; b < blocks; ++b) {
          std::memcpy(part, partial(call, k, static_cast<int64_t>(b)) + c, n * sizeof(float));
          stack.push(loops_, b, 0, part, n);
        }
        if (blocks > 0) stack.collapse(loops_, blocks, sum, n);
        const int64_t count = std::min(piece, step_.cols - c);
        norms_.from_lines(part, sum, count);
        store_columns(loops_.store[index(s.dtype)], s, call.args.out[s.arg], 0, c, count, part);
      }
    });
  }

  Step step_;
  Norm norm_;
  const Loops& loops_;
  const NormLoops& norms_;
  int64_t width_;
  NormPair total_, squares_, forward_, products_, backward_;
};

}  // namespace

Attempt make_norm(const Step& step) {
  if (step.gemm || step.totals.empty()) return Refusal{"not a norm: the step has no row totals"};
  if (step.cols < kLeastCols)
    return Refusal{"rows of fewer than 128 columns go better several to a tile"};
  if (!step.encoders.empty()) return Refusal{"quantised results need whole blocks of rows"};
  std::optional<DType> dtype;
  for (const Load& l : step.loads) {
    if (l.from == Load::From::tile && (dtype.value_or(l.dtype) != l.dtype || l.transposed))
      return Refusal{"the inputs have several dtypes or layouts"};
    if (l.from == Load::From::tile) dtype = l.dtype;
    if (!l.columns.contiguous() || (l.from == Load::From::tile && l.columns.offset != 0))
      return Refusal{"columns lie apart"};
  }
  for (const Store& s : step.stores)
    if (s.to == Store::To::tile &&
        (s.dtype != dtype || !s.columns.contiguous() || s.columns.offset != 0))
      return Refusal{"results have another dtype or layout than the inputs"};
  const Loops& table = loops();
  const NormLoops* const norms = dtype == DType::f32    ? table.norms.f32
                                 : dtype == DType::bf16 ? table.norms.bf16
                                                        : nullptr;
  if (!norms) return Refusal{"fused loops exist for f32 and bf16 with AVX2 or AVX-512"};
  auto norm = Recogniser(step).run();
  if (!norm) return Refusal{"no formula of a norm that has fused loops"};
  norm->dtype = *dtype;
  return std::make_shared<const NormKernel>(step, *norm, table, *norms);
}

}  // namespace tenon::cpu
