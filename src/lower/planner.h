// Tensors and buffers of a plan during lowering, and the cuts of refused steps.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "lower/data.h"

namespace tenon {

// A cut of a step that all makers refused. The step ends before this op in this pass.
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

  // A tensor with new buffers. A recomputed tensor (`first` is set) uses the scale of the first one
  // and has no amax.
  const StoredTensor& tensor(const std::string& name, Role role, const Operand& as, int64_t cols,
                             Factor rows, const StoredTensor* first = nullptr);
  // The same memory with another shape.
  const StoredTensor& alias(const StoredTensor& of, int64_t cols, Factor rows);
  // True if the result `to` is `of` itself: the caller's x or dy, or a gradient that is stored.
  // `to` is then not written.
  bool shares(const StoredTensor& to, const StoredTensor& of);
  // True if the caller gives the tensor encoded.
  [[nodiscard]] bool is_given_encoded(const StoredTensor& t) const {
    const int data = t.row_data == kNoBuffer ? t.col_data : t.row_data;
    return !t.plain() && data_->buffers[static_cast<size_t>(data)].role == Role::input;
  }
  const StoredTensor& given(StoredTensor p) { return tensors_.emplace_back(std::move(p)); }
  int buffer(Buffer b);

  PlanData& data() { return *data_; }
  [[nodiscard]] std::shared_ptr<PlanData> result() const { return data_; }
  const PlanRequest& request() const { return data_->request; }
  [[nodiscard]] const Target& target() const { return *data_->target; }
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

  // Adds a finished step to its pass.
  virtual void take(Pass pass, PlanStep step);
  // True if the caller passes everything that the backward pass reads, so that nothing is saved.
  [[nodiscard]] virtual bool keeps_nothing() const { return false; }

 private:
  std::shared_ptr<PlanData> data_;
  std::vector<Cut> cuts_;
  std::deque<StoredTensor> tensors_;
};

// Thrown if no maker accepts a step. The planner cuts the step and starts again.
struct StepRefused {
  Cut cut;
};

}  // namespace tenon
