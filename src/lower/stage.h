// An extension of the value while it is lowered: what it adds to the forward and to the backward
// pass.
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

// An op of the chain while it is lowered: its tensors, and where its extra ones come from and go.
struct OpState {
  size_t index = 0;
  std::string name;
  int64_t cols = 0, out_cols = 0;  // of its input and output
  Factor rows, out_rows;
  Keep keep = Keep::input;
  std::vector<ParameterTensor> parameters;
  std::vector<ExtraSchema> extras;
  // Of a norm in a call: the input and its statistics, where the caller keeps them.
  const StoredTensor* kept_input = nullptr;
  const StoredTensor* kept_mean = nullptr;
  const StoredTensor* kept_rstdev = nullptr;

  std::vector<Value> extra_in;  // lazy if a channel of the open step feeds it
  std::vector<std::function<void(Flow&, const Value&)>> give_extra;       // extra outputs
  std::vector<std::function<void(Flow&, const Value&)>> give_extra_grad;  // of extra inputs
  std::vector<std::function<Value(Flow&)>> take_extra_grad;               // of extra outputs
};

class Stage {
 public:
  Stage(Planner& planner, OpState& op) : planner_(planner), op_(op) {}
  virtual ~Stage() = default;
  [[nodiscard]] const OpState& op() const { return op_; }

  // Whether a gradient of its own is wanted: of parameters or extra inputs.
  [[nodiscard]] virtual bool trains() const { return false; }
  // Before anything is lowered: whether the gradient of its input is wanted, and who makes that.
  virtual void prepare(bool /*needs_input*/, const Stage* /*before*/) {}
  // Its output computed again in the backward pass; null if the output itself is kept.
  [[nodiscard]] virtual Value again() const { return nullptr; }
  virtual void forward(Flow& flow) = 0;
  virtual void backward(Flow& flow, bool needs_input) = 0;

  bool first = true, last = true;  // of the op's extensions

 protected:
  // `eager` rounds what leaves an op, in both passes.
  [[nodiscard]] Expr leaving(Expr e) const { return last ? planner_.between(e) : e; }
  [[nodiscard]] Expr leaving_backward(Expr e) const { return first ? planner_.between(e) : e; }

  Planner& planner_;
  OpState& op_;
};

// One file a kind of extension.
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Elementwise& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Normalised& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Multiplied& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Reshaped& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Quantised& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Shared& e);
std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Exchanged& e);
// An op of the caller's own.
std::unique_ptr<Stage> make_opaque(Planner& planner, OpState& op, const OpaqueOp& e);

}  // namespace tenon
