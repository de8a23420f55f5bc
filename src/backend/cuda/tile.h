// The tiled map: rowwise and columnwise encodings and sums over rows in one pass.
#pragma once

#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

class TileProgram final : public Program {
 public:
  // Why the tiled map refuses a step. Empty if it accepts the step.
  static std::string refusal(const Step& step);
  // With `whole_rows`, the text handles only calls whose row count is a multiple of the tile. The
  // general text takes twice as long to compile.
  explicit TileProgram(const Step& step, bool whole_rows = false, int64_t multiprocessors = 1);

  // Accepts tensors of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
  Singles singles_;
  bool whole_rows_;
  int64_t multiprocessors_;
};

// For calls whose rows are whole tiles, and for calls of any size.
Attempt make_whole_tiles(const Step& step, const Target& target);
Attempt make_tile(const Step& step, const Target& target);

}  // namespace tenon::cuda
