// Quantises the value and its gradient to the recipe's formats. The derivative is straight-through.
#include "lower/stage.h"

namespace tenon {

namespace {

class QuantisedStage final : public Stage {
 public:
  using Stage::Stage;
  void forward(Flow& flow) override {
    if (op_.recipe.input.scaling == Scaling::none) return;
    if (!op_.leaves()) return encode(flow, op_.name, op_.recipe.input);
    // The caller's own codes are no output, so they are encoded again.
    if (flow.value()->stored && !flow.value()->stored->plain())
      flow.apply([](Assembly&, Expr e, const ColumnMap&) { return e; });
    Operand as;
    as.format = op_.recipe.input;
    as.rowwise = op_.leaves_rowwise;
    as.columnwise = op_.leaves_columnwise;
    flow.materialise(op_.name, Role::workspace, as);
  }
  void backward(Flow& flow, bool needs_input) override {
    if (needs_input && op_.recipe.gradient.scaling != Scaling::none)
      encode(flow, "d" + op_.name, op_.recipe.gradient);
  }

 private:
  void encode(Flow& flow, const std::string& name, const Format& format) {
    flow.materialise(name, Role::workspace, operand(planner_, format, true, false));
    if (planner_.request().options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return planner_.between(e); });
  }
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Quantised& /*e*/) {
  return std::make_unique<QuantisedStage>(planner, op);
}

}  // namespace tenon
