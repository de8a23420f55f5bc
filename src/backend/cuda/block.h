// The tiled map for block scales: 1x128, 128x128 and MXFP8, rowwise and columnwise in one pass.
#pragma once

#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

// The tile of a thread block. Each thread has 4 x 8 elements.
struct BlockTile {
  int64_t rows = 128, cols = 128;
  [[nodiscard]] unsigned threads() const { return static_cast<unsigned>(rows * cols / 32); }
  [[nodiscard]] unsigned resident() const { return 1024 / threads(); }
};

class BlockProgram final : public Program {
 public:
  // Why the block map refuses a step. Empty if it accepts the step.
  static std::string refusal(const Step& step);
  // With `whole_rows`, the text handles only calls whose row count is a multiple of the tile. The
  // general text takes twice as long to compile.
  explicit BlockProgram(const Step& step, bool whole_rows = false, int64_t multiprocessors = 1);

  // Accepts tensors of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
  Singles singles_;
  bool whole_rows_;
  int64_t multiprocessors_;
  BlockTile tile_;
  unsigned parked_ = 0;  // bytes of values kept in shared memory
};

// For calls whose rows are whole tiles, and for calls of any size.
Attempt make_whole_blocks(const Step& step, const Target& target);
Attempt make_block(const Step& step, const Target& target);

}  // namespace tenon::cuda
