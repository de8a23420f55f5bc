// A norm in fused loops, a few rows at a time: totals first, then results.
#include "backend/cpu/norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "backend/cpu/grid.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/item.h"
#include "backend/cpu/pool.h"

namespace tenon::cpu {

namespace {

constexpr int64_t kLeastCols = 128;  // shorter rows are faster in the executor, several per tile
constexpr int64_t kSumRows = 128;    // rows per partial sum of a column

// Loads and stores of a norm. Empty if the norm does not have that one.
struct FusedNorm {
  NormShape shape;
  bool backward = false, divides = true;  // l2 does not divide its total by n
  bool shifts_gamma = false;
  DType dtype = DType::f32;
  std::optional<uint32_t> x, residual, grad, gamma, beta, mean_in, rstdev_in;  // loads
  std::optional<uint32_t> y, sum, mean, rstdev, dgamma, dbeta;                 // stores
  std::optional<uint32_t> eps;
};

// Matches the expressions around the norm of the head against the cases of the fused loops.
class Surroundings {
 public:
  explicit Surroundings(const Step& step) : step_(step), graph_(*step.graph) {}

  std::optional<FusedNorm> run() {
    const Norm* const norm = step_.norm();
    const NormGrad* const grad = step_.norm_grad();
    if (norm ? norm->norms.size() != 1 : grad->norms.size() != 1) return std::nullopt;
    const NormKind kind = norm ? norm->norms[0].kind : grad->norms[0].kind;
    found_.shape.centred = kind == NormKind::layer;
    found_.divides = kind != NormKind::l2;
    if (step_.totals().size() != (found_.shape.centred ? 2 : 1)) return std::nullopt;
    if (!(norm ? forward(norm->norms[0]) : backward(grad->norms[0]))) return std::nullopt;
    return found_;
  }

 private:
  // The slot of a load. Empty if the node is not such a load.
  [[nodiscard]] std::optional<uint32_t> load(uint32_t node, Load::From from) const {
    if (node == kNoNode || graph_[node].word != Word::load) return std::nullopt;
    const uint32_t slot = graph_[node].slot;
    return step_.loads[slot].from == from ? std::optional(slot) : std::nullopt;
  }
  [[nodiscard]] bool is_word(uint32_t node, Word word) const {
    return node != kNoNode && graph_[node].word == word;
  }

  // Matches gamma or gamma + 1 and records the load.
  bool factor(uint32_t node) {
    found_.gamma = load(node, Load::From::row);
    found_.shifts_gamma = false;
    if (!found_.gamma && is_word(node, Word::add)) {
      const Node& one = graph_[graph_[node].in[1]];
      found_.shifts_gamma = one.word == Word::constant && one.value == 1.0F;
      if (found_.shifts_gamma) found_.gamma = load(graph_[node].in[0], Load::From::row);
    }
    found_.shape.gamma = found_.gamma.has_value();
    return found_.gamma.has_value();
  }
  // Matches y or y·gamma, each with an optional + beta.
  bool result(uint32_t node, uint32_t y) {
    if (node == y) return true;
    if (is_word(node, Word::add)) {
      found_.beta = load(graph_[node].in[1], Load::From::row);
      found_.shape.beta = found_.beta.has_value();
      if (!found_.beta) return false;
      node = graph_[node].in[0];
    }
    return node == y ||
           (is_word(node, Word::mul) && graph_[node].in[0] == y && factor(graph_[node].in[1]));
  }

  bool forward(const Norm::Nodes& nodes) {
    found_.eps = load(nodes.eps, Load::From::parameter);
    found_.x = load(nodes.x, Load::From::tile);
    if (!found_.x && is_word(nodes.x, Word::add)) {
      found_.x = load(graph_[nodes.x].in[0], Load::From::tile);
      found_.residual = load(graph_[nodes.x].in[1], Load::From::tile);
      if (!found_.residual) return false;
      found_.shape.residual = true;
    }
    if (!found_.eps || !found_.x) return false;
    for (uint32_t k = 0; k < step_.stores.size(); ++k) {
      const Store& s = step_.stores[k];
      if (s.to == Store::To::tile && found_.residual && s.value == nodes.x && !found_.sum)
        found_.sum = k;
      else if (s.to == Store::To::column && s.value == nodes.mean && !found_.mean)
        found_.mean = k;
      else if (s.to == Store::To::column && s.value == nodes.rstdev && !found_.rstdev)
        found_.rstdev = k;
      else if (s.to == Store::To::tile && !found_.y && result(s.value, nodes.y))
        found_.y = k;
      else
        return false;
    }
    return found_.y.has_value();
  }

  bool backward(const NormGrad::Nodes& nodes) {
    found_.backward = true;
    found_.shape.l2 = nodes.kind == NormKind::l2;
    found_.x = load(nodes.x, Load::From::tile);
    found_.rstdev_in = load(nodes.rstdev, Load::From::column);
    found_.mean_in = load(nodes.mean, Load::From::column);
    uint32_t grad = nodes.w;
    if (is_word(nodes.w, Word::mul) && factor(graph_[nodes.w].in[1])) grad = graph_[nodes.w].in[0];
    found_.grad = load(grad, Load::From::tile);
    if (!found_.x || !found_.grad || !found_.rstdev_in ||
        found_.mean_in.has_value() != found_.shape.centred)
      return false;
    const auto is_dgamma = [&](uint32_t node) {
      return is_word(node, Word::mul) && graph_[node].in[0] == grad &&
             graph_[node].in[1] == nodes.normal;
    };
    for (uint32_t k = 0; k < step_.stores.size(); ++k) {
      const Store& s = step_.stores[k];
      const bool sums = s.to == Store::To::column_sum && s.ordered;
      if (s.to == Store::To::tile && s.value == nodes.dx && !found_.y)
        found_.y = k;
      else if (sums && is_dgamma(s.value) && !found_.dgamma)
        found_.dgamma = k;
      else if (sums && s.value == grad && !found_.dbeta)
        found_.dbeta = k;
      else
        return false;
    }
    found_.shape.sums = static_cast<uint8_t>((found_.dgamma ? 1 : 0) + (found_.dbeta ? 1 : 0));
    return found_.y && (found_.dgamma || !found_.dbeta);
  }

  const Step& step_;
  const Graph& graph_;
  FusedNorm found_;
};

class NormKernel final : public Kernel {
 public:
  NormKernel(const Step& step, const FusedNorm& norm, const Loops& loops, const NormLoops& norms)
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
    bool finite = true;  // gamma and beta are finite
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

  // Rows [begin, end). If there are sums, the range holds whole blocks of kSumRows.
  void rows(const Call& call, int64_t begin, int64_t end) const {
    const RunArgs& args = call.args;
    const auto width = static_cast<size_t>(width_);
    constexpr size_t kLevels = 3;  // levels of kSumRows ÷ kOrderedRows pieces
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
        // An absent stream is never read, but its address is still used in arithmetic.
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

  // Whether results may bypass the cache: every row must start at a cache line.
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
    // Then |(x − mean)·rstdev| ≤ √n, and finite factors cannot give a NaN.
    n.clean = call.finite && eps >= 0;
    for (int r = 0; r < count; ++r)
      n.clean = n.clean && std::isfinite(n.total[r]) && std::isfinite(n.rstdev[r]);
    forward_[which](n);
  }

  void run_backward(NormRows& n, size_t which, int count) const {
    products_[which](n);
    // A w or x̂ that is infinite or NaN would make the total so.
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

  // Adds the sums of the blocks as a tree.
  void finish(const Call& call, uint32_t store, size_t k) const {
    const Store& s = step_.stores[store];
    const auto blocks = static_cast<uint64_t>(cdiv(call.args.rows, kSumRows));
    const int64_t piece = kTileCols;  // whole cache lines
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
  FusedNorm norm_;
  const Loops& loops_;
  const NormLoops& norms_;
  int64_t width_;
  NormPair total_, squares_, forward_, products_, backward_;
};

}  // namespace

Attempt make_norm(const Step& step, const Target& target) {
  if (!step.norm() && !step.norm_grad()) return Refusal{"the step is no norm", true};
  if (step.totals().empty())
    return Refusal{"sums over rows without row totals need no fused loops"};
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
  const Isa& isa = isa_of(target);
  if (!isa.fused_norms || (dtype != DType::f32 && dtype != DType::bf16))
    return Refusal{"fused loops exist for f32 and bf16 with AVX2 or AVX-512"};
  auto norm = Surroundings(step).run();
  if (!norm) return Refusal{"the fused loops have one norm with plain results"};
  if (!target.here) return kernel_elsewhere(target);
  norm->dtype = *dtype;
  return std::make_shared<const NormKernel>(
      step, *norm, *isa.loops, *(dtype == DType::f32 ? isa.norms->f32 : isa.norms->bf16));
}

}  // namespace tenon::cpu
