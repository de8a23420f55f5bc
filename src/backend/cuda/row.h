// The row map: norms, forward and backward. A row stays in registers and is read once.
#pragma once

#include "backend/cuda/program.h"

namespace tenon::cuda {

class RowProgram final : public Program {
 public:
  // Why the row map refuses a step. Empty if it accepts the step.
  static std::string refusal(const Step& step);
  explicit RowProgram(const Step& step);

  // Accepts tensors of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
};

Attempt make_row(const Step& step, const Target& target);

}  // namespace tenon::cuda
