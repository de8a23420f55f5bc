// One conformance case: its matrices and its public calls.
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

  // Checks a step after its run, with host views. Returns an error text, if any.
  using Inspect = std::function<std::optional<std::string>(const Step&, const RunArgs& host)>;

  // Runs the case. Returns nothing if every step passes and no byte outside of a view was written.
  std::optional<std::string> run(const Inspect& inspect);

  // The tensors of the calls, in call order.
  [[nodiscard]] const std::deque<Matrix>& matrices() const { return matrices_; }

  // The CUDA source texts of the case. Its calls are made but not run. For a trial on the CPU,
  // whose views need no device.
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
  // A tensor to write, in the format of the case or in another mode.
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
  std::mt19937_64 form_;  // depends on the kernel only, not on shapes and layouts
  Options options_;
  bool backward_;
  bool finite_;  // no special value is infinite or NaN, so that blocks have valid scales
  std::deque<Matrix> matrices_;
  std::optional<std::string> wrong_;
  int steps_ = 0;
};

}  // namespace tenon::support
