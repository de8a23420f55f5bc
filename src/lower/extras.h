// Extra inputs and outputs of ops: tensors of the caller, or channels between ops.
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

  // Assigns tensors to the op's extra inputs and outputs, and connects the sources and destinations
  // of their gradients. `needs_input`: the gradient of the op's input is needed.
  void add(OpState& state, const Op& op, size_t outputs, bool needs_input);
  // Reads the op's extra inputs while the op is lowered. A channel can still be lazy at that time.
  void take(OpState& state, Flow& flow) const;
  // Throws if a channel has no reader. First calls `at` with the op that writes the channel.
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
