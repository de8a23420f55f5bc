// Collects loads and stores into a step.
#pragma once

#include <string>
#include <utility>

#include "step/step.h"

namespace tenon {

class StepBuilder {
 public:
  StepBuilder(std::string name, int64_t cols, Precision precision) {
    step_.name = std::move(name);
    step_.cols = cols;
    step_.precision = precision;
  }

  Expr load(const Load& l) {
    step_.loads.push_back(l);
    return graph_->load(static_cast<uint32_t>(step_.loads.size() - 1));
  }

  void store(Store s, Expr value) {
    s.value = graph_->id(value);
    step_.stores.push_back(s);
  }

  // A formula that is a constant has no graph; its gradients are zero.
  std::vector<Expr> grad(Expr out, Expr seed, std::span<const Expr> wrt) {
    return tenon::grad({graph_.get(), graph_->id(out)}, seed, wrt);
  }

  Step finish() {
    step_.graph = std::move(graph_);
    return std::move(step_);
  }

 private:
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  Step step_;
};

}  // namespace tenon
