// Parameters, their gradients, and the formats of operands.
#include "lower/parameters.h"

#include <algorithm>

#include "tenon/error.h"

namespace tenon {

ParameterTensor ParameterTensor::make(Planner& planner, const std::string& name, int64_t rows,
                                      int64_t cols, const Initial& initial) {
  const PlanRequest& r = planner.request();
  std::vector<Buffer>& buffers = planner.data().buffers;
  const auto number = static_cast<size_t>(std::ranges::count(buffers, Role::param, &Buffer::role));
  DType dtype = r.parameter_dtype.value_or(r.dtype);
  if (number < r.parameter_dtypes.size()) dtype = r.parameter_dtypes[number].value_or(dtype);
  ParameterTensor made;
  if (number < r.parameter_grads.size()) made.request = r.parameter_grads[number];
  if (!r.backward) made.request.wanted = false;
  made.value = &planner.tensor(name, Role::param, Operand(dtype), cols, {.fixed = rows});
  buffers[static_cast<size_t>(made.value->row_data)].initial = initial;
  if (made.request.wanted)
    made.grad = &planner.tensor("d" + name, Role::grad, Operand(made.request.dtype.value_or(dtype)),
                                cols, {.fixed = rows});
  return made;
}

void sum_into(Planner& planner, Flow& flow, size_t op, const ParameterTensor& p, const Value& v,
              bool ordered) {
  if (!p.grad) return;
  const StoredTensor* to = p.grad;
  if (p.request.accumulate)
    to = &planner.tensor(p.grad->name + ".sum", Role::workspace, Operand(DType::f32), p.grad->cols,
                         {.fixed = 1});
  flow.side([&flow, to, v, ordered](Assembly& a) {
    for (const Piece& piece : flow.pieces(a, v))
      a.store_columns_sum(*to, piece.columns, piece.value, ordered);
  });
  if (to == p.grad) return;
  flow.later([&planner, op, to, grad = p.grad] {
    // A second step adds the complete sum to the gradient once.
    Flow add(planner, Pass::backward);
    add.op(op);
    add.begin(*to);
    add.apply([grad](Assembly& a, Expr e, const ColumnMap& m) { return a.load(*grad, m) + e; });
    add.close(*grad);
  });
}

bool two_encodings(const Planner& planner, const Format& f) {
  if (f.scaling == Scaling::none) return false;
  const Blocks row = f.blocks(Orientation::rowwise), col = f.blocks(Orientation::columnwise);
  if (row.rows != col.rows || row.cols != col.cols) return true;
  return planner.request().options.precision == Precision::native &&
         planner.target().fp8_inner_contiguous();
}

Operand operand(const Planner& planner, const Format& f, bool row, bool column) {
  if (f.scaling == Scaling::none) return planner.request().dtype;
  return encoded(planner, f, row, column);
}

Operand encoded(const Planner& planner, const Format& f, bool row, bool column) {
  const bool two = two_encodings(planner, f);
  Operand o;
  o.format = f;
  o.rowwise = row || !two;
  o.columnwise = column && two;
  return o;
}

}  // namespace tenon
