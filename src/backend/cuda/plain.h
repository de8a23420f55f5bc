// Kernels for any step on CUDA. They are correct for every step and not tuned for speed.
#pragma once

#include "backend/cuda/program.h"

namespace tenon::cuda {

class PlainProgram final : public Program {
 public:
  explicit PlainProgram(const Step& step);

  [[nodiscard]] bool fits_all() const override { return true; }
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] int64_t extra_bytes(int64_t rows) const override;
  [[nodiscard]] bool repeats_body() const override { return bodies_ > 1; }
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

 private:
  class Writer;
  Step step_;
  int64_t bodies_ = 0;
};

Attempt make_plain(const Step& step, const Target& target);

}  // namespace tenon::cuda
