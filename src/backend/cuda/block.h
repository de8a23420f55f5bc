// The tiled map for scales of blocks: 1x128, 128x128 and MXFP8, rowwise and columnwise in one pass.
#pragma once

#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

// The tile of a block of threads, each of which has 4 x 8 elements.
struct BlockTile {
  int64_t rows = 128, cols = 128;
  [[nodiscard]] unsigned threads() const { return static_cast<unsigned>(rows * cols / 32); }
  [[nodiscard]] unsigned resident() const { return 1024 / threads(); }
};

class BlockProgram final : public Program {
 public:
  // Why it does not do a step, or nothing if it does.
  static std::string refusal(const Step& step);
  // For calls whose tiles have all their rows, or for others too: that text takes twice as long to
  // compile.
  explicit BlockProgram(const Step& step, bool whole_rows = false);

  // Tensors made of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
  Singles singles_;
  bool whole_rows_;
  BlockTile tile_;
  unsigned parked_ = 0;  // bytes of values that wait
};

Attempt make_block(const Step& step, const Target& target);

}  // namespace tenon::cuda
