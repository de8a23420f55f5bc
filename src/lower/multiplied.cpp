// Lowers matrix products: operands in the recipe's format, one product forward, two backward.
#include <utility>

#include "lower/stage.h"

namespace tenon {

namespace {

class MultipliedStage final : public Stage {
 public:
  MultipliedStage(Planner& planner, OpState& op, bool fast)
      : Stage(planner, op), weight_(op.parameters[0]), fast_(fast) {}
  [[nodiscard]] bool trains() const override { return weight_.grad != nullptr; }
  void prepare(bool needs_input, const Stage* before) override {
    again_ = needs_input && before && before->again() ? before : nullptr;
  }

  void forward(Flow& flow) override {
    const PlanRequest& r = planner_.request();
    const bool train = weight_.grad != nullptr;
    const bool kept = train && !again_;
    const bool quantised = op_.recipe.input.scaling != Scaling::none;
    const StoredTensor* const given = flow.value()->stored;
    const bool has_codes = given && planner_.is_given_encoded(*given);
    x_ = &flow.materialise(op_.name + (quantised ? ".x" : ".in"), Role::workspace,
                           has_codes ? given->operand : input(true, kept));
    w_ = weight_.value;
    if (w_->plain() && op_.recipe.weight.scaling != Scaling::none)
      w_ = &encoded_weight(Pass::forward, operand(planner_, op_.recipe.weight, true, false));
    else if (narrows())
      w_ = &encoded_weight(Pass::forward, r.dtype);
    flow.product(*x_, x_->operand.read(), false, *w_, w_->operand.read(), true, op_.out_cols,
                 op_.cols, flow.rows(), fast(*x_, *w_));
    if (r.options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return leaving(e); });
  }

  void backward(Flow& flow, bool needs_input) override {
    const PlanRequest& r = planner_.request();
    const bool train = weight_.grad != nullptr;
    const bool column = train && (again_ || x_->operand.columnwise) &&
                        reads_columnwise(planner_, op_.recipe.gradient, x_->operand.format);
    const Operand as = operand(planner_, op_.recipe.gradient, needs_input, column);
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
    flow.product(dy, Orientation::rowwise, false, w, columns_of(w, dy), false, op_.cols,
                 op_.out_cols, rows, fast(dy, w));
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
  // The encoding that a product with `other` along the columns of a tensor reads.
  [[nodiscard]] Orientation columns_of(const StoredTensor& t, const StoredTensor& other) const {
    const bool column = reads_columnwise(planner_, t.operand.format, other.operand.format);
    return column && t.operand.columnwise ? Orientation::columnwise : t.operand.read();
  }
  // The columnwise encoding of x is made only if the backward pass reads it.
  [[nodiscard]] Operand input(bool row, bool train) const {
    const bool column = train && reads_columnwise(planner_, op_.recipe.input, op_.recipe.gradient);
    return operand(planner_, op_.recipe.input, row, column);
  }

  // Only products of two FP8 tensors have a faster sum.
  [[nodiscard]] bool fast(const StoredTensor& a, const StoredTensor& b) const {
    return fast_ && !a.plain() && !b.plain() &&
           planner_.request().options.precision == Precision::native;
  }

  // Whether the weight is cast to the dtype of the chain before it is multiplied. Strict and f32
  // chains multiply its own numbers.
  [[nodiscard]] bool narrows() const {
    const PlanRequest& r = planner_.request();
    const DType from = weight_.value->operand.format.dtype;
    return info(from).plain && from != r.dtype && r.dtype != DType::f32 &&
           r.options.precision == Precision::native;
  }

  // The weight in another format or dtype, made by steps that run only after the weights changed.
  const StoredTensor& encoded_weight(Pass pass, const Operand& as) {
    Flow quantise(planner_, pass);
    quantise.begin(*weight_.value);
    quantise.op(op_.index);
    const size_t before = planner_.steps(pass).size();
    const StoredTensor* made = nullptr;
    if (pass == Pass::forward) {
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
    const bool column = reads_columnwise(planner_, w_->operand.format, op_.recipe.gradient);
    if (w_ == weight_.value || !column) return *w_;
    return encoded_weight(Pass::backward, operand(planner_, op_.recipe.weight, false, true));
  }

  void weight_gradient(const StoredTensor& dy) {
    Flow flow(planner_, Pass::backward);
    flow.op(op_.index);
    flow.product(dy, columns_of(dy, *x_), true, *x_, columns_of(*x_, dy), false, op_.cols, 0,
                 {.fixed = op_.out_cols}, fast(dy, *x_));
    const StoredTensor* grad = weight_.grad;
    if (weight_.request.accumulate)
      flow.apply([grad](Assembly& a, Expr e, const ColumnMap& m) { return a.load(*grad, m) + e; });
    flow.close(*grad);
  }

  const ParameterTensor& weight_;
  bool fast_;
  const Stage* again_ = nullptr;  // recomputes x, if x was not saved
  bool pending_ = false;
  const StoredTensor* x_ = nullptr;
  const StoredTensor* first_ = nullptr;  // x of the forward pass, if x is recomputed
  const StoredTensor* w_ = nullptr;
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Multiplied& e) {
  return std::make_unique<MultipliedStage>(planner, op, e.fast);
}

}  // namespace tenon
