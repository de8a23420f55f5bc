// The loops over rows and columns, and the formula inside of them, several vectors at a time.
#include "backend/cpu/jit/kernel.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "backend/cpu/jit/draws.h"
#include "backend/cpu/jit/formula.h"
#include "backend/cpu/jit/vectors.h"
#include "expr/hardware.h"
#include "expr/order.h"
#include "tenon/error.h"
#include "tenon/format.h"

namespace tenon::cpu::jit {

namespace {

using asmjit::Imm;
using asmjit::Operand;
namespace Id = x86::Inst;

// Vectors in flight: more of them spill, fewer wait.
constexpr int kUnroll = 4, kMostUnroll = 8;
constexpr size_t kLongFormula = 160;  // nodes; asmjit's time grows with the square of live values
constexpr int64_t kPrefetchBytes = 4096;  // distance of prefetches, if there is one input

enum Extent : uint8_t { call, row, element };

// Whether all inputs are bf16, and results bf16 or FP8. Lines are then split into even and odd
// elements: this costs less than widening.
bool can_pair(const Function& f) {
  bool any = false;
  for (const Input& i : f.inputs) {
    if (!i.used || i.reach != Reach::elements) continue;
    if (i.dtype != DType::bf16) return false;
    any = true;
  }
  for (const Output& o : f.outputs)
    if (o.to == Output::To::elements && o.dtype != DType::bf16 && info(o.dtype).bytes != 1)
      return false;
  return any;
}

// Vectors of columns per pass of the loop. FP8 codes are a long chain of instructions after the
// formula: the processor runs out of others with four vectors.
int vectors_of(const Function& f, bool wide) {
  if (f.graph->size() > kLongFormula) return kUnroll / 2;
  if (!wide || !can_pair(f)) return kUnroll;
  int results = 0, codes = 0;
  for (const Output& o : f.outputs) {
    if (o.to != Output::To::elements) continue;
    ++results;
    if (info(o.dtype).bytes == 1) ++codes;
  }
  return results == 1 && codes == 1 ? kMostUnroll : kUnroll;
}

class Errors final : public asmjit::ErrorHandler {
 public:
  void handleError(asmjit::Error error, const char* message,
                   asmjit::BaseEmitter* /*origin*/) override {
    if (what.empty()) what = str(asmjit::DebugUtils::errorAsString(error), ": ", message);
  }
  std::string what;
};

// Children before parents. Of the children of a node, the one that needs most registers is first:
// the results of the others are then not live meanwhile.
std::vector<uint32_t> evaluation_order(const Graph& graph, std::span<const uint32_t> roots) {
  std::vector<int> need(graph.size(), 0);
  std::vector<std::vector<uint32_t>> children(graph.size());
  for (const uint32_t id : order(graph, roots)) {
    const Node& n = graph[id];
    if (n.word == Word::constant) continue;
    need[id] = 1;
    children[id].assign(n.in.begin(), n.in.begin() + n.arity());
    std::ranges::stable_sort(children[id], std::greater(), [&](uint32_t in) { return need[in]; });
    for (size_t i = 0; i < children[id].size(); ++i)
      need[id] = std::max(need[id], need[children[id][i]] + static_cast<int>(i));
  }
  std::vector<uint32_t> result, stack(roots.rbegin(), roots.rend());
  std::vector<bool> open(graph.size(), false), done(graph.size(), false);
  while (!stack.empty()) {
    const uint32_t id = stack.back();
    if (!open[id]) {
      open[id] = true;
      stack.insert(stack.end(), children[id].rbegin(), children[id].rend());
      continue;
    }
    stack.pop_back();
    if (!done[id]) result.push_back(id);
    done[id] = true;
  }
  return result;
}

class Builder {
 public:
  Builder(const Function& f, bool wide)
      : f_(f), graph_(*f.graph), wide_(wide), extent_(graph_.size(), call), uses_(graph_.size()) {
    std::vector<uint32_t> roots;
    for (const Output& o : f.outputs) roots.push_back(o.value);
    order_ = evaluation_order(graph_, roots);
    for (const uint32_t id : order_) {
      const Node& n = graph_[id];
      if (n.word == Word::load) extent_[id] = extent_of(f.inputs[n.slot].reach);
      for (int i = 0; i < n.arity(); ++i) {
        extent_[id] = std::max(extent_[id], extent_[n.in[i]]);
        ++uses_[n.in[i]];
      }
    }
    for (const uint32_t id : roots) ++uses_[id];
    pairs_ = can_pair(f);
    at_once_ = f.rows_at_once();
    unroll_ = std::max(vectors_of(f, wide), (pairs_ ? 2 : 1) * at_once_);
    for (size_t i = 0; i < f.inputs.size(); ++i)
      any_nan_ = any_nan_ || (f_.inputs[i].used && f.inputs[i].any_nan);
  }

  std::unique_ptr<const Binary> run() {
    Errors errors;
    asmjit::CodeHolder code;
    code.init(asmjit::Environment::host());
    code.setErrorHandler(&errors);
    x86::Compiler cc(&code);
    cc.addDiagnosticOptions(asmjit::DiagnosticOptions::kValidateIntermediate);
    cc_ = &cc;
    write();
    cc.finalize();
    if (!errors.what.empty())
      fail(Code::runtime, "cpu: the JIT compiler failed: ", errors.what,
           "; set TENON_RUNNER=interpreter, and report the formula");
    return std::make_unique<const Binary>(code);
  }

 private:
  static Extent extent_of(Reach r) {
    return r == Reach::single ? call : r == Reach::row ? row : element;
  }

  [[nodiscard]] x86::Mem word(size_t i) const {
    return x86::ptr(frame_, static_cast<int32_t>(8 * i), 8);
  }
  [[nodiscard]] size_t input_word(size_t i) const { return Function::kHead + 2 * i; }
  [[nodiscard]] size_t output_word(size_t i) const {
    return Function::kHead + 2 * (f_.inputs.size() + i);
  }

  void write() {
    x86::Compiler& cc = *cc_;
    asmjit::FuncNode* const func =
        cc.addFunc(asmjit::FuncSignatureT<void, const int64_t*>(asmjit::CallConvId::kHost));
    func->frame().setAvxEnabled();
    if (wide_) func->frame().setAvx512Enabled();
    func->frame().setAvxCleanup();
    frame_ = cc.newIntPtr();
    func->setArg(0, frame_);
    rows_ = cc.newInt64();
    cols_ = cc.newInt64();
    cc.mov(rows_, word(Function::kRows));
    cc.mov(cols_, word(Function::kCols));
    const auto address = [&](size_t at) {
      const x86::Gp p = cc.newIntPtr();
      cc.mov(p, word(at));
      return p;
    };
    for (size_t i = 0; i < f_.inputs.size(); ++i) {
      in_[0].push_back(f_.inputs[i].used ? address(input_word(i)) : x86::Gp());
      if (f_.inputs[i].used && f_.inputs[i].reach == Reach::random)
        cc.mov(in_[0][i], x86::ptr(in_[0][i], offsetof(RandomInput, first), 8));
    }
    for (int r = 0; r < at_once_; ++r)
      for (size_t i = 0; i < f_.inputs.size(); ++i)
        ahead_[r].push_back(prefetches(i) ? cc.newIntPtr() : x86::Gp());
    for (size_t i = 0; i < f_.outputs.size(); ++i) out_[0].push_back(address(output_word(i)));
    for (int r = 1; r < at_once_; ++r) {
      in_[r] = in_[0], out_[r] = out_[0];
      for (size_t i = 0; i < f_.inputs.size(); ++i)
        if (moves_input(i)) in_[r][i] = cc.newIntPtr();
      for (size_t i = 0; i < f_.outputs.size(); ++i)
        if (moves_output(i)) out_[r][i] = cc.newIntPtr();
    }
    vectors_.emplace(cc, wide_, cc.cursor());
    values_.resize(graph_.size());
    for (const Output& o : f_.outputs)
      most_.push_back(o.to == Output::To::amax ? vectors_->zero() : x86::Vec());
    for (const Output& o : f_.outputs)
      total_at_.push_back(o.to == Output::To::total ? cc.newIntPtr() : x86::Gp());
    if (!wide_) make_tails();
    evaluate(call, 1, nullptr);

    const asmjit::Label next_row = cc.newLabel(), end = cc.newLabel();
    cc.test(rows_, rows_);
    cc.jle(end);
    cc.bind(next_row);
    const int64_t rows = f_.groups() ? f_.group_rows() : 1;
    for (int64_t r = 0; r < rows; r += at_once_) {
      first_of_group_ = r == 0;
      for (int next = 1; next < at_once_; ++next) set_addresses(next);
      per_row_ = 1;
      evaluate(row, at_once_, nullptr);
      for (size_t i = 0; i < f_.outputs.size(); ++i)
        if (f_.outputs[i].to == Output::To::row)
          cc.emit(Id::kIdVmovss, x86::ptr(out_[0][i], 0, 4), first(f_.outputs[i].value));
      for (size_t i = 0; i < f_.outputs.size(); ++i)
        if (f_.outputs[i].to == Output::To::total) cc.mov(total_at_[i], out_[0][i]);
      columns();
      next_addresses();
    }
    cc.sub(rows_, rows);
    cc.jg(next_row);
    cc.bind(end);
    for (size_t i = 0; i < f_.outputs.size(); ++i)
      if (f_.outputs[i].to == Output::To::amax) join(most_[i], x86::ptr(out_[0][i]));
    cc.endFunc();
  }

  [[nodiscard]] bool prefetches(size_t i) const {
    return f_.inputs[i].used && f_.inputs[i].reach == Reach::elements;
  }

  // Whether the address is that of a row.
  [[nodiscard]] bool moves_input(size_t i) const {
    return f_.inputs[i].used && f_.inputs[i].reach != Reach::single;
  }
  [[nodiscard]] bool moves_output(size_t i) const {
    return f_.outputs[i].to != Output::To::amax && f_.outputs[i].to != Output::To::column;
  }
  // The addresses of row r of those that are processed at once, from the row before it.
  void set_addresses(int r) {
    const auto next = [&](const x86::Gp& to, const x86::Gp& from, size_t step) {
      cc_->mov(to, from);
      cc_->add(to, word(step));
    };
    for (size_t i = 0; i < f_.inputs.size(); ++i)
      if (moves_input(i)) next(in_[r][i], in_[r - 1][i], input_word(i) + 1);
    for (size_t i = 0; i < f_.outputs.size(); ++i)
      if (moves_output(i)) next(out_[r][i], out_[r - 1][i], output_word(i) + 1);
  }
  // Moves all addresses to the next rows.
  void next_addresses() {
    const auto next = [&](ByRow<x86::Gp>& at, size_t i, size_t step) {
      if (at_once_ > 1) cc_->mov(at[0][i], at[at_once_ - 1][i]);
      cc_->add(at[0][i], word(step));
    };
    for (size_t i = 0; i < f_.inputs.size(); ++i)
      if (moves_input(i)) next(in_, i, input_word(i) + 1);
    for (size_t i = 0; i < f_.outputs.size(); ++i)
      if (moves_output(i)) next(out_, i, output_word(i) + 1);
  }

  // The elements of some vectors of columns: those of the first row, then those of the next one.
  void process(int vectors, const x86::KReg* mask, const x86::Gp* left) {
    per_row_ = vectors / at_once_;
    evaluate(element, vectors, mask);
    store(vectors, mask, left);
    for (size_t i = 0; i < f_.outputs.size(); ++i) {
      if (f_.outputs[i].to == Output::To::total) add_total(i, vectors, left);
      if (f_.outputs[i].to == Output::To::column) add_column(i);
    }
  }

  // The tree sum of some vectors, in which missing elements are −0.
  void add_total(size_t i, int vectors, const x86::Gp* left) {
    Vectors& v = *vectors_;
    std::array<x86::Vec, kMostUnroll> parts;
    for (int u = 0; u < vectors; ++u) {
      parts[u] = register_of(f_.outputs[i].value, u);
      if (left)
        parts[u] = v.where(v.lanes_below(*left, pairs_ ? u : u * v.lanes(), pairs_ ? 2 : 1),
                           parts[u], v.kept(0x80000000U));
    }
    for (int n = vectors; n > 1; n /= 2)
      for (int u = 0; u < n / 2; ++u) {
        // Even and odd elements are neighbours.
        const bool lines = pairs_ && n == vectors;
        const x86::Vec &a = parts[2 * u], &b = parts[2 * u + 1];
        parts[u] = lines ? v.sum(a, b) : v.sum_pairs(a, b);
      }
    cc_->emit(Id::kIdVmovss, x86::ptr(total_at_[i], 0, 4),
              v.sum_lanes(parts[0]).as<x86::Xmm>().xmm());
    cc_->add(total_at_[i], 4);
  }

  // The first rows of a group are kept in the order of the vectors. The next ones are added to
  // them.
  void add_column(size_t i) {
    const auto at = [&](int u) {
      x86::Mem m = element_at(out_[0][i], DType::f32, int64_t{u} * vectors_->lanes());
      m.setSize(static_cast<uint32_t>(vectors_->bytes()));
      return m;
    };
    std::array<x86::Vec, kMostUnroll> sums;
    for (int u = 0; u < per_row_; ++u) {
      sums[u] = register_of(f_.outputs[i].value, u);
      for (int r = 1; r < at_once_; ++r)
        sums[u] = vectors_->sum(sums[u], register_of(f_.outputs[i].value, r * per_row_ + u));
      if (first_of_group_) continue;
      const x86::Vec sum = vectors_->fresh();
      vectors_->emit(Id::kIdVaddps, sum, sums[u], at(u));
      sums[u] = sum;
    }
    for (int u = 0; pairs_ && !first_of_group_ && u < per_row_; u += 2) {
      const Vectors::Pair p = vectors_->in_order({sums[u], sums[u + 1]});
      sums[u] = p.even, sums[u + 1] = p.odd;
    }
    for (int u = 0; u < per_row_; ++u) vectors_->emit(Id::kIdVmovups, at(u), sums[u]);
  }

  // The value of a node in vector u. A value of rows has one vector per row.
  [[nodiscard]] const Value& value_of(uint32_t id, int u) const {
    return values_[id][extent_[id] == row ? u / per_row_ : u];
  }
  [[nodiscard]] x86::Vec register_of(uint32_t id, int u) {
    const Value& v = value_of(id, u);
    return v.constant ? vectors_->kept(v.bits) : v.reg;
  }

  // One lane of a row's value.
  [[nodiscard]] x86::Xmm first(uint32_t id) { return register_of(id, 0).as<x86::Xmm>().xmm(); }

  void join(x86::Vec most, x86::Mem to) {
    vectors_->emit(Id::kIdVpmaxud, most, most, to);
    vectors_->emit(Id::kIdVmovups, to, most);
  }

  // All columns of a row: whole groups of vectors, then the rest.
  void columns() {
    x86::Compiler& cc = *cc_;
    const asmjit::Label group = cc.newLabel(), turn = cc.newLabel(), tail = cc.newLabel(),
                        done = cc.newLabel();
    index_ = cc.newInt64();
    const x86::Gp last = cc.newInt64(), limit = cc.newInt64();
    cc.xor_(index_.r32(), index_.r32());
    const int wide_step = unroll_ / at_once_ * vectors_->lanes();
    cc.mov(last, cols_);
    cc.sub(last, wide_step);
    cc.cmp(index_, last);
    cc.jg(tail);
    cc.mov(limit, word(Function::kTurn));
    cc.cmp(limit, last);
    cc.cmovg(limit, last);
    for (int r = 0; r < at_once_; ++r)
      for (size_t i = 0; i < f_.inputs.size(); ++i)
        if (prefetches(i))
          cc.lea(ahead_[r][i],
                 x86::ptr(in_[r][i], static_cast<int32_t>(f_.elements_ahead() *
                                                          info(f_.inputs[i].dtype).bytes)));
    cc.cmp(index_, limit);
    cc.jg(turn);
    cc.bind(group);
    process(unroll_, nullptr, nullptr);
    cc.add(index_, wide_step);
    cc.cmp(index_, limit);
    cc.jle(group);
    cc.cmp(index_, last);
    cc.jg(tail);
    cc.bind(turn);
    cc.mov(limit, last);
    for (int r = 0; r < at_once_; ++r)
      for (size_t i = 0; i < f_.inputs.size(); ++i)
        if (prefetches(i)) prefetch_later_row(r, i);
    cc.jmp(group);
    cc.bind(tail);
    wide_ ? masked_tail(done) : copied_tail(done);
    cc.bind(done);
  }

  void prefetch_later_row(int r, size_t i) {
    x86::Compiler& cc = *cc_;
    const x86::Gp rows = cc.newInt64(), shift = cc.newInt64();
    cc.mov(shift, word(Function::kShift));
    cc.mov(rows, word(Function::kRowsAhead));
    cc.imul(rows, word(input_word(i) + 1));
    if (at_once_ > 1) cc.imul(rows, rows, at_once_);
    cc.lea(ahead_[r][i], x86::ptr(in_[r][i], shift, scale_of(f_.inputs[i].dtype)));
    cc.add(ahead_[r][i], rows);
  }

  // The rest, one line at a time, under a mask.
  void masked_tail(const asmjit::Label& done) {
    x86::Compiler& cc = *cc_;
    const int vectors = pairs_ ? 2 : 1, step = vectors * vectors_->lanes();
    const asmjit::Label more = cc.newLabel();
    const x86::Gp left = cc.newInt64(), bits = cc.newUInt64();
    const x86::KReg mask = pairs_ ? cc.newKd() : cc.newKw();
    cc.mov(left, cols_);
    cc.sub(left, index_);
    cc.jle(done);
    cc.bind(more);
    cc.mov(bits, -1);
    cc.bzhi(bits, bits, left);
    const asmjit::Label whole = cc.newLabel();
    cc.cmp(left, step);
    cc.jl(whole);
    cc.mov(bits, -1);
    cc.bind(whole);
    if (pairs_)
      cc.kmovd(mask, bits.r32());
    else
      cc.kmovw(mask, bits.r32());
    process(vectors * at_once_, &mask, &left);
    cc.add(index_, step);
    cc.sub(left, step);
    cc.jg(more);
  }

  // Without masks, the rest is copied to and from lines on the stack.
  void make_tails() {
    x86::Compiler& cc = *cc_;
    const auto line = [&](bool wanted) {
      return wanted ? std::optional(cc.newStack(64, 32)) : std::nullopt;
    };
    for (int r = 0; r < at_once_; ++r) {
      for (size_t i = 0; i < f_.inputs.size(); ++i)
        in_lines_[r].push_back(line(f_.inputs[i].used && f_.inputs[i].reach == Reach::elements));
      for (const Output& o : f_.outputs)
        out_lines_[r].push_back(line(o.to == Output::To::elements));
    }
  }

  void copied_tail(const asmjit::Label& done) {
    x86::Compiler& cc = *cc_;
    const int vectors = pairs_ ? 2 : 1, step = vectors * vectors_->lanes();
    const asmjit::Label more = cc.newLabel();
    const x86::Gp left = cc.newInt64(), count = cc.newInt64();
    cc.mov(left, cols_);
    cc.sub(left, index_);
    cc.jle(done);
    cc.bind(more);
    cc.mov(count, step);
    cc.cmp(left, count);
    cc.cmovl(count, left);
    tail_count_ = count;
    on_lines_ = true;
    process(vectors * at_once_, nullptr, &left);
    on_lines_ = false;
    cc.add(index_, step);
    cc.sub(left, step);
    cc.jg(more);
  }

  void copy(const x86::Mem& line, const x86::Mem& memory, const x86::Gp& count, DType dtype,
            bool to_line) {
    x86::Compiler& cc = *cc_;
    const int size = info(dtype).bytes;
    const x86::Gp near = cc.newIntPtr(), far = cc.newIntPtr(), n = cc.newInt64(),
                  value = cc.newUInt32();
    cc.lea(near, line);
    cc.lea(far, memory);
    cc.mov(n, count);
    const asmjit::Label next = cc.newLabel();
    cc.bind(next);
    const x86::Mem from = x86::ptr(to_line ? far : near, 0, static_cast<uint32_t>(size));
    const x86::Mem to = x86::ptr(to_line ? near : far, 0, static_cast<uint32_t>(size));
    if (size == 4) {
      cc.mov(value, from);
      cc.mov(to, value);
    } else if (size == 2) {
      cc.movzx(value, from);
      cc.mov(to, value.r16());
    } else {
      cc.movzx(value, from);
      cc.mov(to, value.r8());
    }
    cc.add(near, size);
    cc.add(far, size);
    cc.dec(n);
    cc.jnz(next);
  }

  // The scale of an index in an address, as its logarithm.
  static uint32_t scale_of(DType dtype) {
    return static_cast<uint32_t>(std::countr_zero(static_cast<uint32_t>(info(dtype).bytes)));
  }
  // Element index_ + `ahead` of the row at p.
  [[nodiscard]] x86::Mem element_at(const x86::Gp& p, DType dtype, int64_t ahead) const {
    return x86::ptr(p, index_, scale_of(dtype), static_cast<int32_t>(ahead * info(dtype).bytes));
  }
  // The elements of vector u.
  [[nodiscard]] x86::Mem input_at(size_t i, int u) const {
    const int r = u / per_row_;
    if (!on_lines_) return element_at(in_[r][i], f_.inputs[i].dtype, column_of(u));
    return in_lines_[r][i]->cloneAdjusted(column_of(u) * info(f_.inputs[i].dtype).bytes);
  }
  [[nodiscard]] x86::Mem output_at(size_t i, int u) const {
    const int r = u / per_row_;
    if (!on_lines_) return element_at(out_[r][i], f_.outputs[i].dtype, column_of(u));
    return out_lines_[r][i]->cloneAdjusted(column_of(u) * info(f_.outputs[i].dtype).bytes);
  }
  // The first column of vector u, or of its line, from index_ on.
  [[nodiscard]] int64_t column_of(int u) const { return int64_t{u % per_row_} * vectors_->lanes(); }

  // The values of one extent, for some vectors of columns.
  void evaluate(Extent extent, int vectors, const x86::KReg* mask) {
    for (int r = 0; extent == element && on_lines_ && r < at_once_; ++r)
      for (size_t i = 0; i < in_lines_[r].size(); ++i)
        if (in_lines_[r][i])
          copy(*in_lines_[r][i], element_at(in_[r][i], f_.inputs[i].dtype, 0), tail_count_,
               f_.inputs[i].dtype, true);
    std::vector<uint32_t> left = uses_;
    for (const uint32_t id : order_) {
      if (extent_[id] != extent) continue;
      const Node& n = graph_[id];
      if (n.word == Word::load) {
        load(id, n.slot, vectors, mask);
        continue;
      }
      if (n.word == Word::constant) {
        // Bf16 results need NaNs whose low 16 bits are 0.
        const float value = std::isnan(n.value) ? std::numeric_limits<float>::quiet_NaN() : n.value;
        const Value c{.bits = __builtin_bit_cast(uint32_t, value), .constant = true};
        values_[id].fill(c);
        continue;
      }
      const bool ordinary = is_ordinary(n);
      for (int u = 0; u < vectors; ++u)
        values_[id][u] = {.reg = apply(n, u, extent, left), .ordinary = ordinary};
      if (extent == call) values_[id].fill(values_[id][0]);
      for (int i = 0; i < n.arity(); ++i) --left[n.in[i]];
    }
  }

  // ±p or c/p, if p is an ordinary input.
  [[nodiscard]] bool is_ordinary(const Node& n) const {
    const auto input = [&](int i) {
      const Node& in = graph_[n.in[i]];
      return in.word == Word::load && f_.inputs[in.slot].ordinary;
    };
    if (n.word == Word::neg) return input(0);
    const float above = std::fabs(graph_[n.in[0]].value);
    return n.word == Word::div && graph_[n.in[0]].word == Word::constant && input(1) &&
           above >= 1 / kOrdinary && above <= kOrdinary;
  }

  x86::Vec apply(const Node& n, int u, Extent extent, const std::vector<uint32_t>& left) {
    std::array<Value, 4> in;
    for (int i = 0; i < n.arity(); ++i) {
      in[i] = value_of(n.in[i], u);
      // The last use, and the only operand that is this value.
      in[i].dies = extent_[n.in[i]] == extent && left[n.in[i]] == 1;
    }
    const auto reg = [&](const Value& v) { return v.constant ? vectors_->kept(v.bits) : v.reg; };
    if (n.word == hardware::kEx2) return vectors_->exp2(reg(in[0]), hardware::is_rough(n));
    if (n.word == hardware::kRcp) return vectors_->reciprocal(reg(in[0]), hardware::is_rough(n));
    if (n.word == Word::select) return vectors_->select(n.rel(), in[0], in[1], in[2], in[3]);
    if (n.word != Word::round) return vectors_->word(n.word, in[0], in[1], in[2], n.detail);
    return vectors_->round(n.dtype(), reg(in[0]));
  }

  void load(uint32_t id, uint32_t slot, int vectors, const x86::KReg* mask) {
    const Input& input = f_.inputs[slot];
    if (input.reach == Reach::random) {
      const x86::Gp counter = cc_->newInt64(), stream = cc_->newIntPtr();
      cc_->mov(counter, index_);
      cc_->shr(counter, 3);
      cc_->add(counter, in_[0][slot]);
      cc_->mov(stream, word(input_word(slot)));
      for (int begin = 0; begin < vectors; begin += 4) {
        if (begin > 0) cc_->add(counter, 4 * vectors_->lanes() / 8);
        const std::array<x86::Vec, 4> four = draws(*cc_, *vectors_, counter, stream, pairs_);
        for (int u = begin; u < std::min(vectors, begin + 4); ++u)
          values_[id][u] = {.reg = four[u - begin]};
      }
      return;
    }
    if (input.reach != Reach::elements) {
      const auto value = [&](int r) {
        return Value{.reg = vectors_->broadcast(
                         x86::ptr(in_[r][slot], 0, static_cast<uint32_t>(info(input.dtype).bytes)),
                         input.dtype),
                     .ordinary = input.ordinary};
      };
      if (input.reach == Reach::single) return values_[id].fill(value(0));
      for (int r = 0; r < at_once_; ++r) values_[id][r] = value(r);
      return;
    }
    const int lanes = vectors_->lanes(), per_line = pairs_ ? 2 : 1;
    const int line = per_line * lanes * info(input.dtype).bytes;
    for (int u = 0; u < vectors; u += per_line) {
      if (!mask && !on_lines_ && column_of(u) * info(input.dtype).bytes % 64 == 0)
        cc_->prefetcht0(element_at(ahead_[u / per_row_][slot], input.dtype, column_of(u)));
      x86::Mem from = input_at(slot, u);
      from.setSize(static_cast<uint32_t>(line));
      if (pairs_) {
        const Vectors::Pair p = vectors_->load_pair(from, mask);
        values_[id][u] = {.reg = p.even};
        values_[id][u + 1] = {.reg = p.odd};
      } else {
        values_[id][u] = {.reg = vectors_->load(input.dtype, from, mask)};
      }
    }
  }

  // `left`: the columns from index_ on, if they may be fewer than the vectors hold.
  void store(int vectors, const x86::KReg* mask, const x86::Gp* left) {
    const int lanes = vectors_->lanes(), per_line = pairs_ ? 2 : 1;
    std::array<std::optional<Operand>, kMostUnroll> inside;
    const auto value = [&](const Output& o, int u) { return register_of(o.value, u); };
    for (size_t i = 0; i < f_.outputs.size(); ++i) {
      const Output& o = f_.outputs[i];
      if (o.to != Output::To::amax) continue;
      for (int u = 0; u < vectors; ++u) {
        if (left && !inside[u])
          inside[u] = vectors_->lanes_below(
              *left, pairs_ ? u % per_row_ : static_cast<int>(column_of(u)), per_line);
        vectors_->join_amax(most_[i], value(o, u), inside[u] ? &*inside[u] : nullptr);
      }
    }
    const bool streams = f_.stream && !left;
    // FP8 codes of two lines are one whole line.
    const auto two_lines = [&](const Output& o) {
      return pairs_ && wide_ && per_row_ % 4 == 0 && info(o.dtype).bytes == 1;
    };
    for (int u = 0; u < vectors; u += per_line)
      for (size_t i = 0; i < f_.outputs.size(); ++i) {
        const Output& o = f_.outputs[i];
        if (o.to != Output::To::elements) continue;
        const bool stream = streams && o.stream;
        const Bf16 bf16{o.rounding, any_nan_};
        // Two vectors of 16-bit results are one line.
        if (wide_ && !pairs_ && per_row_ % 2 == 0 && !left && info(o.dtype).bytes == 2) {
          if (u % 2 != 0) continue;
          x86::Mem to = output_at(i, u);
          to.setSize(static_cast<uint32_t>(vectors_->bytes()));
          vectors_->store_halves(o.dtype, to, value(o, u), value(o, u + 1), stream, bf16);
          continue;
        }
        if (two_lines(o)) {
          if (u % 4 != 0) continue;
          x86::Mem to = output_at(i, u);
          to.setSize(static_cast<uint32_t>(vectors_->bytes()));
          vectors_->store_line(o.dtype, to, {value(o, u), value(o, u + 1)},
                               {value(o, u + 2), value(o, u + 3)}, stream);
          continue;
        }
        x86::Mem to = output_at(i, u);
        to.setSize(static_cast<uint32_t>(per_line * lanes * info(o.dtype).bytes));
        if (pairs_)
          vectors_->store_pair(o.dtype, to, {value(o, u), value(o, u + 1)}, mask, stream, bf16);
        else
          vectors_->store(o.dtype, to, value(o, u), mask, stream, bf16);
      }
    for (int r = 0; on_lines_ && r < at_once_; ++r)
      for (size_t i = 0; i < out_lines_[r].size(); ++i)
        if (out_lines_[r][i])
          copy(*out_lines_[r][i], element_at(out_[r][i], f_.outputs[i].dtype, 0), tail_count_,
               f_.outputs[i].dtype, false);
  }

  const Function& f_;
  const Graph& graph_;
  bool wide_, pairs_ = false, any_nan_ = false;
  int unroll_ = kUnroll;
  int at_once_ = 1;        // rows that are processed at once
  int per_row_ = 1;        // vectors of each of these rows
  bool on_lines_ = false;  // elements are in the lines of a copied tail
  bool first_of_group_ = true;
  std::vector<uint32_t> order_;
  std::vector<Extent> extent_;
  std::vector<uint32_t> uses_;
  std::vector<std::array<Value, kMostUnroll>> values_;  // by node
  x86::Compiler* cc_ = nullptr;
  std::optional<Vectors> vectors_;
  x86::Gp frame_, rows_, cols_, index_, tail_count_;
  template <class T>
  using ByRow = std::array<std::vector<T>, kMostAtOnce>;  // of the rows that are processed at once
  ByRow<x86::Gp> in_, out_;
  ByRow<x86::Gp> ahead_;  // by input: where prefetches are, at index 0
  ByRow<std::optional<x86::Mem>> in_lines_, out_lines_;
  std::vector<x86::Gp> total_at_;
  std::vector<x86::Vec> most_;  // by output
};

}  // namespace

void Function::mark_used() {
  std::vector<uint32_t> roots;
  for (const Output& o : outputs) roots.push_back(o.value);
  for (const uint32_t id : order(*graph, roots))
    if ((*graph)[id].word == Word::load) inputs[(*graph)[id].slot].used = true;
}

int Function::rows_at_once() const {
  const bool random = std::ranges::any_of(
      inputs, [](const Input& i) { return i.used && i.reach == Reach::random; });
  return groups() && !random ? kMostAtOnce : 1;
}

int64_t Function::elements_ahead() const {
  int64_t largest = 1, count = 0;
  for (const Input& i : inputs) {
    if (!i.used || i.reach != Reach::elements) continue;
    largest = std::max<int64_t>(largest, info(i.dtype).bytes);
    ++count;
  }
  return kPrefetchBytes / largest / (count > 1 ? 2 : 1);
}

TotalPieces total_pieces(const Function& f, bool wide, int64_t cols) {
  const int64_t lanes = wide ? 16 : 8, block = vectors_of(f, wide) * lanes;
  const int64_t piece = can_pair(f) ? 2 * lanes : lanes;
  return {cols / block, cdiv(cols % block, piece)};
}

std::unique_ptr<const Binary> compile(const Function& function, bool wide) {
  return Builder(function, wide).run();
}

}  // namespace tenon::cpu::jit
