// Builds the loads and stores of encoded operands.
#include "lazy/builder.h"

#include <algorithm>

namespace tenon {

Expr StepBuilder::load(const Operand& o, uint32_t arg, const ColumnMap& columns) {
  const OperandLoads loads = loads_of(o, arg, columns);
  const Expr code = load(loads.codes);
  return loads.scale ? code * load(*loads.scale) : code;
}

void StepBuilder::store(const Operand& o, uint32_t arg, uint32_t scale, int64_t cols,
                        std::span<const Piece> pieces) {
  Encoder e{.format = o.format,
            .cols = cols,
            .out = arg,
            .scale = scale,
            .rowwise = o.rowwise,
            .columnwise = o.columnwise,
            .counts = o.counts};
  if (o.format.scaling == Scaling::none && o.rowwise) {
    for (const Piece& p : pieces)
      store({Store::To::tile, arg + Encoder::row_data, o.format.dtype, p.columns}, p.value);
    e.rowwise = false;
  }
  if (!e.rowwise && !e.columnwise) return;
  const auto number = static_cast<uint32_t>(step_.encoders.size());
  for (const Piece& p : pieces)
    store({Store::To::encoded, number, o.format.dtype, p.columns}, p.value);
  step_.encoders.push_back(e);
}

void StepBuilder::norm_grad(size_t op, const NormGrad::Nodes& nodes) {
  const auto is_op = [&](const auto& said) { return said.first == op; };
  const auto at = std::ranges::find_if(norm_grads_, is_op);
  if (at == norm_grads_.end()) {
    norm_grads_.emplace_back(op, nodes);
    return;
  }
  const auto from = nodes_of(nodes);
  const auto to = nodes_of(at->second);
  for (size_t i = 0; i < to.size(); ++i)
    if (*from[i] != kNoNode) *to[i] = *from[i];
}

Head StepBuilder::norm_head() {
  if (!norm_grads_.empty()) {
    NormGrad head{totals_, {}};
    for (const auto& [op, nodes] : norm_grads_) head.norms.push_back(nodes);
    return head;
  }
  if (!norms_.empty() || !totals_.empty()) return Norm{totals_, norms_};
  return Map{};
}

Step StepBuilder::finish() {
  step_.head = norm_head();
  step_.graph = std::move(graph_);
  step_.drop_unused_loads();
  return std::move(step_);
}

}  // namespace tenon
