// The cases of `tenon bench`: calls of the library as data, and the memory that they use.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "choice/choose.h"
#include "tenon/format.h"
#include "tenon/options.h"

namespace tenon::bench {

// An op with its direction, the encoding of its result and its other results.
struct BenchCase {
  std::string op;
  bool backward = false;
  Format out = {};  // of a dequantize: the format of its input
  bool columnwise = false, dbias = false, bias = false;
  DType in = DType::bf16;
  // `current` has two passes. This selects one of them.
  std::optional<size_t> pass = {};

  // "gelu.bwd bf16 -> e4m3 delayed rowcol +dbias"
  [[nodiscard]] std::string name() const;
};

// Generates the cases from the activations and the scaling modes. `all`: every activation in every
// mode and with its bias gradient. Otherwise: only gelu, swiglu and quantize.
std::vector<BenchCase> bench_cases(DType dtype, bool all);

// The cases that match every word of the filter. A word matches a case if it is a word of the case.
// The op and the direction (fwd or bwd) are words too. If no case has such a word, it matches as a
// part of the name. An empty filter matches all cases.
std::vector<BenchCase> filtered(const std::vector<BenchCase>& cases,
                                const std::vector<std::string>& filters);

// Places the tensors of a call one after the other. The default addresses are placeholders: they
// serve to find the memory size and the kernels of a call.
class BenchMemory {
 public:
  struct Bases {
    char* in = nullptr;       // random numbers
    char* numbers = nullptr;  // f32, positive: scales and statistics
    char* out = nullptr;
    const void* random = nullptr;
  };
  BenchMemory();
  explicit BenchMemory(const Bases& bases) : bases_(bases) {}

  View in(DType dtype, int64_t rows, int64_t cols);
  View numbers(int64_t rows, int64_t cols);
  View out(DType dtype, Shape shape, int64_t stride = 0);
  [[nodiscard]] const void* random() const { return bases_.random; }

  [[nodiscard]] size_t in_bytes() const { return in_; }
  [[nodiscard]] size_t number_bytes() const { return numbers_; }
  [[nodiscard]] size_t out_bytes() const { return out_; }
  // All views that a call must write.
  [[nodiscard]] const std::vector<View>& outputs() const { return outputs_; }

 private:
  Bases bases_;
  size_t in_ = 0, numbers_ = 0, out_ = 0;
  std::vector<View> outputs_;
};

// One step of a call with everything that it needs to run.
struct BenchCall {
  Step step;
  std::shared_ptr<const Choice> kernel;
  std::string_view maker;
  int64_t rows = 0;
  std::vector<View> in = {}, out = {};
  std::vector<float> parameters = {};
  const uint64_t* random = nullptr;

  void run(void* workspace, void* stream) const {
    kernel->run({rows, in, out, parameters, random, workspace, stream});
  }
};
// The steps of a case. Runs nothing.
std::vector<BenchCall> bench_calls(const BenchCase& c, Shape shape, DType dtype,
                                   const Options& options, BenchMemory& memory);

// Bytes that a step moves per element. "4:1+1" reads four, writes one rowwise and one columnwise.
// Row vectors, column vectors and scales are left out.
struct Mix {
  int64_t read = 0, write = 0, columnwise = 0;

  [[nodiscard]] std::string name() const;
  [[nodiscard]] int64_t bytes() const { return read + write + columnwise; }
  friend auto operator<=>(const Mix&, const Mix&) = default;
};
Mix mix_of(const Step& step);

}  // namespace tenon::bench
