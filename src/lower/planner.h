// Tensors and buffers of a plan while it is made, and where refused steps were cut.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "lower/data.h"

namespace tenon {

// Where a refused or unwise step was cut: before this op's part of the pass.
struct Cut {
  Pass pass;
  size_t op;
  std::string why;
};

class Planner {
 public:
  Planner(Chain chain, const PlanRequest& request, std::vector<Cut> cuts);
  virtual ~Planner() = default;
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  // A tensor with buffers of its own. One made again has the scale of the first, and no amax.
  const StoredTensor& tensor(const std::string& name, Role role, const Operand& as, int64_t cols,
                             Factor rows, const StoredTensor* first = nullptr);
  // The same memory under another shape.
  const StoredTensor& alias(const StoredTensor& of, int64_t cols, Factor rows);
  const StoredTensor& given(StoredTensor p) { return tensors_.emplace_back(std::move(p)); }
  int buffer(Buffer b);

  PlanData& data() { return *data_; }
  [[nodiscard]] std::shared_ptr<PlanData> result() const { return data_; }
  const PlanRequest& request() const { return data_->request; }
  [[nodiscard]] Expr between(Expr e) const {
    return request().options.rounding == Rounding::eager ? round(e, request().dtype) : e;
  }
  [[nodiscard]] const Cut* cut(Pass pass, size_t op) const;
  std::vector<PlanStep>& steps(Pass p) {
    return p == Pass::forward ? data_->forward : data_->backward;
  }
  [[nodiscard]] std::string op_name(size_t op) const;
  // The number of a new stream of the plan's random state.
  uint32_t random_stream();

  // A finished step joins its pass.
  virtual void take(Pass pass, PlanStep step);
  // Whether backward reads all that it needs from the caller, so that nothing is kept for it.
  [[nodiscard]] virtual bool keeps_nothing() const { return false; }

 private:
  std::shared_ptr<PlanData> data_;
  std::vector<Cut> cuts_;
  std::deque<StoredTensor> tensors_;
};

// A step that no maker takes: the planner cuts it and starts again.
struct Refused {
  Cut cut;
};

}  // namespace tenon
