// One conformance case: its matrices and the public calls that it makes.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <string>

#include "step/backend.h"
#include "support/cases.h"
#include "support/matrix.h"
#include "tenon/tenon.hpp"

namespace tenon::support {

class Trial {
 public:
  Trial(const Case& c, Device device);

  // Looks at a step after its run, with views on the host; returns what is wrong.
  using Inspect = std::function<std::optional<std::string>(const Step&, const RunArgs& host)>;

  // Nothing if the case passes: every step, and no byte written outside of a view.
  std::optional<std::string> run(const Inspect& inspect);

  // What the calls read and wrote, in the order in which the case made them.
  [[nodiscard]] const std::deque<Matrix>& matrices() const { return matrices_; }

  // What CUDA's compiler is given for the case, whose calls are made and not run; of a trial for
  // the CPU, whose views need no device.
  std::vector<std::string> cuda_texts();

 private:
  using Run = std::function<void()>;
  void call();
  void run_activation();
  void run_l2();
  void run_quantize();
  void run_dropout();

  Matrix& add(DType dtype, int64_t rows, int64_t cols);
  View filled(DType dtype, int64_t rows, int64_t cols);
  View empty(DType dtype, int64_t rows, int64_t cols);
  View single(float value);
  void download() const;
  // A tensor to write in the format of the case, or in another mode.
  Tensor output(int64_t rows, int64_t cols);
  Tensor encoded(const std::string& number, const std::string& mode, const std::string& side,
                 int64_t rows, int64_t cols);
  Tensor encoded_input(DType dtype, int64_t rows, int64_t cols);

  std::vector<View> on_host(std::span<const View> views,
                            std::vector<std::vector<uint8_t>>& copies) const;
  [[nodiscard]] const uint64_t* random_state(const uint64_t* state,
                                             std::vector<std::vector<uint8_t>>& copies) const;
  void observe(const Step& step, const RunArgs& args, const Run& go, const Inspect& inspect);
  void compare_with_cpu(const Step& step, const RunArgs& host,
                        std::vector<std::vector<uint8_t>> copies, const RunArgs& args);
  void compare(const Matrix& m, const std::vector<uint8_t>& cpu);

  Case case_;
  Device device_;
  ShapeCase shape_;
  std::mt19937_64 random_;
  std::mt19937_64 form_;  // what kernels depend on; shapes and layouts have no part in it
  Options options_;
  bool backward_;
  bool finite_;  // no special value is infinite or NaN, so that blocks keep their scales
  std::deque<Matrix> matrices_;
  std::optional<std::string> wrong_;
  int steps_ = 0;
};

}  // namespace tenon::support
