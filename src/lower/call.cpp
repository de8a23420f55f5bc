// Maps the views of a call to tensors, and the views of a step to the caller's view numbers.
#include "lower/call.h"

#include <cassert>

namespace tenon {

namespace {

PlanRequest request_of(const CallSettings& s) {
  PlanRequest r;
  r.dtype = s.dtype;
  r.options.precision = s.precision;
  r.options.rounding = s.rounding;
  return r;
}

// The caller's number of a view. In a call it replaces the buffer number.
uint32_t number_of(const std::vector<BufferView>& views, uint32_t arg) {
  assert(views[arg].buffer != kNoBuffer);
  return static_cast<uint32_t>(views[arg].buffer);
}

// The first view of an encoder. At least one of its first four views is present.
uint32_t first_of(const std::vector<BufferView>& views, uint32_t arg) {
  uint32_t i = 0;
  while (views[arg + i].buffer == kNoBuffer) ++i;
  return number_of(views, arg + i) - i;
}

}  // namespace

Call::Call(const CallSettings& settings)
    : Planner({}, request_of(settings), {}), name_(settings.name) {
  data().chain.push_back({.name = name_});  // owner of steps to which no op adds
  // A call without results has an empty step.
  step_.name = name_;
  step_.graph = std::make_shared<Graph>();
  step_.precision = settings.precision;
}

const StoredTensor& Call::in(const Operand& o, uint32_t view, int64_t cols) {
  const auto data = static_cast<int>(view + in_data), scale = static_cast<int>(view + in_scale_inv);
  StoredTensor p{.operand = o, .cols = cols};
  const bool row = o.read() == Orientation::rowwise;
  (row ? p.row_data : p.col_data) = data;
  if (o.format.scaling != Scaling::none) (row ? p.row_scale : p.col_scale) = scale;
  return given(std::move(p));
}

const StoredTensor& Call::out(const Operand& o, uint32_t view, int64_t cols) {
  const auto at = [&](bool has, Encoder::Out part) {
    return has ? static_cast<int>(view + part) : kNoBuffer;
  };
  const bool scaled = o.format.scaling != Scaling::none;
  return given({.operand = o,
                .cols = cols,
                .row_data = at(o.rowwise, Encoder::row_data),
                .row_scale = at(o.rowwise && scaled, Encoder::row_scale),
                .col_data = at(o.columnwise, Encoder::column_data),
                .col_scale = at(o.columnwise && scaled, Encoder::column_scale),
                .health = at(o.counts, Encoder::health)});
}

const StoredTensor& Call::out(const Operand& o, uint32_t view, int64_t cols, uint32_t scale) {
  StoredTensor p = out(o, view, cols);
  if (info(o.format.scaling).reads_scale) p.scale = static_cast<int>(scale);
  return given(std::move(p));
}

OpState& Call::op(int64_t cols, int64_t out_cols) {
  OpState& o = ops_.emplace_back();
  o.index = ops_.size() - 1;
  o.cols = cols;
  o.out_cols = out_cols;
  data().chain.push_back({.name = name_});
  return o;
}

Stage& Call::extend(OpState& op, const Extension& e) {
  stages_.push_back(std::visit([&](const auto& x) { return make_stage(*this, op, x); }, e));
  Stage& stage = *stages_.back();
  stage.prepare(true, nullptr);
  return stage;
}

void Call::parameter(OpState& op, const StoredTensor* value, const StoredTensor* grad) {
  op.parameters.push_back({.value = value, .grad = grad, .request = {}});
}

void Call::take(Pass /*pass*/, PlanStep made) {
  step_ = std::move(made.step);
  step_.name = name_;
  for (Load& l : step_.loads) {
    if (l.from == Load::From::parameter)
      l.arg = static_cast<uint32_t>(made.parameters[l.arg]);
    else if (reads_view(l))
      l.arg = number_of(made.in, l.arg);
  }
  for (Store& s : step_.stores)
    if (s.to != Store::To::encoded) s.arg = number_of(made.out, s.arg);
  for (Encoder& e : step_.encoders) {
    e.out = first_of(made.out, e.out);
    if (info(e.format.scaling).reads_scale) e.scale = number_of(made.in, e.scale);
  }
}

void store_amax(Assembly& a, uint32_t view, const Pieces& pieces, bool join) {
  const StoredTensor one{.operand = DType::f32, .cols = 1};
  a.store_amax(one, static_cast<int>(view), pieces, join);
}

}  // namespace tenon
