// The tiled map: rowwise and columnwise encodings and sums over rows in one pass.
#pragma once

#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

class TileProgram final : public Program {
 public:
  // Why the tiled map does not do a step, or nothing if it does.
  static std::string refusal(const Step& step);
  // For calls whose tiles have all their rows, or for others too: that text takes twice as long to
  // compile.
  explicit TileProgram(const Step& step, bool whole_rows = false);

  // Tensors made of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  Step step_;
  Singles singles_;
  bool whole_rows_;
};

Attempt make_tile(const Step& step, const Target& target);

}  // namespace tenon::cuda
