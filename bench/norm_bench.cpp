// Norms forward and backward, as a share of the best copy with the same reads and writes.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/pool.h"
#include "lower/single_norm.h"
#include "runtime/execute.h"
#include "tenon/tenon.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace tenon;  // NOLINT: a benchmark of the library
using Clock = std::chrono::steady_clock;

constexpr int64_t kRows = 8192, kCols = 4096;

double seconds(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> v) {
  std::ranges::nth_element(v, v.begin() + static_cast<int64_t>(v.size() / 2));
  return v[v.size() / 2];
}

// Whole cache lines at the start of a page.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : data_(bytes + 4096) {}
  [[nodiscard]] char* data() {
    const auto address = reinterpret_cast<uintptr_t>(data_.data());
    return data_.data() + (4096 - address % 4096) % 4096;
  }

 private:
  std::vector<char> data_;
};

Buffer random_matrix(DType dtype, int64_t elements, uint32_t seed) {
  const int64_t size = info(dtype).bytes;
  Buffer b(static_cast<size_t>(elements * size));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  const int64_t own = std::min<int64_t>(elements, 1 << 16);
  for (int64_t i = 0; i < own; ++i) {
    const uint32_t code = encode(dtype, normal(random));
    std::memcpy(b.data() + i * size, &code, static_cast<size_t>(size));
  }
  for (int64_t i = own; i < elements; i += own)
    std::memcpy(b.data() + i * size, b.data(),
                static_cast<size_t>(std::min(own, elements - i) * size));
  return b;
}

#if defined(__x86_64__)
// Reads one or two streams, writes one past the cache; `pages` at a time, the next ones prefetched.
template <bool two, int pages>
[[gnu::target("avx512f")]] void stream(char* to, const char* a, const char* b, int64_t bytes) {
  constexpr int64_t kStep = pages == 1 ? 64 : 4096;
  constexpr int64_t kBlock = pages == 1 ? 64 : pages * 4096;
  constexpr int64_t kAhead = pages == 1 ? 4096 : kBlock;
  for (int64_t block = 0; block < bytes; block += kBlock)
    for (int64_t line = 0; line < kStep; line += 64) {
      __m512i v[pages];
      for (int k = 0; k < pages; ++k) {
        const int64_t at = block + line + k * 4096;
        __builtin_prefetch(a + at + kAhead);
        v[k] = _mm512_loadu_si512(a + at);
        if constexpr (two) {
          __builtin_prefetch(b + at + kAhead);
          v[k] = _mm512_or_si512(v[k], _mm512_loadu_si512(b + at));
        }
      }
      for (int k = 0; k < pages; ++k)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + block + line + k * 4096), v[k]);
    }
  _mm_sfence();
}
#endif

// The ways to copy with `reads` streams of `bytes` to one.
std::vector<std::function<void()>> copies(int reads, char* to, const char* a, const char* b,
                                          int64_t bytes) {
  std::vector<std::function<void()>> list;
  const auto in_parts = [bytes](auto copy) {
    constexpr int64_t kPage = 16384;
    return [copy, bytes] {
      cpu::parallel_for(bytes / kPage, [&](int64_t begin, int64_t end) {
        copy(begin * kPage, (end - begin) * kPage);
      });
    };
  };
  if (reads == 1)
    list.push_back(in_parts(
        [=](int64_t at, int64_t n) { std::memcpy(to + at, a + at, static_cast<size_t>(n)); }));
  list.push_back(in_parts([=](int64_t at, int64_t n) {
    for (int64_t i = at; i < at + n; ++i)
      to[i] = reads == 1 ? a[i] : static_cast<char>(a[i] | b[i]);
  }));
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    const auto add = [&](auto f) {
      list.push_back(in_parts([=](int64_t at, int64_t n) { f(to + at, a + at, b + at, n); }));
    };
    reads == 1 ? add(stream<false, 1>) : add(stream<true, 1>);
    reads == 1 ? add(stream<false, 4>) : add(stream<true, 4>);
  }
#endif
  return list;
}

struct Problem {
  NormKind kind;
  bool backward;
  DType dtype;

  [[nodiscard]] std::string name() const {
    constexpr const char* kNames[] = {"layernorm", "rmsnorm", "l2norm"};
    return std::string(kNames[static_cast<size_t>(kind)]) + (backward ? ".bwd " : " ") +
           std::string(info(dtype).name);
  }
};

void measure(benchmark::State& state, const Problem& p) {
  using A = NormArgs;
  NormForm form;
  form.kind = p.kind;
  form.cols = kCols;
  form.x = form.grad = p.dtype;
  form.y = p.dtype;
  const bool layer = p.kind == NormKind::layer;
  if (p.kind != NormKind::l2) form.gamma = p.dtype;
  if (layer) form.beta = p.dtype;
  form.mean = layer;
  form.rstdev = true;
  if (p.backward && p.kind != NormKind::l2) form.dgamma = p.dtype;
  if (p.backward && layer) form.dbeta = p.dtype;
  const int64_t bytes = kRows * kCols * info(p.dtype).bytes;
  Buffer x = random_matrix(p.dtype, kRows * kCols, 1);
  Buffer grad = random_matrix(p.dtype, kRows * kCols, 2);
  Buffer gamma = random_matrix(p.dtype, kCols, 3), beta = random_matrix(p.dtype, kCols, 4);
  Buffer y(static_cast<size_t>(bytes)), sums(static_cast<size_t>(2 * kCols * 4));
  std::vector<float> mean(kRows), rstdev(kRows, 1.0F);
  std::vector<View> in(A::inputs), out(A::outputs);
  in[A::x] = matrix(x.data(), p.dtype, kRows, kCols);
  in[A::grad] = matrix(grad.data(), p.dtype, kRows, kCols);
  in[A::gamma] = matrix(gamma.data(), p.dtype, 1, kCols);
  in[A::beta] = matrix(beta.data(), p.dtype, 1, kCols);
  in[A::mean_in] = out[A::mean] = matrix(mean.data(), DType::f32, kRows, 1);
  in[A::rstdev_in] = out[A::rstdev] = matrix(rstdev.data(), DType::f32, kRows, 1);
  out[A::y] = matrix(y.data(), p.dtype, kRows, kCols);
  out[A::dgamma] = matrix(sums.data(), p.dtype, 1, kCols);
  out[A::dbeta] = matrix(sums.data() + kCols * 4, p.dtype, 1, kCols);
  const Step step = p.backward ? norm_backward_step(form) : norm_step(form);
  const float eps = 1e-5F;
  const auto call = [&] {
    execute(step, {.rows = kRows, .in = in, .out = out, .parameters = std::span(&eps, 1)}, {});
  };
  const auto ways = copies(p.backward ? 2 : 1, y.data(), x.data(), grad.data(), bytes);
  call();
  for (const auto& copy : ways) copy();
  std::vector<double> times;
  std::vector<double> shares;
  for (auto _ : state) {  // NOLINT
    times.push_back(seconds(call));
    state.SetIterationTime(times.back());
    double best = seconds(ways[0]);
    for (size_t i = 1; i < ways.size(); ++i) best = std::min(best, seconds(ways[i]));
    shares.push_back(best / times.back());
  }
  state.SetLabel(std::string(kernel_for(step, Device::cpu).maker));
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(step.bytes(kRows)) * 1e-9 / median(times));
  state.counters["share_of_copy"] = benchmark::Counter(median(shares));
}

}  // namespace

int main(int argc, char** argv) {
  for (const NormKind kind : {NormKind::rms, NormKind::layer, NormKind::l2})
    for (const bool backward : {false, true})
      for (const DType dtype : {DType::bf16, DType::f32}) {
        const Problem p{kind, backward, dtype};
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
