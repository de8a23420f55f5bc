// Builds one step from lazy values.
#include "lower/assembly.h"

#include <algorithm>

namespace tenon {

namespace {

bool same(const Load& a, const Load& b) {
  return a.from == b.from && a.arg == b.arg && a.dtype == b.dtype && a.columns == b.columns &&
         a.transposed == b.transposed && a.format == b.format && a.orientation == b.orientation;
}

BufferView scale_view(const StoredTensor& p, Orientation o) {
  const int buffer = o == Orientation::rowwise ? p.row_scale : p.col_scale;
  if (buffer == kNoBuffer) return {};
  return {BufferView::Form::scale, buffer, p.operand.format, o, p.cols, p.rows};
}

BufferView scalar_view(int buffer) {
  if (buffer == kNoBuffer) return {};
  return {.form = BufferView::Form::scalar, .buffer = buffer, .cols = 1};
}

}  // namespace

Value in_memory(const StoredTensor& tensor) {
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = tensor.cols;
  lazy->stored = &tensor;
  lazy->make = [&tensor](Assembly& a, const ColumnMap& m) { return a.load(tensor, m); };
  return lazy;
}

Value rounded(const Value& value, DType dtype) {
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = value->cols;
  lazy->make = [value, dtype](Assembly& a, const ColumnMap& m) {
    return round(a.at(value, m), dtype);
  };
  return lazy;
}

Expr Assembly::at(const Value& value, const ColumnMap& columns) {
  const std::pair key{value.get(), std::array{columns.block, columns.stride, columns.offset}};
  if (const auto it = known_.find(key); it != known_.end()) return it->second;
  kept_.push_back(value);
  const Expr e = value->make(*this, columns);
  known_.emplace(key, e);
  return e;
}

uint32_t Assembly::input(const BufferView& view) {
  made_.in.push_back(view);
  return static_cast<uint32_t>(made_.in.size() - 1);
}

uint32_t Assembly::output(const BufferView& view) {
  made_.out.push_back(view);
  return static_cast<uint32_t>(made_.out.size() - 1);
}

Expr Assembly::once(const Load& load) {
  for (const auto& [l, e] : loads_)
    if (same(l, load)) return e;
  const Expr e = build_.load(load);
  loads_.emplace_back(load, e);
  return e;
}

uint32_t Assembly::matrix(const StoredTensor& tensor, Orientation o) {
  const BufferView data = data_view(tensor, o);
  for (uint32_t i = 0; i < made_.in.size(); ++i)
    if (made_.in[i] == data) return i;
  const uint32_t arg = input(data);
  input(scale_view(tensor, o));
  return arg;
}

Expr Assembly::load(const StoredTensor& tensor, const ColumnMap& columns) {
  const Orientation o = tensor.operand.read();
  const OperandLoads loads = loads_of(tensor.operand, matrix(tensor, o), columns);
  const Expr code = once(loads.codes);
  return loads.scale ? code * once(*loads.scale) : code;
}

Expr Assembly::row(const StoredTensor& tensor, const ColumnMap& columns) {
  return once({Load::From::row, matrix(tensor, Orientation::rowwise), tensor.operand.format.dtype,
               columns});
}

Expr Assembly::column(const StoredTensor& tensor) {
  return once(
      {Load::From::column, matrix(tensor, Orientation::rowwise), tensor.operand.format.dtype, {}});
}

Expr Assembly::scalar(const StoredTensor& tensor) {
  return once(
      {Load::From::scalar, matrix(tensor, Orientation::rowwise), tensor.operand.format.dtype, {}});
}

Expr Assembly::parameter(float value) {
  const auto equal = [&](float p) {
    return __builtin_bit_cast(uint32_t, p) == __builtin_bit_cast(uint32_t, value);
  };
  const auto at = std::ranges::find_if(made_.parameters, equal);
  const auto arg = static_cast<uint32_t>(at - made_.parameters.begin());
  if (arg == made_.parameters.size()) made_.parameters.push_back(value);
  return once({.from = Load::From::parameter, .arg = arg});
}

Expr Assembly::random(uint32_t ordinal) {
  return once({.from = Load::From::random, .arg = ordinal});
}

Expr Assembly::product(const ColumnMap& columns) {
  return once({.from = Load::From::product, .columns = columns});
}

Expr Assembly::total(Expr value) {
  for (const auto& [id, e] : totals_)
    if (id == value.id()) return e;
  const Expr e = build_.total(value);
  totals_.emplace_back(value.id(), e);
  return e;
}

void Assembly::store(const StoredTensor& tensor, std::span<const Piece> pieces) {
  const uint32_t scale = tensor.scale == kNoBuffer ? 0 : input(scalar_view(tensor.scale));
  const uint32_t arg =
      output(tensor.row_data == kNoBuffer ? BufferView{} : data_view(tensor, Orientation::rowwise));
  output(scale_view(tensor, Orientation::rowwise));
  output(tensor.col_data == kNoBuffer ? BufferView{} : data_view(tensor, Orientation::columnwise));
  output(scale_view(tensor, Orientation::columnwise));
  output(scalar_view(tensor.health));
  build_.store(tensor.operand, arg, scale, tensor.cols, pieces);
  made_.writes.push_back({tensor.name, tensor.operand});
  if (tensor.amax != kNoBuffer) store_amax(tensor, tensor.amax, pieces, true);
}

void Assembly::store_amax(const StoredTensor& tensor, int buffer, std::span<const Piece> pieces,
                          bool join) {
  Expr most = pieces[0].value;
  for (const Piece& p : pieces.subspan(1)) most = max(abs(most), abs(p.value));
  const uint32_t arg = output(scalar_view(buffer));
  build_.store({.to = Store::To::amax, .arg = arg, .dtype = DType::f32, .join = join}, most);
  made_.writes.push_back({tensor.name + ".amax", Operand(DType::f32)});
}

void Assembly::store_columns_sum(const StoredTensor& tensor, const ColumnMap& columns, Expr value,
                                 bool ordered) {
  const BufferView view = data_view(tensor, Orientation::rowwise);
  uint32_t arg = 0;
  while (arg < made_.out.size() && made_.out[arg] != view) ++arg;
  if (arg == made_.out.size()) {
    output(view);
    made_.writes.push_back({tensor.name, tensor.operand});
  }
  build_.store({.to = Store::To::column_sum,
                .arg = arg,
                .dtype = tensor.operand.format.dtype,
                .columns = columns,
                .ordered = ordered},
               value);
}

void Assembly::store_one(Store::To to, const StoredTensor& tensor, Expr value) {
  const uint32_t arg = output(data_view(tensor, Orientation::rowwise));
  build_.store({.to = to, .arg = arg, .dtype = tensor.operand.format.dtype}, value);
  made_.writes.push_back({tensor.name, tensor.operand});
}
void Assembly::store_column(const StoredTensor& tensor, Expr value) {
  store_one(Store::To::column, tensor, value);
}
void Assembly::store_row_sum(const StoredTensor& tensor, Expr value) {
  store_one(Store::To::row_sum, tensor, value);
}
void Assembly::store_sum(const StoredTensor& tensor, Expr value) {
  store_one(Store::To::sum, tensor, value);
}

PlanStep Assembly::finish(std::optional<Gemm> gemm, int64_t fixed_rows) {
  made_.step = build_.finish();
  if (gemm) made_.step.head = *gemm;
  made_.step.rows = fixed_rows;
  return std::move(made_);
}

}  // namespace tenon
