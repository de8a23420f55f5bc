// Gives compiled functions the addresses of an item, or of one tile where values pass through
// slots.
#include "backend/cpu/jit/runner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backend/cpu/encode.h"
#include "backend/cpu/item.h"
#include "backend/cpu/jit/draws.h"
#include "backend/cpu/jit/formula.h"
#include "backend/cpu/jit/kernel.h"
#include "expr/order.h"

namespace tenon::cpu::jit {

namespace {

constexpr size_t kFrameWords = Function::kHead + 2 * kMostCompiledViews;
constexpr size_t kAmaxLanes = 16;
constexpr size_t kMostWholeAmax = 2;  // more of them pass through slots

// Where a function finds a load, or leaves a result. panel: of values or codes.
enum class Place : uint8_t { memory, panel, slot };

bool broadcasts(DType d) { return d == DType::f32 || d == DType::f16 || d == DType::bf16; }

// Whether functions write the codes of the encoder: they have one scale.
bool writes_codes(const Encoder& e) {
  return !e.counts && e.format.blocks(Orientation::rowwise).single();
}
Place place_of(const Step& step, const Store& s) {
  if (s.to == Store::To::tile) return s.columns.contiguous() ? Place::memory : Place::slot;
  if (s.to != Store::To::encoded) return Place::slot;
  const Encoder& e = step.encoders[s.arg];
  // Stores of one panel write the same: all of them values, or all of them codes.
  const bool all = std::ranges::all_of(step.stores, [&](const Store& other) {
    return other.to != Store::To::encoded || other.arg != s.arg || other.columns.contiguous();
  });
  if (!all) return Place::slot;
  return writes_codes(e) && !e.columnwise ? Place::memory : Place::panel;
}

bool is_single(const Load& l) {
  return l.from == Load::From::scalar || l.from == Load::From::parameter;
}

// Whether arithmetic on these values gives NaNs whose low 16 bits are 0.
bool short_nan(const Load& l) {
  return l.from == Load::From::parameter || l.from == Load::From::random ||
         l.dtype == DType::bf16 || info(l.dtype).bytes == 1;
}
// A parameter may be any NaN. Formulas get the usual one.
float with_short_nan(float v) {
  return std::isnan(v) ? std::numeric_limits<float>::quiet_NaN() : v;
}

// One function: the body up to one total, or to the stores. It is compiled at its first run.
class Phase {
 public:
  Phase(Function function, bool wide) : wide_(wide), ahead_(function.elements_ahead()) {
    for (const bool stream : {false, true}) {
      variants_[stream].function = function;
      variants_[stream].function.stream = stream;
    }
  }

  [[nodiscard]] Binary::Function code(bool stream) const {
    const Variant& v = variants_[stream];
    std::call_once(v.once, [&] { v.code = compile(v.function, wide_); });
    return v.code->function();
  }
  [[nodiscard]] const Function& function() const { return variants_[0].function; }
  [[nodiscard]] int64_t elements_ahead() const { return ahead_; }

 private:
  struct Variant {
    Function function;
    mutable std::once_flag once;
    mutable std::unique_ptr<const Binary> code;
  };
  bool wide_;
  int64_t ahead_;
  std::array<Variant, 2> variants_;
};

// What compiled code assumes of a call.
struct Assumed {
  bool ordinary = false;       // parameters are neither NaN nor zero nor extreme
  bool aligned_draws = false;  // each row begins with the first draw of a counter
};

struct Body {
  Step step;
  Assumed assumed;
  Lowered lowered;
  std::vector<std::unique_ptr<const Phase>> phases = {};  // one per total, then the stores
  std::unique_ptr<const Phase> group = nullptr;  // the stores, with column sums of two rows
  bool wide = false;
  bool totals_in_memory = false;  // no load of a total passes through slots
  bool stores_in_memory = false;  // nor does a load or store of the last phase
  bool whole_bands = false;       // nor does anything, and there are panels: a band is one call
  // If nothing passes through slots: an item is one call.
  bool whole_items = false;

  [[nodiscard]] Place place_of(const Load& l) const {
    switch (l.from) {
      case Load::From::tile:
        return l.columns.contiguous() && !l.transposed ? Place::memory : Place::slot;
      case Load::From::row:
      case Load::From::product:
        return l.columns.contiguous() ? Place::memory : Place::slot;
      case Load::From::column:
        return broadcasts(l.dtype) ? Place::memory : Place::slot;
      case Load::From::random:
        return assumed.aligned_draws ? Place::memory : Place::slot;
      default:
        return Place::slot;
    }
  }
};

// The words of a frame.
class Frame {
 public:
  Frame(const Function& f, int64_t rows, int64_t cols) : f_(f) {
    words_[Function::kRows] = rows, words_[Function::kCols] = cols;
  }

  void input(size_t i, const void* address, int64_t step) { put(i, address, step); }
  void output(size_t i, const void* address, int64_t step) {
    put(f_.inputs.size() + i, address, step);
  }
  // One row if the rows of every view follow each other in memory.
  void flatten() {
    const int64_t rows = words_[Function::kRows], cols = words_[Function::kCols];
    if (rows == 1) return;
    const auto adjoins = [&](size_t i, int bytes) { return step(i) == cols * bytes; };
    for (size_t i = 0; i < f_.inputs.size(); ++i)
      if (const Reach reach = f_.inputs[i].reach;
          reach == Reach::row || (reach == Reach::random && 8 * step(i) != cols) ||
          (reach == Reach::elements && !adjoins(i, info(f_.inputs[i].dtype).bytes)))
        return;
    for (size_t i = 0; i < f_.outputs.size(); ++i)
      if (f_.outputs[i].to == Output::To::elements &&
          !adjoins(f_.inputs.size() + i, info(f_.outputs[i].dtype).bytes))
        return;
    words_[Function::kRows] = 1;
    words_[Function::kCols] = rows * cols;
  }
  // Whether all results that may bypass the cache are whole lines.
  [[nodiscard]] bool in_lines() const {
    constexpr int64_t kLine = 64;
    for (size_t i = 0; i < f_.outputs.size(); ++i) {
      if (!f_.outputs[i].stream) continue;
      const size_t at = f_.inputs.size() + i;
      if (address(at) % kLine != 0 || (words_[Function::kRows] > 1 && step(at) % kLine != 0))
        return false;
    }
    return true;
  }
  void run(const Phase& phase, bool stream) {
    prefetch(phase.elements_ahead());
    phase.code(stream && in_lines())(words_.data());
  }

 private:
  // The end of a row prefetches the beginning of a later row. What follows a single row is probably
  // the next one.
  void prefetch(int64_t ahead) {
    const int64_t cols = words_[Function::kCols];
    words_[Function::kTurn] = words_[Function::kRows] > 1 ? cols - ahead : cols;
    words_[Function::kShift] = std::min<int64_t>(ahead - cols, 0);
    words_[Function::kRowsAhead] = cols < ahead && cols > 0 ? cdiv(ahead, cols) : 1;
  }

  void put(size_t i, const void* address, int64_t step) {
    words_[Function::kHead + 2 * i] = reinterpret_cast<int64_t>(address);
    words_[Function::kHead + 2 * i + 1] = step;
  }
  [[nodiscard]] int64_t address(size_t i) const { return words_[Function::kHead + 2 * i]; }
  [[nodiscard]] int64_t step(size_t i) const { return words_[Function::kHead + 2 * i + 1]; }

  const Function& f_;
  std::array<int64_t, kFrameWords> words_;
};

// The stride of a single row may be any number.
int64_t step_of(const View& v) { return v.rows > 1 ? v.stride * info(v.dtype).bytes : 0; }

// The maximum of the lanes of an amax.
uint32_t largest(const std::array<uint32_t, kAmaxLanes>& lanes) {
  return *std::ranges::max_element(lanes);
}

enum State : uint8_t { kSeed, kOffset, kRow, kColumn, kColumns };  // of a random stream
bool aligned_draws(const RunArgs& args) {
  const uint64_t* const state = args.random;
  return state[kColumns] % 8 == 0 && (state[kRow] * state[kColumns] + state[kColumn]) % 8 == 0;
}

// Inputs and outputs that are in the caller's memory, from row `row` and step column `col` on.
class InMemory {
 public:
  InMemory(const Step& step, const RunArgs& args, std::span<const ProductRange> product,
           int64_t product_row)
      : step_(step), args_(args), product_(product), product_row_(product_row) {
    if (std::ranges::find(step.loads, Load::From::random, &Load::from) == step.loads.end()) return;
    for (const Load& l : step.loads)
      draws_.emplace_back(args.random[kSeed], args.random[kOffset] + l.arg);
  }

  void load(Frame& frame, size_t i, int64_t row, int64_t col) {
    const Load& l = step_.loads[i];
    if (l.from == Load::From::random) {
      const uint64_t* const state = args_.random;
      const uint64_t element =
          (state[kRow] + static_cast<uint64_t>(row)) * state[kColumns] + state[kColumn];
      draws_[i].first = (element + static_cast<uint64_t>(col)) / 8;
      return frame.input(i, &draws_[i], static_cast<int64_t>(state[kColumns] / 8));
    }
    const int64_t column = l.columns(col);
    if (l.from == Load::From::product) {
      const auto range = std::ranges::find_if(product_, [&](const ProductRange& p) {
        return p.begin <= column && column < p.begin + p.n;
      });
      if (range == product_.end()) return frame.input(i, nullptr, 0);  // no columns
      frame.input(i, range->data + (row - product_row_) * range->stride + (column - range->begin),
                  range->stride * 4);
    } else if (l.from == Load::From::row) {
      frame.input(i, element(args_.in[l.arg], 0, column), 0);
    } else if (l.from == Load::From::column) {
      frame.input(i, element(args_.in[l.arg], row, 0), step_of(args_.in[l.arg]));
    } else {
      frame.input(i, element(args_.in[l.arg], row, column), step_of(args_.in[l.arg]));
    }
  }
  void store(Frame& frame, size_t k, int64_t row, int64_t col) const {
    const Store& s = step_.stores[k];
    const bool codes = s.to == Store::To::encoded;
    const View& v = args_.out[codes ? step_.encoders[s.arg].data(Orientation::rowwise) : s.arg];
    frame.output(k, element(v, row, s.columns(col)), step_of(v));
  }

 private:
  const Step& step_;
  const RunArgs& args_;
  std::span<const ProductRange> product_;
  int64_t product_row_;
  std::vector<RandomInput> draws_;  // by load
};

// The values of inputs that are the same for all elements: those of loads, then the multipliers of
// encoders.
void fill_singles(const Step& step, const RunArgs& args, const Loops& loops, float* to) {
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    if (l.from == Load::From::parameter)
      to[i] = with_short_nan(args.parameters[l.arg]);
    else if (l.from == Load::From::scalar)
      loops.load[tenon::index(l.dtype)](&to[i], args.in[l.arg].data, 1, 1);
  }
  for (size_t i = 0; i < step.encoders.size(); ++i)
    if (writes_codes(step.encoders[i]))
      to[step.loads.size() + i] = single_multiplier(step.encoders[i], args);
}

// An item some of whose loads or stores pass through slots, tile by tile.
class SlotItem final : public Item {
 public:
  SlotItem(const Body& body, const Loops& loops, const RunArgs& args, const Grid& grid,
           int64_t index, Leftovers& left, std::span<const ProductRange> product)
      : Item(body.step, body.step.loads.size() + body.step.stores.size(), loops, args, grid, index,
             left, product),
        body_(body),
        memory_(body.step, args, product, row_begin_),
        singles_(body.phases[0]->function().inputs.size()),
        lanes_(step_.stores.size()) {
    if (body.whole_bands) walk_ = grid.band_rows;
    if (!body.group || grid.tile_rows > 1) return;
    walk_ = body.group->function().group_rows();
    pieces_.emplace((grid.row_floats() + kMostBeyond) * step_.stores.size() * sizeof(float));
  }

 private:
  [[nodiscard]] Held held(const PanelRange& p) const override {
    const Place place = place_of(step_, step_.stores[p.stores[0]]);
    if (place == Place::slot) return Item::held(p);
    if (place == Place::memory) return Held::nothing;
    return writes_codes(step_.encoders[p.encoder]) ? Held::codes : Held::values;
  }

  void fill_constants() override {
    fill_singles(step_, args_, loops_, singles_.data());
    for (size_t i = 0; i < step_.loads.size(); ++i)
      if (step_.loads[i].from == Load::From::row && body_.place_of(step_.loads[i]) == Place::slot)
        fill_row(i);
  }

  void walk_rows(int64_t row, int64_t rows) override {
    if (pieces_ && rows == walk_)
      group(row);
    else
      walk_tiles(row, rows);
    for (size_t k = 0; k < step_.stores.size(); ++k)
      if (step_.stores[k].to == Store::To::amax) join_amax(k, largest(lanes_[k]));
  }

  void group(int64_t row) {
    const int64_t cols = col_end_ - col_begin_;
    const Function& f = body_.group->function();
    Frame frame(f, walk_, cols);
    const Tile t{row, walk_, col_begin_, cols};
    for (size_t i = 0; i < f.inputs.size(); ++i) load(frame, f, i, t);
    for (size_t k = 0; k < step_.stores.size(); ++k)
      if (step_.stores[k].to == Store::To::column_sum)
        frame.output(k, piece(k, row, cols), 0);
      else
        store(frame, k, t);
    frame.run(*body_.group, grid_.streams());
    for (size_t k = 0; k < step_.stores.size(); ++k)
      if (step_.stores[k].to == Store::To::column_sum)
        push_columns(k, row, 0, piece(k, row, cols), static_cast<size_t>(cols));
  }
  // The sums of a group: in the stack, if nothing is written beyond them.
  [[nodiscard]] float* piece(size_t k, int64_t row, int64_t cols) const {
    float* const in_stack = cols % kMostBeyond == 0 ? even_piece(k, row) : nullptr;
    return in_stack ? in_stack : pieces_->floats() + k * (grid_.row_floats() + kMostBeyond);
  }

  void walk_tiles(int64_t row, int64_t rows) {
    for (size_t i = 0; i < step_.loads.size(); ++i)
      if (step_.loads[i].from == Load::From::column &&
          body_.place_of(step_.loads[i]) == Place::slot)
        fill_column(i, row, rows);
    // A slot holds one tile.
    const int64_t width = walk_ > grid_.tile_rows ? kTileCols / walk_ : grid_.tile_cols();
    const size_t last = body_.phases.size() - 1;
    const Tile all{row, rows, col_begin_, col_end_ - col_begin_};
    for (size_t p = 0; p <= last; ++p) {
      if (p < last ? body_.totals_in_memory : body_.stores_in_memory) {
        p < last ? total(p, all) : tile(p, all);
      } else {
        for (int64_t c = col_begin_; c < col_end_; c += width)
          tile(p, {row, rows, c, std::min(width, col_end_ - c)});
        if (col_begin_ == col_end_) tile(p, all);
      }
      if (p < last) end_total(static_cast<uint32_t>(p), rows);
    }
    for (size_t k = 0; k < step_.stores.size(); ++k)
      if (step_.stores[k].to == Store::To::column && chunk_ == 0)
        store_column(k, result(k), row, rows);
  }

  [[nodiscard]] float* result(size_t k) const { return slot_[step_.loads.size() + k]; }

  void total(size_t p, const Tile& t) {
    if (t.cols == 0) return;
    const Phase& phase = *body_.phases[p];
    const Function& f = phase.function();
    const TotalPieces pieces = total_pieces(f, body_.wide, t.cols);
    const Scratch scratch(static_cast<size_t>(t.rows * pieces.count()) * sizeof(float));
    Frame frame(f, t.rows, t.cols);
    for (size_t i = 0; i < f.inputs.size(); ++i) load(frame, f, i, t);
    frame.output(0, scratch.floats(), pieces.count() * 4);
    frame.run(phase, false);
    for (int64_t r = 0; r < t.rows; ++r)
      set_total(r, scratch.floats() + r * pieces.count(), static_cast<size_t>(pieces.blocks),
                static_cast<size_t>(pieces.rest));
  }

  void tile(size_t p, const Tile& t) {
    const Phase& phase = *body_.phases[p];
    const Function& f = phase.function();
    Frame frame(f, t.rows, t.cols);
    for (size_t i = 0; i < f.inputs.size(); ++i) load(frame, f, i, t);
    const bool ends = p + 1 == body_.phases.size();
    if (!ends) {
      frame.output(0, slot_.back(), t.cols * 4);
      frame.run(phase, false);
      if (t.cols > 0) add_total(slot_.back(), t);
      return;
    }
    for (size_t k = 0; k < step_.stores.size(); ++k) store(frame, k, t);
    frame.run(phase, grid_.streams());
    if (t.cols == 0) return;
    for (size_t k = 0; k < step_.stores.size(); ++k)
      if (step_.stores[k].to != Store::To::amax && place_of(step_, step_.stores[k]) == Place::slot)
        Item::store(k, t, result(k));
  }

  void store(Frame& frame, size_t k, const Tile& t) {
    const Store& s = step_.stores[k];
    if (s.to == Store::To::amax)
      frame.output(k, lanes_[k].data(), 0);
    else if (s.to == Store::To::column)
      frame.output(k, result(k), 4);
    else if (const Place place = place_of(step_, s); place == Place::memory)
      memory_.store(frame, k, t.row, t.col);
    else if (place == Place::panel)
      store_in_panel(frame, k, t);
    else
      frame.output(k, result(k), t.cols * 4);
  }

  void store_in_panel(Frame& frame, size_t k, const Tile& t) {
    const auto p = std::ranges::find_if(panels_, [&](const PanelRange& range) {
      return std::ranges::find(range.stores, k) != range.stores.end();
    });
    const Encoder& e = step_.encoders[p->encoder];
    const int64_t bytes = writes_codes(e) ? info(e.format.dtype).bytes : 4;
    const int64_t at = (t.row - band_) * p->n + step_.stores[k].columns(t.col) - p->begin;
    frame.output(k, reinterpret_cast<char*>(panel_data_[p - panels_.begin()]) + at * bytes,
                 p->n * bytes);
  }

  void load(Frame& frame, const Function& f, size_t i, const Tile& t) {
    if (f.inputs[i].reach == Reach::single) return frame.input(i, &singles_[i], 0);
    const Load& l = step_.loads[i];
    if (l.from == Load::From::column && body_.place_of(l) == Place::slot)
      return frame.input(i, slot_[i], 4);
    if (l.from == Load::From::total) return frame.input(i, slot_[i], 4);
    if (body_.place_of(l) == Place::memory) return memory_.load(frame, i, t.row, t.col);
    if (t.cols > 0 && f.inputs[i].used) fill_load(i, t);
    frame.input(i, slot_[i], l.from == Load::From::row ? 0 : t.cols * 4);
  }

  const Body& body_;
  InMemory memory_;
  std::vector<float> singles_;
  std::vector<std::array<uint32_t, kAmaxLanes>> lanes_;
  std::optional<Scratch> pieces_;  // sums of a group, by store. Empty: rows are not grouped
};

class Runner final : public TileRunner {
 public:
  Runner(const Step& step, const Isa& isa, Approximated formula, Assumed assumed)
      : loops_(*isa.loops),
        body_{step, assumed, std::move(formula.formula)},
        positive_(std::move(formula.positive)) {
    const std::vector<uint32_t> roots = body_.lowered.roots;
    const size_t stores = step.stores.size();
    body_.wide = isa.wide;
    body_.totals_in_memory = std::ranges::all_of(step.loads, [&](const Load& l) {
      return l.from == Load::From::total || is_single(l) || body_.place_of(l) == Place::memory;
    });
    const Output::To to = body_.totals_in_memory ? Output::To::total : Output::To::elements;
    for (size_t t = stores; t < roots.size(); ++t)
      add_phase({{.to = to, .value = roots[t]}}, isa.wide);
    std::vector<Output> outputs;
    for (size_t k = 0; k < stores; ++k) outputs.push_back(output_of(step.stores[k], roots[k]));
    add_phase(outputs, isa.wide);

    const auto each_store = [&](auto... to) {
      return std::ranges::all_of(step.stores, [&](const Store& s) {
        return ((s.to == to) || ...) || place_of(step, s) != Place::slot;
      });
    };
    const bool panels = std::ranges::any_of(
        step.stores, [&](const Store& s) { return place_of(step, s) == Place::panel; });
    const auto count = [&](Store::To to) {
      return static_cast<size_t>(std::ranges::count(step.stores, to, &Store::to));
    };
    const bool direct =
        step.totals().empty() && std::ranges::all_of(step.loads, [&](const Load& l) {
          return is_single(l) || body_.place_of(l) == Place::memory;
        });
    body_.whole_items = direct && !panels && each_store(Store::To::amax) &&
                        count(Store::To::amax) <= kMostWholeAmax;
    body_.stores_in_memory =
        body_.totals_in_memory && each_store(Store::To::amax, Store::To::column);
    body_.whole_bands = panels && direct && body_.stores_in_memory;
    const bool ordered = std::ranges::any_of(step.stores, &Store::ordered);
    if (!direct || !each_store(Store::To::amax, Store::To::column_sum) || ordered ||
        count(Store::To::column_sum) == 0)
      return;
    for (size_t k = 0; k < stores; ++k)
      if (step.stores[k].to == Store::To::column_sum) outputs[k].to = Output::To::column;
    body_.group = std::make_unique<const Phase>(function_of(outputs), isa.wide);
  }

  // Whether the call is one that the code was compiled for.
  [[nodiscard]] bool fits(const RunArgs& args) const {
    if (body_.assumed.aligned_draws && !aligned_draws(args)) return false;
    if (!body_.assumed.ordinary) return true;
    const auto value = [&](const Load& l) { return args.parameters[l.arg]; };
    return std::ranges::all_of(body_.step.loads,
                               [&](const Load& l) {
                                 const float p =
                                     l.from == Load::From::parameter ? std::fabs(value(l)) : 1;
                                 return p >= 1 / kOrdinary && p <= kOrdinary;
                               }) &&
           std::ranges::all_of(positive_,
                               [&](uint32_t i) { return value(body_.step.loads[i]) > 0; });
  }

  void prepare() const override {
    for (const auto& phase : body_.phases) (void)phase->code(false);
    if (body_.group) (void)body_.group->code(false);
  }

  void run(const RunArgs& args, const Grid& grid, int64_t index, Leftovers& left,
           std::span<const ProductRange> product) const override {
    if (body_.whole_items)
      run_whole(args, grid, index, left, product);
    else
      SlotItem(body_, loops_, args, grid, index, left, product).run();
  }

 private:
  void add_phase(std::vector<Output> outputs, bool wide) {
    body_.phases.push_back(std::make_unique<const Phase>(function_of(std::move(outputs)), wide));
  }

  Function function_of(std::vector<Output> outputs) const {
    Function f{.outputs = std::move(outputs), .graph = &body_.lowered.graph};
    for (const Load& l : body_.step.loads) {
      f.inputs.push_back(input_of(l));
      f.inputs.back().ordinary = body_.assumed.ordinary && l.from == Load::From::parameter;
    }
    f.inputs.resize(f.inputs.size() + body_.step.encoders.size(),
                    {.reach = Reach::single, .any_nan = false});
    f.mark_used();
    return f;
  }

  // The value is multiplied by the scale of its encoder.
  Output output_of(const Store& s, uint32_t root) {
    const Step& step = body_.step;
    const Place place = place_of(step, s);
    Output o{.dtype = place == Place::memory ? s.dtype : DType::f32,
             .value = root,
             .rounding = rounding_of(step, s),
             .stream = place == Place::memory};
    if (s.to == Store::To::amax) o.to = Output::To::amax;
    if (s.to == Store::To::column) o.to = Output::To::row;
    if (s.to == Store::To::encoded && place != Place::slot && writes_codes(step.encoders[s.arg])) {
      const Encoder& e = step.encoders[s.arg];
      Graph& g = body_.lowered.graph;
      o.dtype = e.format.dtype;
      if (e.format.scaling != Scaling::none)
        o.value = g.id(Expr(&g, root) * g.load(static_cast<uint32_t>(step.loads.size() + s.arg)));
    }
    return o;
  }

  Input input_of(const Load& l) const {
    const Step& step = body_.step;
    const bool row = l.from == Load::From::column || l.from == Load::From::total;
    const bool direct = body_.place_of(l) == Place::memory;
    // A total has the NaNs of its row.
    const bool any_nan =
        l.from == Load::From::total
            ? !std::ranges::all_of(step.loads,
                                   [](const Load& other) {
                                     return other.from == Load::From::total || short_nan(other);
                                   })
            : !short_nan(l);
    return {row                                      ? Reach::row
            : is_single(l)                           ? Reach::single
            : direct && l.from == Load::From::random ? Reach::random
                                                     : Reach::elements,
            direct ? l.dtype : DType::f32, any_nan};
  }

  void run_whole(const RunArgs& args, const Grid& grid, int64_t index, Leftovers& left,
                 std::span<const ProductRange> product) const {
    const Step& step = body_.step;
    const Phase& phase = *body_.phases[0];
    const int64_t row = index / grid.item_chunks() * grid.block_rows;
    const int64_t col = index % grid.item_chunks() * grid.chunk_cols;
    Frame frame(phase.function(), std::min(grid.block_rows, grid.rows - row),
                std::min(grid.chunk_cols, grid.cols - col));
    std::array<float, kMostCompiledViews> singles;
    fill_singles(step, args, loops_, singles.data());
    std::array<std::array<uint32_t, kAmaxLanes>, kMostWholeAmax> lanes{};
    size_t maxima = 0;
    InMemory memory(step, args, product, row);
    for (size_t i = 0; i < phase.function().inputs.size(); ++i)
      if (phase.function().inputs[i].reach == Reach::single)
        frame.input(i, &singles[i], 0);
      else
        memory.load(frame, i, row, col);
    for (size_t k = 0; k < step.stores.size(); ++k)
      if (step.stores[k].to == Store::To::amax)
        frame.output(k, lanes[maxima++].data(), 0);
      else
        memory.store(frame, k, row, col);
    frame.flatten();
    frame.run(phase, grid.streams());
    if (grid.streams()) end_stream();
    maxima = 0;
    for (size_t k = 0; k < step.stores.size(); ++k)
      if (step.stores[k].to == Store::To::amax) raise(left.amax[k], largest(lanes[maxima++]));
  }

  const Loops& loops_;
  Body body_;
  std::vector<uint32_t> positive_;  // parameters that must be positive
};

// Whether parameters are limits: minima and maxima of ordinary numbers take fewer instructions.
bool limits_by_parameter(const Step& step, const Lowered& formula) {
  const Graph& g = formula.graph;
  std::vector<bool> constant(g.size(), true);
  bool found = false;
  for (const uint32_t id : order(g, formula.roots)) {
    const Node& n = g[id];
    if (n.word == Word::load)
      constant[id] = n.slot < step.loads.size() && step.loads[n.slot].from == Load::From::parameter;
    for (int i = 0; i < n.arity(); ++i) constant[id] = constant[id] && constant[n.in[i]];
    const bool limits = n.word == Word::min || n.word == Word::max;
    found = found ||
            (limits && !constant[id] && constant[n.in[1]] && g[n.in[1]].word != Word::constant);
  }
  return found;
}

// Compiled for the calls that are usual, and for others if there is one.
class EitherRunner final : public TileRunner {
 public:
  EitherRunner(const Step& step, const Isa& isa, Assumed assumed)
      : step_(step),
        isa_(isa),
        usual_(step, isa, formula(step, isa.wide, assumed.ordinary), assumed) {}

  void prepare() const override { usual_.prepare(); }
  void run(const RunArgs& args, const Grid& grid, int64_t index, Leftovers& left,
           std::span<const ProductRange> product) const override {
    if (usual_.fits(args)) return usual_.run(args, grid, index, left, product);
    std::call_once(once_, [&] {
      any_ =
          std::make_unique<const Runner>(step_, isa_, formula(step_, isa_.wide, false), Assumed{});
    });
    any_->run(args, grid, index, left, product);
  }

 private:
  Step step_;
  const Isa& isa_;
  Runner usual_;
  mutable std::once_flag once_;
  mutable std::unique_ptr<const Runner> any_;
};

}  // namespace

std::unique_ptr<const TileRunner> runner(const Step& step, const Isa& isa) {
  Approximated any = formula(step, isa.wide, false);
  const Assumed usual{.ordinary = limits_by_parameter(step, any.formula),
                      .aligned_draws = std::ranges::find(step.loads, Load::From::random,
                                                         &Load::from) != step.loads.end()};
  if (usual.ordinary || usual.aligned_draws)
    return std::make_unique<const EitherRunner>(step, isa, usual);
  return std::make_unique<const Runner>(step, isa, std::move(any), usual);
}

}  // namespace tenon::cpu::jit
