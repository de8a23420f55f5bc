// One extension of the value during lowering: what it adds to the forward and the backward pass.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lower/flow.h"
#include "lower/parameters.h"
#include "ops/op.h"

namespace tenon {

// One op of the chain during lowering: its tensors, and the connections of its extra inputs and
// outputs.
struct OpState {
  size_t index = 0;
  std::string name;
  int64_t cols = 0, out_cols = 0;  // columns of its input and output
  Factor rows, out_rows;
  Keep keep = Keep::input;
  Recipe recipe;  // of an op that quantises
  // The encodings in which its output leaves the chain. None: the output is plain.
  bool leaves_rowwise = false, leaves_columnwise = false;
  [[nodiscard]] bool leaves() const { return leaves_rowwise || leaves_columnwise; }
  std::vector<ParameterTensor> parameters;
  std::vector<ExtraSchema> extras;
  // Norms in a call: the caller's tensors for the input and its statistics.
  const StoredTensor* kept_input = nullptr;
  const StoredTensor* kept_mean = nullptr;
  const StoredTensor* kept_rstdev = nullptr;

  std::vector<Value> extra_in;  // lazy if a channel of the open step feeds it
  std::vector<std::function<void(Flow&, const Value&)>> give_extra;  // extra outputs
  // Gradients of extra inputs.
  std::vector<std::function<void(Flow&, const Value&)>> give_extra_grad;
  // Gradients of extra outputs.
  std::vector<std::function<Value(Flow&)>> take_extra_grad;
};

class Stage {
 public:
  Stage(Planner& planner, OpState& op) : planner_(planner), op_(op) {}
  virtual ~Stage() = default;
  [[nodiscard]] const OpState& op() const { return op_; }

  // True if a gradient of a parameter or of an extra input is needed.
  [[nodiscard]] virtual bool trains() const { return false; }
  // Called before lowering. `needs_input`: the gradient of the input is needed. `before`: the stage
  // that computes the input.
  virtual void prepare(bool /*needs_input*/, const Stage* /*before*/) {}
  // The output, recomputed in the backward pass. Null if the output itself is saved.
  [[nodiscard]] virtual Value again() const { return nullptr; }
  virtual void forward(Flow& flow) = 0;
  virtual void backward(Flow& flow, bool needs_input) = 0;

  bool first = true, last = true;  // first and last extension of the op

 protected:
  // `eager` rounds the values between ops, in both passes.
  [[nodiscard]] Expr leaving(Expr e) const { return last ? planner_.between(e) : e; }
  [[nodiscard]] Expr leaving_backward(Expr e) const { return first ? planner_.between(e) : e; }

  Planner& planner_;
  OpState& op_;
};

// Each kind of extension has its own file.
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Elementwise& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Normalised& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Multiplied& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Reshaped& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Quantised& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Shared& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Exchanged& e);
// An opaque op of the caller.
std::unique_ptr<Stage> make_opaque(Planner& planner, OpState& op, const OpaqueOp& e);

}  // namespace tenon
