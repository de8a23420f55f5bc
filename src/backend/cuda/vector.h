// The vector map: element-wise steps on whole, aligned vectors, at the speed of the memory.
#pragma once

#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

class VectorProgram final : public Program {
 public:
  // Why the vector map refuses a step. Empty if it accepts the step.
  static std::string refusal(const Step& step);
  explicit VectorProgram(const Step& step);

  // Accepts tensors of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  // Threads per block, vectors per thread, and resident blocks per multiprocessor. The flag limits
  // the grid to the resident blocks.
  struct Size {
    unsigned threads, vectors, blocks;
    bool walks;
  };
  static Size size_of(const Step& step, const std::string& formula);

  Step step_;
  Singles singles_;
  Size size_{};
};

// Calls that do not fit go to the next makers.
Attempt make_vector(const Step& step, const Target& target);

}  // namespace tenon::cuda
