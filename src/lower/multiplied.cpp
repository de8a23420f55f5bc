// Lowers matrix products: operands in the recipe's format, one product forward, two backward.
#include <utility>

#include "lower/stage.h"

namespace tenon {

namespace {

class MultipliedStage final : public Stage {
 public:
  MultipliedStage(Planner& planner, OpState& op) : Stage(planner, op), weight_(op.parameters[0]) {}
  [[nodiscard]] bool trains() const override { return weight_.grad != nullptr; }
  void prepare(bool needs_input, const Stage* before) override {
    again_ = needs_input && before && before->again() ? before : nullptr;
  }

  void forward(Flow& flow) override {
    const PlanRequest& r = planner_.request();
    const bool train = weight_.grad != nullptr;
    const bool kept = train && !again_;
    // Encodes the columnwise form only if the backward pass reads it.
    const bool quantised = op_.recipe.input.scaling != Scaling::none;
    x_ = &flow.materialise(op_.name + (quantised ? ".x" : ".in"), Role::workspace,
                           input(true, kept));
    w_ = weight_.value;
    if (op_.recipe.weight.scaling != Scaling::none) w_ = &encode_weight(Pass::forward, true);
    flow.product(*x_, Orientation::rowwise, false, *w_, Orientation::rowwise, true, op_.out_cols,
                 op_.cols, flow.rows());
    if (r.options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return leaving(e); });
  }

  void backward(Flow& flow, bool needs_input) override {
    const PlanRequest& r = planner_.request();
    const bool train = weight_.grad != nullptr;
    const Operand as = operand(planner_, op_.recipe.gradient, needs_input, train);
    const Factor rows = flow.rows();
    const StoredTensor& dy = flow.materialise(op_.name + ".dy", Role::workspace, as);
    if (train && again_) {
      // The open step recomputes x. The product for the weight gradient waits until that step is
      // closed.
      first_ = std::exchange(x_, nullptr);
      pending_ = true;
      flow.later([this, &dy] { weight_gradient(dy); });
    } else if (train) {
      weight_gradient(dy);  // first, so that the memory of x is free early
    }
    if (!needs_input) {
      flow.later_now();
      return;
    }
    const StoredTensor& w = weight_columns();
    flow.product(dy, Orientation::rowwise, false, w, columns_of(w), false, op_.cols, op_.out_cols,
                 rows);
    if (r.options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return leaving_backward(e); });
    if (!pending_) return;
    // The step of the previous op's gradient also recomputes x, from the same loads.
    x_ = &planner_.tensor(op_.name + ".x.again", Role::workspace, input(false, true), op_.cols,
                          rows, first_);
    Value y = again_->again();
    // The forward pass computed the amax of the stored, rounded value. Round here too.
    if (info(op_.recipe.input.scaling).reads_amax()) y = rounded(y, r.dtype);
    flow.side([&flow, this, y](Assembly& a) { a.store(*x_, flow.pieces(a, y)); });
    flow.why(x_->name + " is computed again, as " + std::string(kKeeps[2]) + " asks");
  }

 private:
  // The encoding that a product along the columns of a tensor reads.
  [[nodiscard]] Orientation columns_of(const StoredTensor& t) const {
    return two_encodings(planner_, t.operand.format) ? Orientation::columnwise
                                                     : Orientation::rowwise;
  }
  Operand input(bool row, bool column) const {
    return operand(planner_, op_.recipe.input, row, column);
  }

  // Encodes the weight in the recipe's format, in steps that run only after the weights changed.
  const StoredTensor& encode_weight(Pass pass, bool row) {
    Flow quantise(planner_, pass);
    quantise.begin(*weight_.value);
    quantise.op(op_.index);
    const size_t before = planner_.steps(pass).size();
    const Operand as = encoded(planner_, op_.recipe.weight, row, !row);
    const StoredTensor* made = nullptr;
    if (row) {
      made = &quantise.materialise(op_.name + ".w", Role::state, as);
    } else {
      made = &planner_.tensor(op_.name + ".w", Role::state, as, op_.cols, w_->rows, w_);
      quantise.close(*made);
    }
    for (size_t i = before; i < planner_.steps(pass).size(); ++i)
      planner_.steps(pass)[i].weights = true;
    return *made;
  }

  // The weight as the gradient of the input reads it. The backward pass encodes it: codes that the
  // forward pass makes would need memory between the passes.
  const StoredTensor& weight_columns() {
    if (w_->plain() || columns_of(*w_) == Orientation::rowwise) return *w_;
    return encode_weight(Pass::backward, false);
  }

  void weight_gradient(const StoredTensor& dy) {
    Flow flow(planner_, Pass::backward);
    flow.op(op_.index);
    flow.product(dy, columns_of(dy), true, *x_, columns_of(*x_), false, op_.cols, 0,
                 {.fixed = op_.out_cols});
    const StoredTensor* grad = weight_.grad;
    if (weight_.request.accumulate)
      flow.apply([grad](Assembly& a, Expr e, const ColumnMap& m) { return a.load(*grad, m) + e; });
    flow.close(*grad);
  }

  const ParameterTensor& weight_;
  const Stage* again_ = nullptr;  // recomputes x, if x was not saved
  bool pending_ = false;
  const StoredTensor* x_ = nullptr;
  const StoredTensor* first_ = nullptr;  // x of the forward pass, if x is recomputed
  const StoredTensor* w_ = nullptr;
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Multiplied& /*e*/) {
  return std::make_unique<MultipliedStage>(planner, op);
}

}  // namespace tenon
