// Runs the plain cases on the CPU under Google Benchmark, as shares of the copy speed of the same
// run.
#include <benchmark/benchmark.h>

#include "bench/cpu.h"

namespace {

using namespace tenon;         // NOLINT: a benchmark of the library
using namespace tenon::bench;  // NOLINT

constexpr Shape kShape{2048, 4096};  // 16 MB per bf16 stream: larger than every cache

void measure(benchmark::State& state, const BenchCase& c, const Options& options) {
  const BenchEntry entry = bench_entry(c, kShape, options);
  const CpuArena arena({entry}, kShape, c.in);
  const CpuCase measured(arena, entry, options);
  std::vector<double> times, shares;
  for (auto _ : state) {  // NOLINT
    const CpuCase::Round round = measured.round();
    state.SetIterationTime(round.seconds);
    times.push_back(round.seconds);
    shares.push_back(round.copy / round.seconds);
  }
  state.SetLabel(entry.makers());
  state.counters["GB/s"] = static_cast<double>(entry.bytes()) * 1e-9 / median(times);
  state.counters["share_of_copy"] = median(shares);
}

}  // namespace

int main(int argc, char** argv) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const Precision precision : {Precision::native, Precision::strict})
      for (const BenchCase& c : bench_cases(dtype, true)) {
        // In f32, native is the same as strict.
        if (c.out.scaling != Scaling::none ||
            (dtype == DType::f32 && precision == Precision::native))
          continue;
        const std::string name =
            c.name() + (precision == Precision::strict ? " strict" : " native");
        benchmark::RegisterBenchmark(name.c_str(), measure, c, Options{.precision = precision})
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond)
            ->MinTime(0.2);
      }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
