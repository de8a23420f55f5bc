// Measures the time of planning, and the overhead of a run compared with its kernels.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "bench/timing.h"
#include "lower/data.h"
#include "runtime/execute.h"
#include "tenon/plan.h"

namespace {

using namespace tenon;         // NOLINT: a benchmark of the library
using namespace tenon::bench;  // NOLINT

// Six ops. A new width makes every step and every kernel new.
std::string chain(int64_t width) {
  return "rmsnorm(64) linear(64," + std::to_string(2 * width) + ") bias swiglu linear(" +
         std::to_string(width) + ",64) bias";
}

PlanRequest request(const char* name) {
  PlanRequest r;
  r.cols = 64;
  r.dtype = DType::bf16;
  r.recipe = recipe(name);
  return r;
}

void cold(benchmark::State& state, const char* name) {
  const PlanRequest r = request(name);
  static int64_t width = 128;
  for (auto _ : state) {  // NOLINT
    state.PauseTiming();
    const std::string text = chain(++width);
    state.ResumeTiming();
    benchmark::DoNotOptimize(Plan::build(text, r));
  }
}

void cached(benchmark::State& state, const char* name) {
  const PlanRequest r = request(name);
  const std::string text = chain(128);
  Plan::build(text, r);
  for (auto _ : state) benchmark::DoNotOptimize(Plan::build(text, r));  // NOLINT
}

// The kernels of a pass with the arguments of a run. All are made before the timing starts.
class Kernels {
 public:
  Kernels(const Plan& plan, Pass pass, int64_t rows, std::span<void* const> memory,
          void* workspace) {
    set_observer(
        [&](const Step&, const RunArgs& args, const Options&, const std::function<void()>& run) {
          Call& c = calls_.emplace_back();
          c.args = args;
          c.in.assign(args.in.begin(), args.in.end());
          c.out.assign(args.out.begin(), args.out.end());
          run();
        });
    plan.run(pass, rows, memory, workspace, {.weights_changed = false});
    set_observer({});
    size_t next = 0;
    for (const PlanStep& s : data_of(plan).steps(pass)) {
      if (s.weights) continue;
      Call& c = calls_.at(next++);
      c.kernel = s.chosen.kernel.get();
      c.space.resize(c.kernel->workspace(c.args.rows) + kAlignment);
      c.args.in = c.in;
      c.args.out = c.out;
      const auto address = reinterpret_cast<uintptr_t>(c.space.data());
      c.args.workspace = c.space.data() + (kAlignment - address % kAlignment) % kAlignment;
    }
  }
  void run() const {
    for (const Call& c : calls_) c.kernel->run(c.args);
  }
  [[nodiscard]] size_t size() const { return calls_.size(); }

 private:
  static constexpr size_t kAlignment = 64;
  struct Call {
    const Kernel* kernel = nullptr;
    RunArgs args;
    std::vector<View> in, out;
    std::vector<char> space;
  };
  std::vector<Call> calls_;
};

template <class F>
double microseconds(int times, F f) {
  return 1e6 / times * seconds([&] {
           for (int i = 0; i < times; ++i) f();
         });
}

// Alternates batches of runs and of bare kernels. The overhead is the median of their differences.
void overhead(benchmark::State& state, const char* text, DType dtype, const char* name, Pass pass) {
  constexpr int64_t kBytes = 4096, kCols = 64;
  constexpr int kBatch = 100;
  const int64_t rows = kBytes / kCols / info(dtype).bytes;
  PlanRequest r = request(name);
  r.cols = kCols;
  r.dtype = dtype;
  const Plan plan = Plan::build(text, r);
  std::vector<std::vector<double>> memory;  // zeros, with the alignment of double
  std::vector<void*> addresses;
  for (const Buffer& b : plan.buffers()) {
    memory.emplace_back(static_cast<size_t>(b.bytes(rows)) / sizeof(double) + 8);
    addresses.push_back(memory.back().data());
  }
  for (size_t i = 0; i < addresses.size(); ++i) addresses[i] = addresses[plan.owner(i)];
  std::vector<double> workspace(static_cast<size_t>(plan.workspace_bytes(rows)) / sizeof(double) +
                                8);
  for (const Pass p : {Pass::forward, Pass::backward})
    plan.run(p, rows, addresses, workspace.data());
  const Kernels kernels(plan, pass, rows, addresses, workspace.data());
  std::vector<double> runs, alone, more;
  for (auto _ : state) {  // NOLINT
    runs.push_back(microseconds(kBatch, [&] {
      plan.run(pass, rows, addresses, workspace.data(), {.weights_changed = false});
    }));
    alone.push_back(microseconds(kBatch, [&] { kernels.run(); }));
    more.push_back(runs.back() - alone.back());
    state.SetIterationTime(runs.back() * 1e-6);
  }
  state.counters["steps"] = benchmark::Counter(static_cast<double>(kernels.size()));
  state.counters["kernels_us"] = benchmark::Counter(median(alone));
  state.counters["overhead_us"] = benchmark::Counter(median(more));
}

}  // namespace

int main(int argc, char** argv) {
  for (const char* name : {"none", "delayed", "mxfp8"}) {
    benchmark::RegisterBenchmark((std::string("plan cold ") + name).c_str(), cold, name)
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(200);
    benchmark::RegisterBenchmark((std::string("plan cached ") + name).c_str(), cached, name)
        ->Unit(benchmark::kMicrosecond);
  }
  const auto add = [](const char* text, DType dtype, const char* name) {
    for (const Pass pass : {Pass::forward, Pass::backward})
      benchmark::RegisterBenchmark(
          (std::string("run ") + text + " " + std::string(info(dtype).name) + " " + name +
           (pass == Pass::backward ? " backward" : " forward"))
              .c_str(),
          overhead, text, dtype, name, pass)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond)
          ->Iterations(300);
  };
  add("bias gelu", DType::f32, "none");
  add("rmsnorm linear(64,128) bias swiglu linear(64,64) bias", DType::bf16, "none");
  add("rmsnorm linear(64,128) bias swiglu linear(64,64) bias", DType::bf16, "mxfp8");
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
