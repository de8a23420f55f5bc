// Quantises the value and its gradient to the recipe's formats. The derivative is straight-through.
#include "lower/stage.h"

namespace tenon {

namespace {

class QuantisedStage final : public Stage {
 public:
  using Stage::Stage;
  void forward(Flow& flow) override {
    const Recipe& recipe = planner_.request().recipe;
    if (recipe.quantises()) encode(flow, op_.name, recipe.input);
  }
  void backward(Flow& flow, bool needs_input) override {
    const Recipe& recipe = planner_.request().recipe;
    if (needs_input && recipe.quantises()) encode(flow, "d" + op_.name, recipe.gradient);
  }

 private:
  void encode(Flow& flow, const std::string& name, const Format& format) {
    flow.materialise(name, Role::workspace, encoded(planner_, format, true, false));
    if (planner_.request().options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return planner_.between(e); });
  }
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Quantised& /*e*/) {
  return std::make_unique<QuantisedStage>(planner, op);
}

}  // namespace tenon
