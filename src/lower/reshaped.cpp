// Lowers a reshape: the same memory with another shape. The gradient gets the original shape.
#include "lower/stage.h"

namespace tenon {

namespace {

class ReshapedStage final : public Stage {
 public:
  ReshapedStage(Planner& planner, OpState& op) : Stage(planner, op) {
    planner_.data().whole.push_back({op_.name, op_.out_rows});
  }
  void forward(Flow& flow) override { change(flow, ".in", op_.out_cols, op_.out_rows); }
  void backward(Flow& flow, bool needs_input) override {
    if (needs_input) change(flow, ".dy", op_.cols, op_.rows);
  }

 private:
  void change(Flow& flow, const char* what, int64_t cols, Factor rows) {
    const StoredTensor& p =
        flow.materialise(op_.name + what, Role::workspace, Operand(planner_.request().dtype));
    flow.begin(planner_.alias(p, cols, rows));
  }
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Reshaped& /*e*/) {
  return std::make_unique<ReshapedStage>(planner, op);
}

}  // namespace tenon
