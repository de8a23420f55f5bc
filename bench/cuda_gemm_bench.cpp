// Products with bodies on a Hopper GPU and cuBLASLt in one run: each alone, back to back, in
// shuffled rounds; times and their ratios to the best of eight heuristics for the plain product.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/makers.h"
#include "lazy/builder.h"
#include "lower/single_dropout.h"
#include "runtime/execute.h"
#include "tenon/tenon.hpp"

namespace {

using namespace tenon;  // NOLINT: a benchmark of the library
using cuda::GemmProgram;
using From = Load::From;
using To = Store::To;

enum In : uint32_t { in_a, in_b, in_bias, in_tile, in_scalar, inputs };

Expr call(const char* name, Expr x, Expr b = {}) {
  const Activation f = activation(name);
  std::vector<Expr> values;
  for (const Parameter& p : f.parameters) values.emplace_back(p.value);
  return f.inputs == 1
             ? f.body({.x = x, .a = {}, .b = {}, .parameters = f.parameters, .values = values})
             : f.body({.x = {}, .a = x, .b = b, .parameters = f.parameters, .values = values});
}

struct Output {
  DType dtype = DType::bf16;
  int64_t rows = 0, cols = 0;
};

// A body of n product columns; what it stores follows.
struct Body {
  const char* name;
  bool gated;
  void (*make)(StepBuilder& build, int64_t m, int64_t cols, std::vector<Output>& out);
};
Expr product(StepBuilder& b, int64_t offset = 0) {
  return b.load({.from = From::product, .columns = {1, 1, offset}});
}
Expr bias(StepBuilder& b) { return b.load({From::row, in_bias, DType::bf16}); }
Expr swiglu(StepBuilder& b, int64_t cols) {
  const Expr x = product(b);
  return call("swiglu", x, product(b, cols));
}
constexpr Body kBodies[] = {
    {"plain", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       b.store({To::tile, 0, DType::bf16}, product(b));
       out = {{DType::bf16, m, n}};
     }},
    {"bias+gelu", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       const Expr x = product(b) + bias(b);
       b.store({To::tile, 0, DType::bf16}, call("gelu", x));
       out = {{DType::bf16, m, n}};
     }},
    {"bias+gelu, saved", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       const Expr x = product(b) + bias(b);
       b.store({To::tile, 0, DType::bf16}, x);
       b.store({To::tile, 1, DType::bf16}, call("gelu", x));
       out = {{DType::bf16, m, n}, {DType::bf16, m, n}};
     }},
    {"add", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       b.store({To::tile, 0, DType::bf16}, product(b) + b.load({From::tile, in_tile, DType::bf16}));
       out = {{DType::bf16, m, n}};
     }},
    {"bias+dropout+add", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       const Expr x = product(b) + bias(b);
       const Expr bits = b.load({.from = From::random});
       const Expr kept = select(bits >= b.load({.from = From::parameter, .arg = 0}),
                                x * b.load({.from = From::parameter, .arg = 1}), 0.0F);
       b.store({To::tile, 0, DType::bf16}, b.load({From::tile, in_tile, DType::bf16}) + kept);
       out = {{DType::bf16, m, n}};
     }},
    {"f32 accumulate", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       b.store({To::tile, 0, DType::f32}, b.load({From::tile, in_tile, DType::f32}) + product(b));
       out = {{DType::f32, m, n}};
     }},
    {"gelu.bwd", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       const Expr x = b.load({From::tile, in_tile, DType::bf16});
       b.store({To::tile, 0, DType::bf16},
               b.grad(call("gelu", x), product(b), std::span(&x, 1))[0]);
       out = {{DType::bf16, m, n}};
     }},
    {"swiglu.bwd", false,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       const std::array<Expr, 2> x{b.load({From::tile, in_tile, DType::bf16}),
                                   b.load({From::tile, in_tile, DType::bf16, {1, 1, n}})};
       const auto d = b.grad(call("swiglu", x[0], x[1]), product(b), x);
       b.store({To::tile, 0, DType::bf16}, d[0]);
       b.store({To::tile, 0, DType::bf16, {1, 1, n}}, d[1]);
       out = {{DType::bf16, m, 2 * n}};
     }},
    {"swiglu", true,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       b.store({To::tile, 0, DType::bf16}, swiglu(b, n));
       out = {{DType::bf16, m, n}};
     }},
    {"swiglu, saved", true,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       const Expr x = product(b);
       const Expr y = product(b, n);
       b.store({To::tile, 0, DType::bf16}, x);
       b.store({To::tile, 0, DType::bf16, {1, 1, n}}, y);
       b.store({To::tile, 1, DType::bf16}, call("swiglu", x, y));
       out = {{DType::bf16, m, 2 * n}, {DType::bf16, m, n}};
     }},
    {"swiglu -> e4m3 delayed", true,
     [](StepBuilder& b, int64_t m, int64_t n, std::vector<Output>& out) {
       const StepBuilder::Part part{swiglu(b, n), {}};
       Operand o;
       o.format = {.dtype = DType::e4m3, .scaling = Scaling::delayed};
       b.store(o, 0, in_scalar, n, std::span(&part, 1));
       b.store({.to = To::amax, .arg = 5, .dtype = DType::f32, .join = true}, part.value);
       out = {{DType::e4m3, m, n}, {DType::f32, 1, 1}, {}, {}, {}, {DType::f32, 1, 1}};
     }},
};

struct Case {
  const char* body;
  int64_t m, n, k;  // n columns of the product
  const char* form = "nt";
};
constexpr Case kCases[] = {
    {"plain", 8192, 28672, 4096},
    {"plain", 8192, 16384, 4096},
    {"plain", 4096, 4096, 4096},
    {"bias+gelu", 8192, 16384, 4096},
    {"bias+gelu, saved", 8192, 16384, 4096},
    {"swiglu", 8192, 28672, 4096},
    {"swiglu, saved", 8192, 28672, 4096},
    {"swiglu -> e4m3 delayed", 8192, 28672, 4096},
    {"gelu.bwd", 8192, 16384, 4096, "nn"},
    {"swiglu.bwd", 8192, 14336, 4096, "nn"},
    {"plain", 8192, 4096, 28672, "nn"},
    {"plain", 28672, 4096, 8192, "tn"},
    {"f32 accumulate", 28672, 4096, 8192, "tn"},
    {"bias+dropout+add", 8192, 4096, 14336},
    {"add", 8192, 4096, 14336},
    {"bias+gelu", 8192, 16384, 1024},
    {"plain", 8192, 16384, 1024},
    {"swiglu", 64, 28672, 4096},
    {"swiglu", 128, 28672, 4096},
    {"swiglu", 256, 28672, 4096},
    {"swiglu", 512, 28672, 4096},
    {"swiglu", 1024, 28672, 4096},
    {"swiglu", 2048, 28672, 4096},
    {"bias+gelu", 512, 4096, 4096},
    {"bias+gelu", 1024, 1024, 4096},
    {"bias+gelu", 512, 512, 1024},
    {"plain", 512, 512, 8192},
};

void fill(cuda::DeviceBuffer& to) {
  constexpr size_t kPattern = size_t{8} << 20;
  static const std::vector<uint16_t> kNumbers = [] {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    std::vector<uint16_t> all(kPattern);
    for (uint16_t& v : all) v = static_cast<uint16_t>(encode(DType::bf16, normal(random)));
    return all;
  }();
  for (size_t at = 0; at < to.size(); at += kPattern * 2)
    cuda::check(cuda::driver().memcpy_to_device(static_cast<char*>(to.data()) + at, kNumbers.data(),
                                                std::min(kPattern * 2, to.size() - at)),
                "filling");
}

struct Timer {
  explicit Timer(cuda::Stream s) : stream(s) {
    cuda::check(cuda::driver().event_create(&start, 0), "making an event");
    cuda::check(cuda::driver().event_create(&end, 0), "making an event");
  }
  // Microseconds of one of `count` runs.
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

double median(std::vector<double> v) {
  std::ranges::sort(v);
  return v.empty() ? 0 : v[v.size() / 2];
}

void bench(const Case& c, double seconds) {
  const Body& body = *std::ranges::find_if(
      kBodies, [&](const Body& b) { return std::string_view(b.name) == c.body; });
  const int64_t cols = body.gated ? c.n / 2 : c.n;
  const bool turn_a = c.form[0] == 't', turn_b = c.form[1] == 't';
  StepBuilder build(c.body, cols, Precision::native);
  std::vector<Output> outputs;
  body.make(build, c.m, cols, outputs);
  Step step = build.finish();
  const auto side = [](uint32_t arg, bool turned) {
    return Matrix{.arg = arg, .format = {.dtype = DType::bf16}, .transposed = turned};
  };
  step.gemm = Gemm{side(in_a, turn_a), side(in_b, turn_b), c.n, c.k};

  std::vector<std::unique_ptr<cuda::DeviceBuffer>> memory;
  const auto array = [&](DType d, int64_t rows, int64_t width) {
    memory.push_back(std::make_unique<cuda::DeviceBuffer>(
        static_cast<size_t>(rows * width * info(d).bytes + 256)));
    return matrix(memory.back()->data(), d, rows, width);
  };
  const bool f32 = std::string_view(c.body) == "f32 accumulate";
  std::vector<View> in(inputs), out;
  in[in_a] = turn_a ? array(DType::bf16, c.k, c.m) : array(DType::bf16, c.m, c.k);
  in[in_b] = turn_b ? array(DType::bf16, c.n, c.k) : array(DType::bf16, c.k, c.n);
  in[in_bias] = array(DType::bf16, 1, c.n);
  in[in_tile] = array(f32 ? DType::f32 : DType::bf16, c.m, 2 * c.n);
  for (const auto& m : memory) fill(*m);
  in[in_scalar] = array(DType::f32, 1, 1);
  const float one = 1;
  cuda::check(cuda::driver().memcpy_to_device(in[in_scalar].data, &one, 4), "writing a scale");
  for (const Output& o : outputs) out.push_back(o.rows ? array(o.dtype, o.rows, o.cols) : View{});
  const View result = array(DType::bf16, c.m, c.n);
  cuda::DeviceBuffer state(5 * sizeof(uint64_t));
  const uint64_t numbers[5] = {1, 2, 0, 0, static_cast<uint64_t>(cols)};
  state.from_host(numbers);
  const DropoutRule rule = dropout_rule(0.1);
  const std::vector<float> parameters{rule.threshold, rule.scale};

  const cuda::CurrentContext context;
  const cuda::OwnStream stream;
  const Timer timer(stream.get());
  RunArgs args{.rows = c.m, .in = in, .out = out, .parameters = parameters};
  args.random = static_cast<const uint64_t*>(state.data());
  args.stream = stream.get();
  std::vector<Candidate> all;
  const int64_t processors = cuda::attribute(cuda::Attribute::multiprocessors, context.device());
  std::string chosen = "elsewhere";
  for (const int64_t width : {GemmProgram::kNarrow, GemmProgram::kWide}) {
    if (!GemmProgram::refusal(step, width).empty()) continue;
    auto program = std::make_unique<GemmProgram>(step, width, processors);
    if (!program->suits(args)) continue;
    if (program->fits(args)) chosen = std::to_string(width);
    const auto kernel = cuda::kernel_of(step.name, std::move(program));
    all.push_back({"own " + std::to_string(width), [kernel, &args] { kernel->run(args); }});
  }

  // The plain product in bf16 by the best of eight, and by the best of eight in fp32 with the body
  // as a map after it.
  const cuda::LoadedLt& lt = cuda::cublaslt();
  cuda::LtHandle handle = nullptr;
  cuda::DeviceBuffer workspace(cuda::kLtWorkspace);
  cuda::LtProduct plain, wide;
  std::vector<View> rest_in;
  std::unique_ptr<cuda::DeviceBuffer> wide_memory, rest_memory;
  RunArgs rest_args;
  size_t plain_at = all.size();
  if (lt.why.empty()) {
    lt.lt.create(&handle);
    const cuda::LtForm form(step);
    wide_memory = std::make_unique<cuda::DeviceBuffer>(form.product_bytes(c.m));
    wide = form.product(args, wide_memory->data());
    plain = wide;
    plain.d = {result.data, DType::bf16, c.n, c.m, c.n};
    const auto best = [&](const cuda::LtProduct& p) {
      // In rounds: the clock follows the power that was drawn before.
      const std::vector<cuda::LtChoice> choices = cuda::heuristics(lt.lt, handle, p, 8);
      std::vector<std::vector<double>> times(choices.size());
      for (int round = 0; round < 3; ++round)
        for (size_t i = 0; i < choices.size(); ++i) {
          const auto run = [&] {
            cuda::multiply(lt.lt, handle, choices[i], p, workspace.data(), stream.get());
          };
          const int times_more = std::clamp(static_cast<int>(2e4 / timer(run, 2)), 3, 500);
          times[i].push_back(timer(run, times_more));
        }
      const auto least = std::ranges::min_element(times, {}, median);
      return least == times.end() ? cuda::LtChoice{}
                                  : choices[static_cast<size_t>(least - times.begin())];
    };
    const cuda::LtChoice best_plain = best(plain), best_wide = best(wide);
    all.push_back({"cublaslt plain", [&, best_plain] {
                     cuda::multiply(lt.lt, handle, best_plain, plain, workspace.data(),
                                    stream.get());
                   }});
    if (std::string_view(c.body) != "plain") {
      const Chosen rest = kernel_for(form.rest(), Device::cuda);
      rest_args = form.rest_args(args, wide_memory->data(), rest_in);
      rest_memory = std::make_unique<cuda::DeviceBuffer>(rest.kernel->workspace(c.m));
      rest_args.workspace = rest_memory->data();
      all.push_back({"cublaslt + map", [&, best_wide, rest] {
                       cuda::multiply(lt.lt, handle, best_wide, wide, workspace.data(),
                                      stream.get());
                       rest.kernel->run(rest_args);
                     }});
    }
  }

  // What a step gets without a GEMM of its own: the first heuristic, and the body as a map.
  std::unique_ptr<cuda::DeviceBuffer> own_memory;
  RunArgs own_args = args;
  const Attempt made = cuda::make_cublaslt(step);
  if (const auto* kernel = std::get_if<std::shared_ptr<const Kernel>>(&made)) {
    own_memory = std::make_unique<cuda::DeviceBuffer>((*kernel)->workspace(c.m));
    own_args.workspace = own_memory->data();
    all.push_back({"maker cublaslt", [kernel, &own_args] { (*kernel)->run(own_args); }});
  }

  std::mt19937 random(5);
  for (Candidate& candidate : all) timer(candidate.run, 3);
  std::vector<size_t> order(all.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = 0; round < 3; ++round) {
    std::ranges::shuffle(order, random);
    for (const size_t i : order) {
      const double once = timer(all[i].run, 3);
      const int count = std::max(3, static_cast<int>(seconds * 0.5e6 / once));
      timer(all[i].run, count);
      all[i].hot.push_back(timer(all[i].run, count));
    }
  }
  for (int round = 0; round < 5; ++round) {
    std::ranges::shuffle(order, random);
    for (const size_t i : order) {
      std::this_thread::sleep_for(std::chrono::milliseconds(12));
      all[i].cold.push_back(timer(all[i].run, 1));
    }
  }
  const double flops =
      2.0 * static_cast<double>(c.m) * static_cast<double>(c.n) * static_cast<double>(c.k);
  std::printf("%s %s %ldx%ldx%ld, chosen: %s\n", c.body, c.form, static_cast<long>(c.m),
              static_cast<long>(c.n), static_cast<long>(c.k), chosen.c_str());
  for (const Candidate& x : all) {
    const double hot = median(x.hot), cold = median(x.cold);
    std::printf("  %-15s hot %9.1f us %6.1f TFLOP/s", x.name.c_str(), hot, flops / hot * 1e-6);
    if (plain_at < all.size()) std::printf(" %6.3f", hot / median(all[plain_at].hot));
    std::printf("   cold %9.1f us", cold);
    if (plain_at < all.size()) std::printf(" %6.3f", cold / median(all[plain_at].cold));
    std::printf("\n");
  }
  std::fflush(stdout);
  if (handle) lt.lt.destroy(handle);
}

}  // namespace

// Arguments: seconds for each measurement, then words that the bodies' names must have.
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
    for (const Case& c : kCases) {
      const std::string name = str(c.body, " ", c.form, " ", c.m, "x", c.n, "x", c.k);
      bool wanted = count <= 2;
      for (int i = 2; i < count; ++i) wanted = wanted || name.find(words[i]) != std::string::npos;
      if (wanted) bench(c, seconds);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cuda_gemm_bench: %s\n", e.what());
    return 1;
  }
}
