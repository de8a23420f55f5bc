// Collects the loads and stores of a step.
#pragma once

#include <string>
#include <utility>

#include "step/operand.h"
#include "step/step.h"

namespace tenon {

// A value, and the columns of a tensor that it fills. A tensor of two halves has two pieces.
struct Piece {
  Expr value;
  ColumnMap columns;
};
using Pieces = std::vector<Piece>;

class StepBuilder {
 public:
  StepBuilder(std::string name, int64_t cols, Precision precision) {
    step_.name = std::move(name);
    step_.cols = cols;
    step_.precision = precision;
  }

  Expr load(const Load& l) {
    step_.loads.push_back(l);
    return graph_->load(static_cast<uint32_t>(step_.loads.size() - 1));
  }

  void store(Store s, Expr value) {
    s.value = graph_->id(value);
    step_.stores.push_back(s);
  }

  // The tree sum of a value over its row.
  Expr total(Expr value) {
    totals_.push_back(graph_->id(value));
    return load({.from = Load::From::total, .arg = static_cast<uint32_t>(totals_.size() - 1)});
  }

  // Record the nodes of a norm, forward or backward. They form the head of the step. Nodes of one
  // `op`'s gradient are merged. Nodes that no store needs are removed.
  void norm(const Norm::Nodes& nodes) { norms_.push_back(nodes); }
  void norm_grad(size_t op, const NormGrad::Nodes& nodes);

  // An element of an operand whose views start at `arg`: the code times its scale.
  Expr load(const Operand& o, uint32_t arg, const ColumnMap& columns);

  // Stores one value per column map. All values belong to one tensor of `cols` columns whose views
  // start at `arg`. `scale` is the input view with the multiplier (delayed) or the amax (current).
  void store(const Operand& o, uint32_t arg, uint32_t scale, int64_t cols,
             std::span<const Piece> pieces);

  // A constant formula has no graph. Its gradients are zero.
  std::vector<Expr> grad(Expr out, Expr seed, std::span<const Expr> wrt) {
    return tenon::grad({graph_.get(), graph_->id(out)}, seed, wrt);
  }

  // Removes loads that no store needs: a derivative may not read all inputs.
  Step finish();

 private:
  [[nodiscard]] Head norm_head();  // with node numbers from before the removal

  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  Step step_;
  std::vector<uint32_t> totals_;
  std::vector<Norm::Nodes> norms_;
  std::vector<std::pair<size_t, NormGrad::Nodes>> norm_grads_;
};

}  // namespace tenon
