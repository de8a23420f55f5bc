// What `tenon bench` times: calls of the library as data, and the memory they run on.
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

// An op with its direction, the encoding of its result and what else it gives.
struct BenchCase {
  std::string op;
  bool backward = false;
  Format out = {};
  bool columnwise = false, dbias = false, bias = false;
  DType in = DType::bf16;
  // `current` runs twice; one of its passes alone.
  std::optional<size_t> pass = {};

  // "gelu.bwd bf16 -> e4m3 delayed rowcol +dbias"
  [[nodiscard]] std::string name() const;
};

// Generated from the activations and the scaling modes. `all` has every activation in every mode
// and with its bias gradient, else gelu, swiglu and quantize alone.
std::vector<BenchCase> bench_cases(DType dtype, bool all);

// Whether each word of the filter is a word of the case (its op and its direction, fwd or bwd, are
// words too), or, where no case of the list has such a word, a part of its name. An empty filter
// takes all.
std::vector<BenchCase> filtered(const std::vector<BenchCase>& cases,
                                const std::vector<std::string>& filters);

// Where a call's tensors lie, one behind the other. The default addresses are nobody's: they serve
// to find out how much memory a call takes and which kernels it gets.
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
  // All that a call must write.
  [[nodiscard]] const std::vector<View>& outputs() const { return outputs_; }

 private:
  Bases bases_;
  size_t in_ = 0, numbers_ = 0, out_ = 0;
  std::vector<View> outputs_;
};

// One step of a call with all it needs to run.
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
// The steps of a case; nothing runs.
std::vector<BenchCall> bench_calls(const BenchCase& c, Shape shape, DType dtype,
                                   const Options& options, BenchMemory& memory);

// Bytes that a step moves for each of its elements: "4:1+1" reads four, writes one rowwise and one
// columnwise. Rows, columns and scales are left out.
struct Mix {
  int64_t read = 0, write = 0, columnwise = 0;

  [[nodiscard]] std::string name() const;
  [[nodiscard]] int64_t bytes() const { return read + write + columnwise; }
  friend auto operator<=>(const Mix&, const Mix&) = default;
};
Mix mix_of(const Step& step);

}  // namespace tenon::bench
