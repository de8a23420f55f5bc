// Lowers one call to one step, like a chain, but with the caller's views instead of buffers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lower/flow.h"
#include "lower/stage.h"

namespace tenon {

struct CallSettings {
  std::string name;          // of the step
  DType dtype = DType::f32;  // dtype of the chain: `eager` rounds to it
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
};

class Call final : public Planner {
 public:
  explicit Call(const CallSettings& settings);

  // Tensors by the number of their first view. An input has the views of OperandIn. An output has
  // the views of Encoder::Out.
  const StoredTensor& in(const Operand& o, uint32_t view, int64_t cols);
  const StoredTensor& out(const Operand& o, uint32_t view, int64_t cols);
  // An output that reads its scale or its amax from an input view.
  const StoredTensor& out(const Operand& o, uint32_t view, int64_t cols, uint32_t scale);

  // Adds an op to the call. `extend` adds one extension to the op.
  OpState& op(int64_t cols, int64_t out_cols);
  Stage& extend(OpState& op, const Extension& e);
  // A parameter of the op. The value or the gradient may be absent.
  static void parameter(OpState& op, const StoredTensor* value, const StoredTensor* grad);

  // The number of a call's parameter, as a float value that differs from all others.
  static float numbered(size_t parameter) { return static_cast<float>(parameter); }

  void take(Pass pass, PlanStep step) override;
  [[nodiscard]] bool keeps_nothing() const override { return true; }
  // The lowered step. Its views have the caller's numbers.
  [[nodiscard]] Step step() { return std::move(step_); }

 private:
  std::string name_;
  std::deque<OpState> ops_;
  std::vector<std::unique_ptr<Stage>> stages_;
  Step step_;
};

// Stores the amax of an output in a separate view.
void store_amax(Assembly& a, uint32_t view, const Pieces& pieces, bool join);

}  // namespace tenon
