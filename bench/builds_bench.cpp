// Two builds of libtenon in one process, call by call in turn: whether one got slower.
//   build/builds_bench OLD/libtenon.so NEW/libtenon.so
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tenon/tenon.h"

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "builds_bench: %s\n", why.c_str());
  std::exit(1);
}

// The functions of one build.
struct Build {
  explicit Build(const char* path) : library(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (!library) stop(dlerror());
  }
  template <class F>
  F* find(F* /*type*/, const char* name) const {
    void* const found = dlsym(library, name);
    if (!found) stop(std::string(name) + " is not in the library");
    return reinterpret_cast<F*>(found);
  }
  void check(int code) const {
    if (code != TENON_OK) stop(find(&tenon_last_error, "tenon_last_error")());
  }
  void* library;
};

struct Case {
  std::string name;
  std::function<void()> run;
};

// Memory of a case lives as long as the program.
float* floats(size_t n) {
  auto* const memory = static_cast<float*>(std::aligned_alloc(64, (n * 4 + 63) / 64 * 64));
  for (size_t i = 0; i < n; ++i) memory[i] = static_cast<float>(i % 97) / 97.0F - 0.5F;
  return memory;
}
tenon_view* view(int64_t rows, int64_t cols) {
  return new tenon_view{floats(static_cast<size_t>(rows * cols)), rows, cols, cols, TENON_F32};
}

Case forward(const Build& b, const char* act, int64_t rows, int64_t cols) {
  auto* const args = new tenon_forward_args{};
  args->size = sizeof *args;
  args->x = view(rows, cols);
  args->y = view(rows, cols);
  auto* const call = b.find(&tenon_forward, "tenon_forward");
  return {std::string("forward ") + act + " " + std::to_string(rows) + "x" + std::to_string(cols),
          [=] { b.check(call(act, args, nullptr)); }};
}

Case backward(const Build& b, const char* act, int64_t rows, int64_t cols) {
  auto* const args = new tenon_backward_args{};
  args->size = sizeof *args;
  args->x = view(rows, cols);
  args->grad = view(rows, cols);
  args->dx = view(rows, cols);
  args->dbias = view(1, cols);
  auto* const call = b.find(&tenon_backward, "tenon_backward");
  return {std::string("backward + dbias ") + act + " " + std::to_string(rows) + "x" +
              std::to_string(cols),
          [=] { b.check(call(act, args, nullptr)); }};
}

// Both passes of a plan.
Case plan(const Build& b, const char* chain, int64_t rows, int64_t cols) {
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = cols;
  tenon_plan* made = nullptr;
  b.check(b.find(&tenon_plan_build, "tenon_plan_build")(chain, &request, nullptr, &made));
  std::string text(1 << 20, '\0');
  size_t size = 0;
  b.check(b.find(&tenon_plan_describe, "tenon_plan_describe")(made, rows, "json", text.data(),
                                                              text.size(), &size));
  size_t buffers = 0;
  for (size_t at = text.find("\"role\""); at != std::string::npos;
       at = text.find("\"role\"", at + 1))
    ++buffers;
  std::vector<int64_t> bytes(buffers);
  int64_t workspace = 0;
  b.check(b.find(&tenon_plan_sizes, "tenon_plan_sizes")(made, rows, bytes.data(), bytes.size(),
                                                        &workspace));
  auto* const memory = new std::vector<void*>;
  for (const int64_t n : bytes) memory->push_back(floats(static_cast<size_t>(n / 4 + 16)));
  void* const work = floats(static_cast<size_t>(workspace / 4 + 64));
  auto* const run = b.find(&tenon_plan_run, "tenon_plan_run");
  return {std::string("plan ") + chain + " " + std::to_string(rows) + " rows", [=] {
            for (const int pass : {0, 1})
              b.check(run(made, pass, rows, memory->data(), memory->size(), work, 0, nullptr));
          }};
}

std::vector<Case> cases(const Build& b) {
  return {forward(b, "gelu", 4, 8),
          forward(b, "x*sigmoid(1.5*x) + 0.1*tanh(x)", 4, 8),
          backward(b, "gelu", 4, 8),
          backward(b, "silu", 256, 1024),
          plan(b, "bias gelu", 4, 64),
          plan(b, "rmsnorm linear(out=64) bias silu linear(out=64) bias", 4, 64),
          plan(b, "layernorm", 4, 256),
          plan(b, "layernorm", 2048, 1024),
          plan(b, "rmsnorm", 2048, 1024),
          plan(b, "linear(out=1024) bias gelu", 64, 1024),
          plan(b, "linear(out=1024) bias gelu", 1024, 1024),
          plan(b, "linear(out=2048)", 2048, 2048)};
}

double seconds(const std::function<void()>& run, int count) {
  const auto start = Clock::now();
  for (int i = 0; i < count; ++i) run();
  return std::chrono::duration<double>(Clock::now() - start).count() / count;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) stop("give two libraries: builds_bench OLD NEW");
  const Build builds[] = {Build(argv[1]), Build(argv[2])};
  const std::vector<Case> all[] = {cases(builds[0]), cases(builds[1])};
  std::printf("%-64s %12s %12s %8s\n", "case", "old us", "new us", "new/old");
  for (size_t c = 0; c < all[0].size(); ++c) {
    constexpr double kBatch = 2e-4, kTotal = 2;  // seconds
    const double once = seconds(all[0][c].run, 3);
    const int count = std::max(1, static_cast<int>(kBatch / once));
    const int rounds = std::clamp(static_cast<int>(kTotal / (2 * once * count)), 7, 4000);
    std::vector<double> times[2], ratios;
    for (int r = 0; r < rounds; ++r) {
      double pair[2];
      for (const int k : {r % 2, 1 - r % 2}) {
        pair[k] = seconds(all[k][c].run, count);
        times[k].push_back(pair[k]);
      }
      ratios.push_back(pair[1] / pair[0]);
    }
    const auto median = [](std::vector<double>& v) {
      std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
      return v[v.size() / 2];
    };
    std::printf("%-64s %12.3f %12.3f %8.3f\n", all[0][c].name.c_str(), median(times[0]) * 1e6,
                median(times[1]) * 1e6, median(ratios));
  }
}
