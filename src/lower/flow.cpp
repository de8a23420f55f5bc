// Builds and closes steps: their columns, their stores and their kernels.
#include "lower/flow.h"

#include <algorithm>
#include <utility>

#include "tenon/error.h"

namespace tenon {

namespace {

// True if the tensor has the requested encodings.
bool holds(const StoredTensor& p, const Operand& as) {
  return p.operand.format == as.format && (!as.rowwise || p.operand.rowwise) &&
         (!as.columnwise || p.operand.columnwise);
}

}  // namespace

void Flow::begin(const StoredTensor& tensor) {
  rows_ = tensor.rows;
  begin(in_memory(tensor));
}

void Flow::begin(const Value& value) {
  value_ = value;
  narrow_ = value->cols;
  halves_.reset();
  gemm_.reset();
  random_ = totals_ = false;
  sides_.clear();
  stored_.clear();
  ops_.clear();
  why_.clear();
  ++serial_;
}

void Flow::apply(std::function<Expr(Assembly&, Expr, const ColumnMap&)> f) {
  touch();
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = value_->cols;
  lazy->make = [f = std::move(f), in = value_](Assembly& a, const ColumnMap& columns) {
    return f(a, a.at(in, columns), columns);
  };
  value_ = lazy;
}

void Flow::whole_rows(const std::string& name) {
  if (!gemm_ && (!halves_ || value_->cols == narrow_)) return;
  why("row totals need whole rows, which a step with a product or with halves does not hold");
  materialise(name, Role::workspace, Operand(planner_.request().dtype));
}

void Flow::own_columns(const std::string& name) {
  if (!halves_ || value_->cols == narrow_) return;
  why("the step has the columns of one half, and what follows needs those of both");
  materialise(name, Role::workspace, Operand(planner_.request().dtype));
}

void Flow::whole_halves(const std::string& name) {
  if (!halves_ && !totals_ && !(random_ && pass_ == Pass::forward)) return;
  why(halves_ ? "one step has one pair of halves" : "a step with totals or dropout has whole rows");
  materialise(name, Role::workspace, Operand(planner_.request().dtype));
}

void Flow::apply_row(std::function<Expr(Assembly&, Expr)> f) {
  touch();
  totals_ = true;
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = value_->cols;
  lazy->make = [f = std::move(f), in = value_](Assembly& a, const ColumnMap& columns) {
    (void)columns;  // totals exist only at the step's own columns
    return f(a, a.at(in, {}));
  };
  value_ = lazy;
}

void Flow::gate(const std::array<ColumnMap, 2>& halves,
                std::function<Expr(Assembly&, Expr, Expr)> f) {
  touch();
  halves_ = halves;
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = value_->cols / 2;
  narrow_ = lazy->cols;
  lazy->make = [f = std::move(f), in = value_, halves](Assembly& a, const ColumnMap&) {
    return f(a, a.at(in, halves[0]), a.at(in, halves[1]));
  };
  value_ = lazy;
}

void Flow::ungate(const std::array<ColumnMap, 2>& halves,
                  std::function<std::array<Expr, 2>(Assembly&, Expr)> f) {
  touch();
  halves_ = halves;
  narrow_ = value_->cols;
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = value_->cols * 2;
  lazy->make = [f = std::move(f), in = value_, halves](Assembly& a, const ColumnMap& columns) {
    return f(a, a.at(in, {}))[columns == halves[0] ? 0 : 1];
  };
  value_ = lazy;
}

void Flow::product(const StoredTensor& a, Orientation ao, bool a_transposed, const StoredTensor& b,
                   Orientation bo, bool b_transposed, int64_t cols, int64_t inner, Factor rows,
                   bool fast) {
  ops_.clear();
  touch();
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = cols;
  lazy->make = [](Assembly& as, const ColumnMap& columns) { return as.product(columns); };
  value_ = lazy;
  rows_ = rows;
  narrow_ = cols;
  halves_.reset();
  stored_.clear();
  random_ = totals_ = false;
  ++serial_;
  gemm_ = Product{&a,
                  &b,
                  {{0, a.operand.format, ao, a_transposed},
                   {0, b.operand.format, bo, b_transposed},
                   cols,
                   inner,
                   fast}};
}

Pieces Flow::pieces(Assembly& a, const Value& v) const {
  if (v->cols == narrow_) return {{a.at(v, {}), {}}};
  Pieces list;
  for (const ColumnMap& m : *halves_) list.push_back({a.at(v, m), m});
  return list;
}

void Flow::store(const Value& v, const StoredTensor& to) {
  stored_.emplace_back(v, &to);
  side([this, v, &to](Assembly& a) { a.store(to, pieces(a, v)); });
}

const StoredTensor* Flow::stored(const Value& v, DType dtype) const {
  for (const auto& [value, tensor] : stored_)
    if (value == v && tensor->operand.format == Operand(dtype).format) return tensor;
  return nullptr;
}

const StoredTensor* Flow::adopt(const std::string& name, Role role, bool encoded) {
  if (!value_->stored || value_->stored->plain() == encoded || !sides_.empty()) return nullptr;
  const StoredTensor& seen = *value_->stored;
  std::vector<Buffer>& buffers = planner_.data().buffers;
  const auto at = [&](int buffer) -> Buffer& { return buffers[static_cast<size_t>(buffer)]; };
  const int first = seen.row_data == kNoBuffer ? seen.col_data : seen.row_data;
  if (at(first).role != Role::workspace) return nullptr;
  for (PlanStep& s : planner_.steps(pass_))
    for (PlanStep::Write& w : s.writes)
      if (w.name == seen.name) w.name = name;
  for (const int part : {seen.row_data, seen.row_scale, seen.col_data, seen.col_scale}) {
    if (part == kNoBuffer) continue;
    at(part).role = role;
    at(part).name.replace(0, seen.name.size(), name);
  }
  if (encoded) {
    // Only the plan's own transposed codes have padded rows.
    if (seen.col_data != kNoBuffer) at(seen.col_data).rows.round = 1;
    return &seen;
  }
  // The caller sees the shape of the value. It differs from the shape of the buffer after a
  // reshape.
  at(first).cols = seen.cols;
  at(first).rows =
      seen.rows.fixed ? RowCount{0, 1, 1, seen.rows.fixed} : RowCount{seen.rows.mul, seen.rows.div};
  return &seen;
}

const StoredTensor& Flow::keep(const Value& v, const Operand& as, Role role,
                               const std::string& name) {
  // A tensor in memory is used unchanged, encoded or not.
  if (v->stored && as.plain()) return *v->stored;
  if (as.plain())
    if (const StoredTensor* const there = stored(v, as.format.dtype)) return *there;
  const StoredTensor& to = planner_.tensor(name, role, as, v->cols, rows_);
  if (as.plain())
    store(v, to);
  else
    side([this, v, &to](Assembly& a) { a.store(to, pieces(a, v)); });
  return to;
}

void Flow::emit(const std::function<void(Assembly&)>& body, const char* alone) {
  std::string name;
  for (const size_t op : ops_) {
    const std::string part = planner_.data().chain[op].name;
    name += (name.empty() ? "" : "+") + part;
  }
  if (name.empty()) {
    ops_.push_back(op_);
    name = alone;
  }
  if (pass_ == Pass::backward) name += ".bwd";
  Assembly a(name, narrow_, planner_.request().options.precision);
  std::optional<Gemm> gemm;
  int64_t fixed = 0;
  if (gemm_) {
    gemm = gemm_->gemm;
    gemm->a.arg = a.matrix(*gemm_->a, gemm->a.orientation);
    gemm->b.arg = a.matrix(*gemm_->b, gemm->b.orientation);
    fixed = rows_.fixed;
  }
  for (const Side& s : sides_) s(a);
  body(a);
  PlanStep made = a.finish(gemm, fixed);
  made.rows = gemm && gemm->inner == 0 ? gemm_->b->rows : rows_;
  made.step.dtype = planner_.request().dtype;
  made.ops = ops_;
  made.why = why_;
  if (random_ || std::ranges::any_of(made.step.loads,
                                     [](const Load& l) { return l.from == Load::From::random; }))
    made.random = planner_.data().saved_rng;
  try {
    planner_.take(pass_, std::move(made));
  } catch (const Error& e) {
    if (e.code() != Code::unsupported || ops_.size() < 2) throw;
    // Cut the step after its head if it has one, else in the middle.
    const size_t at = gemm_ ? ops_[1] : ops_[ops_.size() / 2];
    throw StepRefused{{pass_, at, e.what()}};
  }
  sides_.clear();
}

void Flow::close(const StoredTensor& to) {
  const StoredTensor* const from = value_->stored;
  const char* alone = "quantize";
  if (to.plain() && from)
    alone = !from->plain() ? "decode" : from->operand.format == to.operand.format ? "copy" : "cast";
  if (to.plain()) stored_.emplace_back(value_, &to);
  emit([&](Assembly& a) { a.store(to, pieces(a, value_)); }, alone);
  begin(to);
  later_now();
}

void Flow::finish() {
  if (sides_.empty()) return later_now();
  emit([](Assembly&) {});
  later_now();
}

void Flow::later_now() {
  for (const auto& emit : std::exchange(later_, {})) emit();
}

const StoredTensor& Flow::materialise(const std::string& name, Role role, const Operand& as) {
  if (value_->stored && holds(*value_->stored, as)) {
    const StoredTensor& there = *value_->stored;
    finish();
    begin(there);
    return there;
  }
  if (const StoredTensor* const there = as.plain() ? stored(value_, as.format.dtype) : nullptr) {
    finish();
    begin(*there);
    return *there;
  }
  if (!info(as.format.scaling).reads_amax()) {
    const StoredTensor& to = planner_.tensor(name, role, as, value_->cols, rows_);
    close(to);
    return to;
  }
  // Current scaling needs the amax first. If the tensor is in memory, a step reads it to find the
  // amax. Otherwise a step stores the plain value and finds the amax of the stored value.
  const Operand plain(planner_.request().dtype);
  const StoredTensor& encoded = planner_.tensor(name, role, as, value_->cols, rows_);
  const bool in_memory = value_->stored != nullptr;
  const int amax = encoded.scale;
  if (in_memory) {
    emit([&](Assembly& a) { a.store_amax(encoded, amax, pieces(a, value_), false); });
  } else {
    value_ = rounded(value_, planner_.request().dtype);
    sides_.push_back([this, v = value_, &encoded, amax](Assembly& a) {
      a.store_amax(encoded, amax, pieces(a, v), false);
    });
    why("current scaling needs the amax first, so the value is stored as it is on the way");
    close(planner_.tensor(name + ".plain", Role::workspace, plain, value_->cols, rows_));
  }
  const StoredTensor& source = *value_->stored;
  begin(source);
  close(encoded);
  return encoded;
}

}  // namespace tenon
