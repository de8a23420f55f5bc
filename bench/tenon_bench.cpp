// Every activation forward and backward, as a share of copy speed measured in the same run.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/pool.h"
#include "tenon/tenon.hpp"

namespace {

using namespace tenon;  // NOLINT: a benchmark of the library
using Clock = std::chrono::steady_clock;

constexpr int64_t kRows = 2048, kCols = 4096;  // 16 MB a bf16 stream: beyond every cache

double seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Numbers of ordinary size; zeros or constants would flatter branches and powers.
std::vector<char> random_matrix(DType dtype, int64_t elements, uint32_t seed) {
  std::vector<char> data(static_cast<size_t>(elements * info(dtype).bytes));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t code = encode(dtype, normal(random));
    std::memcpy(data.data() + i * info(dtype).bytes, &code, static_cast<size_t>(info(dtype).bytes));
  }
  return data;
}

double median(std::vector<double> v) {
  std::ranges::nth_element(v, v.begin() + static_cast<int64_t>(v.size() / 2));
  return v[v.size() / 2];
}

struct Problem {
  std::string op;
  bool backward;
  DType dtype;
  Precision precision;
  bool dbias;

  [[nodiscard]] std::string name() const {
    return op + (backward ? ".bwd " : " ") + std::string(info(dtype).name) +
           (dbias ? " +dbias" : "") + (precision == Precision::strict ? " strict" : " native");
  }
};

// Times the call and, round by round, a copy that moves as many bytes with as many threads.
void measure(benchmark::State& state, const Problem& p) {
  const Activation f = activation(p.op);
  const int64_t in_cols = kCols * f.inputs;
  const int64_t bytes = info(p.dtype).bytes;
  std::vector<char> x = random_matrix(p.dtype, kRows * in_cols, 1);
  std::vector<char> grad = random_matrix(p.dtype, kRows * kCols, 2);
  std::vector<char> out(static_cast<size_t>(kRows * in_cols * bytes));
  std::vector<char> dbias(static_cast<size_t>(in_cols * bytes));
  const Options options{.precision = p.precision};
  const View xv = matrix(x.data(), p.dtype, kRows, in_cols);
  const View gv = matrix(grad.data(), p.dtype, kRows, kCols);
  const auto call = [&] {
    if (!p.backward)
      return forward(f, {.x = xv, .y = matrix(out.data(), p.dtype, kRows, kCols)}, options);
    backward(f,
             {.grad = gv,
              .x = xv,
              .dx = matrix(out.data(), p.dtype, kRows, in_cols),
              .dbias = p.dbias ? matrix(dbias.data(), p.dtype, 1, in_cols) : View{}},
             options);
  };
  const int64_t moved = bytes * kRows * (p.backward ? 2 * in_cols + kCols : in_cols + kCols);
  std::vector<char> from(static_cast<size_t>(moved / 2), 1), to(from.size());
  const auto copy = [&] {
    constexpr int64_t kPieces = 64;
    const int64_t piece = static_cast<int64_t>(from.size()) / kPieces;
    cpu::parallel_for(kPieces, [&](int64_t begin, int64_t end) {
      std::memcpy(to.data() + begin * piece, from.data() + begin * piece,
                  static_cast<size_t>((end - begin) * piece));
    });
  };
  call();
  copy();
  std::vector<double> times;
  std::vector<double> shares;
  for (auto _ : state) {  // NOLINT
    auto start = Clock::now();
    call();
    times.push_back(seconds(start));
    state.SetIterationTime(times.back());
    start = Clock::now();
    copy();
    shares.push_back(seconds(start) / times.back());
  }
  // Medians: on a shared machine a neighbour's minute must not decide a row.
  state.counters["GB/s"] = benchmark::Counter(static_cast<double>(moved) * 1e-9 / median(times));
  state.counters["share_of_copy"] = benchmark::Counter(median(shares));
}

}  // namespace

int main(int argc, char** argv) {
  for (const std::string& name : activation_names())
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const Precision precision : {Precision::native, Precision::strict})
        for (const bool backward : {false, true})
          for (const bool dbias : {false, true}) {
            // In f32 native is strict.
            if ((dbias && !backward) || (dtype == DType::f32 && precision == Precision::native))
              continue;
            const Problem p{name, backward, dtype, precision, dbias};
            benchmark::RegisterBenchmark(p.name().c_str(), measure, p)
                ->UseManualTime()
                ->Unit(benchmark::kMillisecond)
                ->MinTime(0.2);
          }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
