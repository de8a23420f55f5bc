// Products with bodies beside oneDNN's matmul, round by round in one run: GFLOP/s and ratios.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lazy/builder.h"
#include "runtime/execute.h"
#include "tenon/tenon.hpp"
#ifdef TENON_ONEDNN
#include "onednn.h"
#endif

namespace {

using namespace tenon;  // NOLINT: a benchmark of the library
using Clock = std::chrono::steady_clock;
using From = Load::From;
using To = Store::To;

enum class Work { plain, gelu, swiglu };
constexpr const char* kWorks[] = {"plain", "bias+gelu", "swiglu"};

struct Problem {
  int64_t m, n, k;  // a gated body keeps n/2 columns
  DType dtype;
  Work kind;
  bool nt;  // b is a weight [n, k]

  [[nodiscard]] std::string name() const {
    return str(info(dtype).name, " ", kWorks[static_cast<int>(kind)], " ", m, "x", n, "x", k,
               nt ? " nt" : " nn");
  }
};

double seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
double median(std::vector<double> v) {
  std::ranges::nth_element(v, v.begin() + static_cast<int64_t>(v.size() / 2));
  return v[v.size() / 2];
}

std::vector<char> random_matrix(DType dtype, int64_t elements, uint32_t seed, float most = 1) {
  std::vector<char> data(static_cast<size_t>(elements * info(dtype).bytes));
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-most, most);
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t code = encode(dtype, uniform(random));
    std::memcpy(data.data() + i * info(dtype).bytes, &code, static_cast<size_t>(info(dtype).bytes));
  }
  return data;
}

Expr call(const char* name, Expr x, Expr b = {}) {
  const Activation f = activation(name);
  std::vector<Expr> values;
  for (const Parameter& p : f.parameters) values.emplace_back(p.value);
  return f.body({.x = x, .a = x, .b = b, .parameters = f.parameters, .values = values});
}

Step make_step(const Problem& p) {
  const int64_t cols = p.kind == Work::swiglu ? p.n / 2 : p.n;
  StepBuilder build("gemm", cols, Precision::native);
  const Expr x = build.load({.from = From::product});
  const Expr bias = build.load({.from = From::row, .arg = 2, .dtype = p.dtype});
  const Expr up = build.load({.from = From::product, .columns = {1, 1, cols}});
  const Expr y = p.kind == Work::plain  ? x
                 : p.kind == Work::gelu ? call("gelu", x + bias)
                                        : call("swiglu", x, up);
  build.store({To::tile, 0, p.dtype, {}}, y);
  Step step = build.finish();
  step.gemm = Gemm{.a = {.arg = 0, .format = {.dtype = p.dtype}},
                   .b = {.arg = 1, .format = {.dtype = p.dtype}, .transposed = p.nt},
                   .cols = p.n,
                   .inner = p.k};
  return step;
}

#ifdef TENON_ONEDNN
// The same product by oneDNN, with its own post-ops where it has them; a gated body has none.
std::function<void()> by_onednn(const Problem& p, char* a, char* b, char* bias, char* c,
                                bool packed) {
  using namespace dnnl;
  engine& cpu = ::onednn::cpu();
  stream& queue = ::onednn::queue();
  const auto type = ::onednn::type(p.dtype);
  const auto tag = p.nt ? memory::format_tag::ba : memory::format_tag::ab;
  const memory::desc source({p.m, p.k}, type, memory::format_tag::ab);
  const memory::desc plain({p.k, p.n}, type, tag);
  const memory::desc weights({p.k, p.n}, type, packed ? memory::format_tag::any : tag);
  const memory::desc row({1, p.n}, type, memory::format_tag::ab);
  const memory::desc result({p.m, p.n}, type, memory::format_tag::ab);
  primitive_attr attributes;
  if (p.kind == Work::gelu) {
    post_ops ops;
    ops.append_eltwise(1.0F, algorithm::eltwise_gelu_tanh, 0, 0);
    attributes.set_post_ops(ops);
  }
  const auto d = p.kind == Work::gelu ? matmul::desc(source, weights, row, result)
                                      : matmul::desc(source, weights, result);
  const matmul::primitive_desc pd(d, attributes, cpu);
  memory given(plain, cpu, b);
  memory laid = given;
  if (pd.weights_desc() != plain) {
    laid = memory(pd.weights_desc(), cpu);
    reorder(given, laid).execute(queue, given, laid);
    queue.wait();
  }
  std::unordered_map<int, memory> args{{DNNL_ARG_SRC, memory(source, cpu, a)},
                                       {DNNL_ARG_WEIGHTS, laid},
                                       {DNNL_ARG_DST, memory(result, cpu, c)}};
  if (p.kind == Work::gelu) args.emplace(DNNL_ARG_BIAS, memory(row, cpu, bias));
  return [kernel = matmul(pd), args, &queue] {
    kernel.execute(queue, args);
    queue.wait();
  };
}
#endif

void measure(benchmark::State& state, const Problem& p) {
  std::vector<char> a = random_matrix(p.dtype, p.m * p.k, 1);
  // Weights whose products have the variance 1, as a trained layer's about have.
  const float most = 3 / std::sqrt(static_cast<float>(p.k));
  std::vector<char> b = random_matrix(p.dtype, p.k * p.n, 2, most);
  std::vector<char> bias = random_matrix(p.dtype, p.n, 3);
  std::vector<char> c(static_cast<size_t>(p.m * p.n * info(p.dtype).bytes));
  const Step step = make_step(p);
  const std::vector<View> in{
      matrix(a.data(), p.dtype, p.m, p.k),
      p.nt ? matrix(b.data(), p.dtype, p.n, p.k) : matrix(b.data(), p.dtype, p.k, p.n),
      matrix(bias.data(), p.dtype, 1, p.n)};
  const std::vector<View> out{matrix(c.data(), p.dtype, p.m, step.cols)};
  std::vector<std::pair<std::string, std::function<void()>>> calls{
      {"tenon", [&] { execute(step, {.rows = p.m, .in = in, .out = out, .parameters = {}}, {}); }}};
#ifdef TENON_ONEDNN
  std::vector<char> other(c.size());
  calls.emplace_back("onednn", by_onednn(p, a.data(), b.data(), bias.data(), other.data(), false));
  calls.emplace_back("onednn_packed",
                     by_onednn(p, a.data(), b.data(), bias.data(), other.data(), true));
#endif
  Problem bare = p;
  bare.kind = Work::plain;
  const Step product = make_step(bare);
  std::vector<char> products(static_cast<size_t>(p.m * p.n * info(p.dtype).bytes));
  const std::vector<View> all{matrix(products.data(), p.dtype, p.m, p.n)};
  if (p.kind != Work::plain)
    calls.emplace_back("plain", [&] {
      execute(product, {.rows = p.m, .in = in, .out = all, .parameters = {}}, {});
    });
  std::vector<std::vector<double>> times(calls.size());
  for (const auto& [name, call] : calls) call();
  for (auto _ : state) {  // NOLINT
    for (size_t i = 0; i < calls.size(); ++i) {
      // The threads of the one before, which wait busily, have gone to sleep; a first call wakes
      // the processor up again.
      if (calls.size() > 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(40));
        calls[i].second();
      }
      const auto start = Clock::now();
      calls[i].second();
      times[i].push_back(seconds(start));
    }
    state.SetIterationTime(times[0].back());
  }
  const double flops = 2e-9 * static_cast<double>(p.m * p.n) * static_cast<double>(p.k);
  for (size_t i = 0; i < calls.size(); ++i)
    state.counters[calls[i].first] = flops / median(times[i]);
  for (size_t i = 1; i < calls.size(); ++i) {
    std::vector<double> ratios;
    for (size_t r = 0; r < times[i].size(); ++r) ratios.push_back(times[i][r] / times[0][r]);
    state.counters["of_" + calls[i].first] = median(ratios);
  }
}

}  // namespace

int main(int argc, char** argv) {
#ifdef TENON_ONEDNN
  onednn::prepare();
#endif
  std::vector<Problem> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Work kind : {Work::plain, Work::gelu, Work::swiglu})
      for (const bool nt : {false, true}) all.push_back({2048, 2048, 2048, dtype, kind, nt});
    for (const int64_t m : {1, 8, 128}) all.push_back({m, 4096, 4096, dtype, Work::plain, true});
    all.push_back({512, 4096, 1024, dtype, Work::plain, true});
  }
  for (const Problem& p : all)
    benchmark::RegisterBenchmark(p.name().c_str(), measure, p)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(p.m < 512 ? 40 : 12);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
