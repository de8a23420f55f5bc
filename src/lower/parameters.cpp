// Parameters, their gradients, and the formats of operands.
#include "lower/parameters.h"

#include "tenon/error.h"

namespace tenon {

ParameterTensor ParameterTensor::make(Planner& planner, const std::string& name, int64_t rows,
                                      int64_t cols, const Initial& initial,
                                      const std::optional<GivenEncoding>& encoding) {
  const PlanRequest& r = planner.request();
  const size_t number = planner.data().parameters++;
  DType dtype = r.parameter_dtype.value_or(r.dtype);
  if (number < r.parameter_dtypes.size()) dtype = r.parameter_dtypes[number].value_or(dtype);
  ParameterTensor made;
  if (number < r.parameter_grads.size()) made.request = r.parameter_grads[number];
  if (!r.backward) made.request.wanted = false;
  const Operand as = encoding ? operand(*encoding) : Operand(dtype);
  made.value = &planner.tensor(name, Role::param, as, cols, {.fixed = rows});
  if (!encoding)
    planner.data().buffers[static_cast<size_t>(made.value->row_data)].initial = initial;
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

bool reads_columnwise(const Planner& planner, const Format& f, const Format& other) {
  // A plain matrix has no blocks along its columns, so rowwise codes are as good.
  if (f.scaling == Scaling::none || other.scaling == Scaling::none) return false;
  const Target& target = planner.target();
  const bool native = planner.request().options.precision == Precision::native;
  const bool multiplied =
      target.codes_refusal(f, other).empty() || target.codes_refusal(other, f).empty();
  if (native && multiplied && target.fp8_inner_contiguous()) return true;
  const Blocks row = f.blocks(Orientation::rowwise), col = f.blocks(Orientation::columnwise);
  if (row.rows == col.rows && row.cols == col.cols) return false;
  return !native || multiplied || target.reads_transposed_codes() || !info(f.scaling).transposes;
}

Operand operand(const Planner& planner, const Format& f, bool row, bool column) {
  if (f.scaling == Scaling::none) return planner.request().dtype;
  Operand o;
  o.format = f;
  o.format.swizzled = f.scaling == Scaling::mxfp8 && planner.target().mxfp8_products() &&
                      planner.request().options.precision == Precision::native;
  o.rowwise = row || !column;
  o.columnwise = column;
  return o;
}

Operand operand(const GivenEncoding& given) {
  Operand o;
  o.format = given.format;
  o.rowwise = given.rowwise;
  o.columnwise = given.columnwise;
  return o;
}

}  // namespace tenon
