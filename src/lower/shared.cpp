// A value with extra readers. Its gradient is the sum of the readers' gradients, last reader first,
// then the gradient of the main path.
#include "lower/stage.h"

namespace tenon {

namespace {

class SharedStage final : public Stage {
 public:
  using Stage::Stage;
  void forward(Flow& flow) override { op_.give_extra[0](flow, flow.value()); }
  void backward(Flow& flow, bool needs_input) override {
    if (!needs_input) return;
    const Value other = op_.take_extra_grad[0](flow);
    if (!other) return;
    flow.apply([this, other](Assembly& a, Expr e, const ColumnMap& m) {
      return leaving_backward(e + a.at(other, m));
    });
  }
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Shared& /*e*/) {
  return std::make_unique<SharedStage>(planner, op);
}

}  // namespace tenon
