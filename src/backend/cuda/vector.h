// The vector map: element-wise steps on whole, aligned vectors, at the speed of the memory.
#pragma once

#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

class VectorProgram final : public Program {
 public:
  // Why the vector map does not do a step, or nothing if it does.
  static std::string refusal(const Step& step);
  explicit VectorProgram(const Step& step);

  // Tensors made of whole, aligned vectors.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  // Threads of a block, vectors of a thread, and the blocks of a multiprocessor that the registers
  // must allow; whether no more blocks are launched.
  struct Size {
    unsigned threads, vectors, blocks;
    bool walks;
  };
  static Size size_of(const Step& step, const std::string& formula);

  Step step_;
  Singles singles_;
  Size size_{};
};

// Calls that do not fit go to the makers behind it.
Attempt make_vector(const Step& step, const Target& target);

}  // namespace tenon::cuda
