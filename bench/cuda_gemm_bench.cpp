// Compares products with bodies on a Hopper GPU with cuBLASLt in one run. Each is timed alone, back
// to back, in shuffled rounds. Prints times and ratios to the best of eight cuBLASLt heuristics for
// the plain product.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/driver.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/lt_form.h"
#include "backend/cuda/makers.h"
#include "bench/products.h"
#include "bench/timing.h"
#include "lower/single_dropout.h"
#include "runtime/execute.h"
#include "tenon/tenon.hpp"

namespace {

using namespace tenon;         // NOLINT: a benchmark of the library
using namespace tenon::bench;  // NOLINT
using cuda::GemmProgram;

void fill(const cuda::DeviceBuffer& to, DType dtype) {
  static std::map<DType, std::vector<char>> pieces;
  std::vector<char>& piece = pieces[dtype];
  if (piece.empty()) piece = normal_piece(dtype, SIZE_MAX);
  for (size_t at = 0; at < to.size(); at += piece.size())
    cuda::check(cuda::driver().memcpy_to_device(static_cast<char*>(to.data()) + at, piece.data(),
                                                std::min(piece.size(), to.size() - at)),
                "filling");
}

struct Timer {
  explicit Timer(cuda::Stream s) : stream(s) {
    cuda::check(cuda::driver().event_create(&start, 0), "making an event");
    cuda::check(cuda::driver().event_create(&end, 0), "making an event");
  }
  // Microseconds per run, over `count` runs.
  double operator()(const std::function<void()>& run, int count) const {
    cuda::check(cuda::driver().event_record(start, stream), "recording an event");
    for (int i = 0; i < count; ++i) run();
    cuda::check(cuda::driver().event_record(end, stream), "recording an event");
    cuda::check(cuda::driver().stream_synchronize(stream), "waiting");
    float ms = 0;
    cuda::check(cuda::driver().event_elapsed_time(&ms, start, end), "reading events");
    return 1e3 * static_cast<double>(ms) / count;
  }
  cuda::Stream stream;
  cuda::Event start = nullptr, end = nullptr;
};

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> hot = {}, cold = {};
};

// One case: all implementations, on the same memory.
class ProductBench {
 public:
  explicit ProductBench(const ProductCase& c)
      : case_(c), product_(make_product(c)), timer_(stream_.get()) {
    place_inputs();
    for (const ProductOutput& o : product_.outputs)
      out_.push_back(o.rows ? array(o.dtype, o.rows, o.cols) : View{});
    args_ = {.rows = c.m, .in = in_, .out = out_, .parameters = parameters_};
    args_.random = static_cast<const uint64_t*>(random_.data());
    args_.stream = stream_.get();
    add_own();
    if (lt_.why.empty()) add_cublaslt();
    add_plan();
  }
  ~ProductBench() {
    if (handle_) lt_.lt.destroy(handle_);
  }
  ProductBench(const ProductBench&) = delete;
  ProductBench& operator=(const ProductBench&) = delete;

  // Measures in rounds, because the clock depends on the power drawn before.
  void run(double seconds) {
    std::mt19937 random(5);
    std::vector<size_t> order(all_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (Candidate& c : all_) timer_(c.run, 3);
    for (int round = 0; round < 3; ++round) {
      std::ranges::shuffle(order, random);
      for (const size_t i : order) {
        const int count = std::max(3, static_cast<int>(seconds * 0.5e6 / timer_(all_[i].run, 3)));
        timer_(all_[i].run, count);
        all_[i].hot.push_back(timer_(all_[i].run, count));
      }
    }
    for (int round = 0; round < 5; ++round) {
      std::ranges::shuffle(order, random);
      for (const size_t i : order) {
        std::this_thread::sleep_for(std::chrono::milliseconds(12));
        all_[i].cold.push_back(timer_(all_[i].run, 1));
      }
    }
  }

  void print() const {
    std::printf("%s, maker of the plan: %s\n", case_.name().c_str(), chosen_.c_str());
    for (const Candidate& c : all_) {
      const double hot = median(c.hot), cold = median(c.cold);
      std::printf("  %-15s hot %9.1f us %6.1f TFLOP/s", c.name.c_str(), hot,
                  case_.flops() / hot * 1e-6);
      if (plain_) std::printf(" %6.3f", hot / median(all_[*plain_].hot));
      std::printf("   cold %9.1f us", cold);
      if (plain_) std::printf(" %6.3f", cold / median(all_[*plain_].cold));
      std::printf("\n");
    }
    std::fflush(stdout);
  }

 private:
  View array(DType d, int64_t rows, int64_t cols) {
    memory_.push_back(std::make_unique<cuda::DeviceBuffer>(
        static_cast<size_t>(rows * cols * info(d).bytes + 256)));
    return matrix(memory_.back()->data(), d, rows, cols);
  }

  void place_inputs() {
    const ProductCase& c = case_;
    in_.resize(product_inputs);
    const auto place = [&](ProductIn arg, DType dtype, int64_t rows, int64_t cols) {
      in_[arg] = array(dtype, rows, cols);
      fill(*memory_.back(), dtype);
    };
    const auto side = [&](ProductIn arg, int64_t rows, int64_t cols) {
      if (c.transposed(arg == in_a ? 0 : 1)) std::swap(rows, cols);
      const Format f = c.format(arg);
      place(arg, f.dtype, rows, cols);
      if (f.scaling == Scaling::none) return;
      const Shape scales = f.scale_shape(rows, cols, Orientation::rowwise);
      in_[arg + 1] = array(DType::f32, scales.rows, scales.cols);
      std::vector<float> values(static_cast<size_t>(scales.rows * scales.cols), 1);
      for (size_t i = 0; i < values.size(); ++i) values[i] = i % 3 == 1 ? 0.5F : 1;
      cuda::check(cuda::driver().memcpy_to_device(in_[arg + 1].data, values.data(),
                                                  values.size() * sizeof(float)),
                  "writing scales");
    };
    side(in_a, c.m, c.k);
    side(in_b, c.k, c.n);
    place(in_bias, c.dtype, 1, c.n);
    place(in_tile, tile_dtype(c), c.m, 2 * c.n);
    in_[in_scalar] = array(DType::f32, 1, 1);
    const float one = 1;
    cuda::check(cuda::driver().memcpy_to_device(in_[in_scalar].data, &one, 4), "writing a scale");
    const uint64_t state[5] = {1, 2, 0, 0, static_cast<uint64_t>(product_.step.cols)};
    random_.from_host(state);
    const DropoutRule rule = dropout_rule(0.1);
    parameters_ = {rule.threshold, rule.scale};
  }

  // The library's own product, with both tile widths.
  void add_own() {
    const int64_t processors = cuda::attribute(cuda::Attribute::multiprocessors, context_.device());
    for (const cuda::GemmTile& tile :
         {GemmProgram::kNarrow, GemmProgram::kWide, GemmProgram::kPromoted}) {
      if (!GemmProgram::refusal(product_.step, tile).empty()) continue;
      auto program = std::make_unique<GemmProgram>(product_.step, tile, processors);
      if (!program->suits(args_)) continue;
      const auto kernel = cuda::kernel_of(product_.step.name, std::move(program));
      RunArgs args = args_;
      memory_.push_back(std::make_unique<cuda::DeviceBuffer>(kernel->workspace(case_.m) + 256));
      args.workspace = memory_.back()->data();
      all_.push_back(
          {str("own ", tile.rows, "x", tile.cols), [kernel, args] { kernel->run(args); }});
    }
  }

  // The fastest of eight heuristics.
  cuda::LtChoice best(const cuda::LtProduct& p) {
    const std::vector<cuda::LtChoice> choices = cuda::heuristics(lt_.lt, handle_, p, 8);
    std::vector<std::vector<double>> times(choices.size());
    for (int round = 0; round < 3; ++round)
      for (size_t i = 0; i < choices.size(); ++i) {
        const auto run = [&] { multiply(choices[i], p); };
        const int count = std::clamp(static_cast<int>(2e4 / timer_(run, 2)), 3, 500);
        times[i].push_back(timer_(run, count));
      }
    const auto least = std::ranges::min_element(times, {}, median);
    return least == times.end() ? cuda::LtChoice{}
                                : choices[static_cast<size_t>(least - times.begin())];
  }
  void multiply(const cuda::LtChoice& choice, const cuda::LtProduct& p) {
    cuda::multiply(lt_.lt, handle_, choice, p, workspace_.data(), stream_.get());
  }

  // The plain product in bf16, and the product in fp32 followed by the body as a map.
  void add_cublaslt() {
    lt_.lt.create(&handle_);
    const Attempt attempt = cuda::make_cublaslt_split(product_.step, named_target("sm_90a"));
    const auto* const split = std::get_if<Split>(&attempt);
    rest_args_ = args_;
    if (split) {
      wide_memory_ = std::make_unique<cuda::DeviceBuffer>(
          static_cast<size_t>(case_.m * split->stride * info(split->dtype).bytes));
      rest_in_ = in_;
      rest_out_ = out_;
      rest_in_.resize(split->in + 1);
      rest_out_.resize(split->out + 1);
      rest_in_.back() = rest_out_.back() =
          matrix(wide_memory_->data(), split->dtype, case_.m, split->stride);
      rest_args_.in = rest_in_;
      rest_args_.out = rest_out_;
    }
    const cuda::LtProduct wide =
        *cuda::LtForm(split ? split->first : product_.step).whole(rest_args_);
    cuda::LtProduct plain = wide;
    plain.d = {array(DType::bf16, case_.m, case_.n).data, DType::bf16, case_.n, case_.m, case_.n};
    plain_ = all_.size();
    all_.push_back(
        {"cublaslt plain", [this, plain, choice = best(plain)] { multiply(choice, plain); }});
    if (!split) return;
    const Chosen rest = kernel_for(split->second, Device::cuda);
    rest_memory_ = std::make_unique<cuda::DeviceBuffer>(rest.kernel->workspace(case_.m));
    rest_args_.workspace = rest_memory_->data();
    all_.push_back({"cublaslt + map", [this, wide, rest, choice = best(wide)] {
                      multiply(choice, wide);
                      rest.kernel->run(rest_args_);
                    }});
  }

  // What a plan runs, with cuBLASLt's algorithms timed once.
  void add_plan() {
    const Chosen made = kernel_for(product_.step, Device::cuda);
    plan_memory_ = std::make_unique<cuda::DeviceBuffer>(made.kernel->workspace(case_.m));
    all_.push_back({"plan", [this, made] {
                      RunArgs args = args_;
                      args.workspace = plan_memory_->data();
                      made.kernel->run(args);
                    }});
    chosen_ = made.kernel->way(args_).maker;
  }

  ProductCase case_;
  Product product_;
  cuda::CurrentContext context_;
  cuda::OwnStream stream_;
  Timer timer_;
  std::vector<std::unique_ptr<cuda::DeviceBuffer>> memory_;
  std::vector<View> in_, out_, rest_in_, rest_out_;
  cuda::DeviceBuffer random_{5 * sizeof(uint64_t)};
  std::vector<float> parameters_;
  RunArgs args_, rest_args_;
  const cuda::LoadedLt& lt_ = cuda::cublaslt();
  cuda::LtHandle handle_ = nullptr;
  cuda::DeviceBuffer workspace_{cuda::kLtWorkspace};
  std::unique_ptr<cuda::DeviceBuffer> wide_memory_, rest_memory_, plan_memory_;
  std::vector<Candidate> all_;
  std::optional<size_t> plain_;  // index of the plain product
  std::string chosen_;           // the maker of the plan
};

}  // namespace

// Arguments: seconds for each measurement, then words that the names of the cases must contain.
int main(int count, char** words) {
  try {
    if (const auto why = cuda::why_no_gpu()) {
      std::fprintf(stderr, "cuda_gemm_bench: %s\n", why->c_str());
      return 1;
    }
    const cuda::CurrentContext context;
    const double seconds = count > 1 ? std::atof(words[1]) : 0.5;
    if (!cuda::cublaslt().why.empty())
      std::printf("no cuBLASLt to compare with: %s\n", cuda::cublaslt().why.c_str());
    else
      std::printf("cuBLASLt %s\n", cuda::cublaslt().version.c_str());
    for (const ProductCase& c : cuda_products()) {
      bool wanted = count <= 2;
      for (int i = 2; i < count; ++i)
        wanted = wanted || c.name().find(words[i]) != std::string::npos;
      if (!wanted) continue;
      ProductBench bench(c);
      bench.run(seconds);
      bench.print();
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cuda_gemm_bench: %s\n", e.what());
    return 1;
  }
}
