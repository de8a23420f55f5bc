// Tensors and buffers of a plan during lowering.
#include "lower/planner.h"

#include "lower/append.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// The rows of a scale tensor as a function of the rows of the input.
RowCount scale_rows(const Format& f, Orientation o, const Factor& rows) {
  const Blocks b = f.blocks(o);
  if (b.single()) return {0, 1, 1, 1};
  const bool inside = b.transposed;
  const Shape one = f.scale_shape(1, 1, o);
  return {rows.mul, rows.div * b.rows, inside ? one.cols : one.rows, 0};
}

}  // namespace

Planner::Planner(Chain chain, const PlanRequest& request, std::vector<Cut> cuts)
    : data_(std::make_shared<PlanData>()), cuts_(std::move(cuts)) {
  data_->chain = std::move(chain);
  data_->request = request;
  data_->target = &target_of(request);
  // A cached plan serves callers with other streams and memory.
  data_->request.options = {.precision = request.options.precision,
                            .rounding = request.options.rounding,
                            .device = data_->target->device};
}

const Cut* Planner::cut(Pass pass, size_t op) const {
  for (const Cut& c : cuts_)
    if (c.pass == pass && c.op == op) return &c;
  return nullptr;
}

// Ops with equal names differ by their position, or by a label of the user.
std::string Planner::op_name(size_t op) const {
  const Op& o = data_->chain[op];
  if (!o.label.empty()) return o.label;
  return str(o.name, op);
}

void Planner::take(Pass pass, PlanStep step) { append(*this, pass, std::move(step)); }

uint32_t Planner::random_stream() {
  PlanData& d = *data_;
  if (d.rng == kNoBuffer) {
    Buffer state{.name = "rng", .role = Role::rng, .rows = {0, 1, 1, 5}, .cols = 1, .random = true};
    d.rng = buffer(state);
    state.name = "rng.saved";
    state.role = Role::saved;
    d.saved_rng = buffer(state);
  }
  return static_cast<uint32_t>(d.dropouts++);
}

int Planner::buffer(Buffer b) {
  static_cast<void>(b.bytes(0));  // throws if a parameter is too large
  data_->buffers.push_back(std::move(b));
  data_->same_as.push_back(kNoBuffer);
  return static_cast<int>(data_->buffers.size() - 1);
}

const StoredTensor& Planner::tensor(const std::string& name, Role role, const Operand& as,
                                    int64_t cols, Factor rows, const StoredTensor* first) {
  StoredTensor p{.name = name, .operand = as, .cols = cols, .rows = rows};
  const Format& f = as.format;
  const bool given = role == Role::input || role == Role::param;
  const RowCount count = rows.fixed ? RowCount{0, 1, 1, rows.fixed} : RowCount{rows.mul, rows.div};
  const auto add = [&](Orientation o, bool has, int& data, int& scale) {
    if (!has) return;
    const bool turned = o == Orientation::columnwise && info(f.scaling).transposes;
    const std::string side = o == Orientation::columnwise ? ".t" : "";
    Buffer b{.name = name + side,
             .role = role,
             .dtype = f.dtype,
             .rows = count,
             .cols = cols,
             .rows_inside = turned};
    if (turned && !rows.fixed && !given) b.rows.round = 16;
    data = buffer(b);
    if (f.scaling == Scaling::none) return;
    b.name += ".scale_inv";
    b.dtype = info(f.scaling).scale;
    b.rows_inside = f.blocks(o).transposed;
    const Shape one = f.scale_shape(rows.fixed ? rows.fixed : 1, cols, o);
    b.rows = rows.fixed ? RowCount{0, 1, 1, b.rows_inside ? one.cols : one.rows}
                        : scale_rows(f, o, rows);
    b.cols = b.rows_inside ? one.rows : one.cols;
    scale = buffer(b);
  };
  add(Orientation::rowwise, as.rowwise, p.row_data, p.row_scale);
  add(Orientation::columnwise, as.columnwise, p.col_data, p.col_scale);
  const Buffer number{.name = name, .dtype = DType::f32, .rows = {0, 1, 1, 1}, .cols = 1};
  if (given) return tensors_.emplace_back(std::move(p));
  if (first) {
    p.scale = first->scale;
  } else if (info(f.scaling).scale_given) {
    Buffer b = number;
    b.role = Role::state;
    b.name = name + ".scale";
    p.scale = buffer(b);
    b.name = name + ".amax";
    p.amax = buffer(b);
  } else if (info(f.scaling).reads_amax()) {
    Buffer b = number;
    b.role = role == Role::state ? Role::state : Role::workspace;
    b.name = name + ".amax";
    p.scale = buffer(b);
  }
  return tensors_.emplace_back(std::move(p));
}

bool Planner::shares(const StoredTensor& to, const StoredTensor& of) {
  const auto number = static_cast<size_t>(to.row_data);
  if (!of.plain() || to.row_data == kNoBuffer || of.row_data == kNoBuffer) return false;
  const Buffer& mine = data_->buffers[number];
  const Buffer& other = data_->buffers[static_cast<size_t>(of.row_data)];
  if (other.role != Role::input && other.role != Role::grad) return false;
  if (mine.dtype != other.dtype || mine.cols != other.cols || mine.rows != other.rows) return false;
  data_->same_as[number] = of.row_data;
  return true;
}

const StoredTensor& Planner::alias(const StoredTensor& of, int64_t cols, Factor rows) {
  StoredTensor p = of;
  p.cols = cols;
  p.rows = rows;
  return tensors_.emplace_back(std::move(p));
}

}  // namespace tenon
