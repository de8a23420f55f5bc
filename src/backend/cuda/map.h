// The flat map on CUDA: element-wise steps with plain loads and tile stores.
#pragma once

#include <string>

#include "backend/cuda/program.h"

namespace tenon::cuda {

class MapProgram final : public Program {
 public:
  // Why the flat map refuses a step. Empty if it accepts the step.
  static std::string refusal(const Step& step);
  // The text does not depend on sizes.
  explicit MapProgram(const Step& step);

  [[nodiscard]] bool fits_all() const override { return true; }
  [[nodiscard]] bool idle(const RunArgs& args) const override {
    return args.rows == 0 || step_.cols == 0;
  }
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
};

Attempt make_map(const Step& step, const Target& target);

}  // namespace tenon::cuda
