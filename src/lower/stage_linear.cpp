// Linear: operands in the recipe's format, one product forward, two backward.
#include <cmath>
#include <utility>

#include "lower/stage_parts.h"
#include "tenon/error.h"

namespace tenon {

namespace {

class Linear final : public Stage {
 public:
  Linear(const StageContext& c, int64_t out)
      : Stage(c),
        planner_(c.planner),
        out_(out),
        weight_(ParameterPlace::make(c, "weight", out, c.cols, initial(c.cols))) {}
  [[nodiscard]] int64_t out_cols() const override { return out_; }
  [[nodiscard]] bool trains() const override { return weight_.grad != nullptr; }
  void prepare(bool, bool needs_input, const Stage* before) override {
    input_grad_ = needs_input;
    again_ = needs_input && before && before->again() ? before : nullptr;
  }

  void forward(Flow& flow) override {
    const PlanRequest& r = planner_.request();
    const std::string name = planner_.op_name(index_);
    const bool train = weight_.grad != nullptr;
    const bool kept = train && !again_;
    // Of its encodings, backward keeps what it reads.
    x_ = &flow.materialise(r.recipe.quantises() ? name + ".x" : name + ".in", Role::workspace,
                           input(true, kept));
    weight(flow);
    flow.product(*x_, Orientation::rowwise, false, *w_, Orientation::rowwise, true, out_, cols_,
                 flow.rows());
    if (r.options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return planner_.between(e); });
  }

  void backward(Flow& flow, bool needs_input) override {
    const PlanRequest& r = planner_.request();
    const std::string name = planner_.op_name(index_);
    const bool train = weight_.grad != nullptr;
    const Operand as =
        r.recipe.quantises() ? encoded(r.recipe.gradient, needs_input, train) : Operand(r.dtype);
    const Factor rows = flow.rows();
    const Place& dy = flow.materialise(name + ".dy", Role::workspace, as);
    if (train) {
      // The open step may be what computes x again, so the product waits for its end.
      if (again_) {
        first_ = std::exchange(x_, nullptr);
        pending_ = true;
      }
      flow.later([this, &dy] { weight_gradient(dy); });
    }
    if (!needs_input) {
      flow.later_now();
      return;
    }
    const Format& wf = w_->operand.format;
    const Orientation side = differs(wf) ? Orientation::columnwise : Orientation::rowwise;
    flow.product(dy, Orientation::rowwise, false, *w_, side, false, cols_, out_, rows);
    if (r.options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return planner_.between(e); });
    if (!pending_) return;
    // Beside the gradient of the op before this one, from the same loads.
    x_ = &planner_.place(name + ".x.again", Role::workspace, input(false, true), cols_, rows,
                         first_);
    Value y = again_->again();
    // Forward found the amax of what it had stored on the way.
    if (r.recipe.input.scaling == Scaling::current) y = rounded(y, r.dtype);
    flow.side([&flow, this, y](Assembly& a) { a.store(*x_, flow.parts(a, y)); });
    flow.why(x_->name + " is computed again, as " + std::string(kKeeps[2]) + " asks");
  }

 private:
  // A third of the variance passes, whatever the width.
  static Initial initial(int64_t in) {
    const float bound = 1 / std::sqrt(static_cast<float>(in));
    return {-bound, bound};
  }

  Operand input(bool row, bool column) const {
    const PlanRequest& r = planner_.request();
    return r.recipe.quantises() ? encoded(r.recipe.input, row, column) : Operand(r.dtype);
  }

  // The weight in the recipe's format: a step that runs when the weights changed.
  void weight(Flow&) {
    const PlanRequest& r = planner_.request();
    w_ = weight_.value;
    if (!r.recipe.quantises()) return;
    Flow quantise(planner_, Pass::forward);
    quantise.begin(*weight_.value);
    quantise.op(index_);
    const size_t before = planner_.data().forward.size();
    const bool backward = input_grad_;
    w_ = &quantise.materialise(planner_.op_name(index_) + ".w", Role::state,
                               encoded(r.recipe.weight, true, backward));
    for (size_t i = before; i < planner_.data().forward.size(); ++i)
      planner_.data().forward[i].weights = true;
  }

  void weight_gradient(const Place& dy) {
    Flow flow(planner_, Pass::backward);
    flow.op(index_);
    const bool split = differs(dy.operand.format);
    const Orientation side = split ? Orientation::columnwise : Orientation::rowwise;
    flow.product(dy, side, true, *x_, side, false, cols_, 0, {.fixed = out_});
    const Place* grad = weight_.grad;
    if (weight_.request.accumulate)
      flow.apply([grad](Assembly& a, Expr e, const ColumnMap& m) { return a.load(*grad, m) + e; });
    flow.close(*grad);
  }

  Planner& planner_;
  int64_t out_;
  ParameterPlace weight_;
  const Stage* again_ = nullptr;  // what computes x again, if it was not kept
  bool input_grad_ = false, pending_ = false;
  const Place* x_ = nullptr;
  const Place* first_ = nullptr;  // x of the forward pass, where x is computed again
  const Place* w_ = nullptr;
};

}  // namespace

std::unique_ptr<Stage> make_linear(const StageContext& c, const Arguments& a) {
  const std::optional<int64_t> in = a.integer("in", 1);
  const std::optional<int64_t> out = a.integer("out", 1);
  require(out.has_value(), a.who(), ": it has no width; write linear(in,out) or linear(out=n)");
  require(!in || *in == c.cols, a.who(), ": input has ", c.cols, " columns, weight wants ",
          in ? *in : 0);
  return std::make_unique<Linear>(c, *out);
}

}  // namespace tenon
