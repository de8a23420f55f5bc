// Extra inputs and outputs of ops: tensors of the caller's, or channels from op to op.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lower/stage.h"

namespace tenon {

class Extras {
 public:
  explicit Extras(Planner& planner) : planner_(planner) {}

  // Gives the op's extra tensors their places, and says where their gradients come from and go.
  // `needs_input`: whether the gradient of the op's input is wanted.
  void add(OpState& state, const Op& op, size_t outputs, bool needs_input);
  // The op's extra inputs, as the op is lowered: a channel may still be lazy then.
  void take(OpState& state, Flow& flow) const;
  // Throws if a channel has no reader; `at` is told the op that writes it.
  void check_channels(const std::function<void(size_t op)>& at) const;

 private:
  class Tap;
  struct Channel {
    const OpState* writer = nullptr;
    bool needs_grad = false;
    int readers = 0;
    std::shared_ptr<Tap> value;
    std::vector<std::shared_ptr<Tap>> grads;
  };
  using Gradient = std::function<void(Flow&, const Value&)>;

  void read_channel(OpState& state, const std::string& channel, bool column);
  void read_input(OpState& state, bool column);
  void write_channel(OpState& state, const std::string& channel, bool needs_input);
  void write_output(OpState& state, bool needs_input);
  [[nodiscard]] Gradient gradient_into(const StoredTensor& to, bool accumulate, bool column) const;

  Planner& planner_;
  std::map<std::string, Channel> channels_;
  std::map<size_t, std::vector<std::function<Value(Flow&)>>> sources_;  // by op
  size_t inputs_ = 0, outputs_ = 0;
};

}  // namespace tenon
