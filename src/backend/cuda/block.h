// The tiled map for scales of blocks: 1x128, 128x128 and MXFP8, rowwise and columnwise in one pass.
#pragma once

#include "backend/cuda/program.h"

namespace tenon::cuda {

class BlockProgram final : public Program {
 public:
  // Why it does not do a step, or nothing if it does.
  static std::string refusal(const Step& step);
  explicit BlockProgram(const Step& step);

  // Tensors made of whole, aligned vectors, and halves of whole blocks.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
};

Attempt make_block(const Step& step);

}  // namespace tenon::cuda
