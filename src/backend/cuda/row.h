// Rows in registers: norms, forward and backward, one read of a row.
#pragma once

#include "backend/cuda/program.h"

namespace tenon::cuda {

class RowProgram final : public Program {
 public:
  // Why it does not do a step, or nothing if it does.
  static std::string refusal(const Step& step);
  explicit RowProgram(const Step& step);

  // Tensors made of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
};

Attempt make_row(const Step& step, const Target& target);

}  // namespace tenon::cuda
