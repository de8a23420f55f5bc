// Compares two builds of libtenon in one process, with alternating calls, to find slowdowns.
// build/builds_bench OLD/libtenon.so NEW/libtenon.so [part of the names of the cases to run]
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/statistics.h"
#include "tenon/tenon.h"

namespace {

using tenon::bench::estimate;
using tenon::bench::Estimate;
using tenon::bench::median;
using Clock = std::chrono::steady_clock;

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "builds_bench: %s\n", why.c_str());
  std::exit(1);
}

// Memory for the tensors of one build. All cases reuse it. It uses huge pages: the physical
// location of small pages could make one build slower.
class Arena {
 public:
  Arena() {
    base_ = static_cast<char*>(std::aligned_alloc(kHuge, kBytes));
    if (!base_) stop("no memory");
    madvise(base_, kBytes, MADV_HUGEPAGE);
  }
  void reset() { used_ = 0; }
  // Numbers from -0.5 to 0.5 in the dtype, which must be f32 or bf16. The first number is a valid
  // scale.
  void* take(int64_t bytes, int32_t dtype) {
    char* const at = base_ + used_;
    used_ += (static_cast<size_t>(bytes) + 127) / 64 * 64;
    if (used_ > kBytes) stop("a case needs more than the memory of a build");
    for (int64_t i = 0; i * 4 < bytes; ++i) {
      auto bits = std::bit_cast<uint32_t>(static_cast<float>((i + 60) % 97) / 97.0F - 0.5F);
      if (dtype == TENON_BF16) bits = bits >> 16 | (bits & 0xffff0000U);
      reinterpret_cast<uint32_t*>(at)[i] = bits;
    }
    return at;
  }

 private:
  static constexpr size_t kHuge = size_t{2} << 20, kBytes = size_t{512} << 20;
  char* base_ = nullptr;
  size_t used_ = 0;
};

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
  std::shared_ptr<tenon_view> view(int64_t rows, int64_t cols, int32_t dtype) const {
    const int64_t bytes = rows * cols * (dtype == TENON_F32 ? 4 : 2);
    return std::make_shared<tenon_view>(
        tenon_view{arena->take(bytes, dtype), rows, cols, cols, dtype});
  }
  void* library;
  std::unique_ptr<Arena> arena = std::make_unique<Arena>();
};

// The function to time, made for a build.
using Run = std::function<void()>;
struct Case {
  std::string name;
  std::function<Run(const Build&)> make;
};

struct Call {
  int64_t rows, cols;
  int32_t dtype = TENON_F32;
  int32_t precision = TENON_NATIVE;
};

std::string text(const Call& c) {
  return std::to_string(c.rows) + "x" + std::to_string(c.cols) +
         (c.dtype == TENON_BF16 ? " bf16" : " f32") +
         (c.precision == TENON_STRICT ? " strict" : "");
}

tenon_options options(int32_t precision) {
  tenon_options o{};
  o.size = sizeof o;
  o.precision = precision;
  return o;
}

// `inputs` is 2 for a gated activation.
Case forward(const char* kind, const char* act, const Call& c, int64_t inputs = 1) {
  return {std::string(kind) + ": forward " + act + " " + text(c), [=](const Build& b) -> Run {
            const auto x = b.view(c.rows, c.cols * inputs, c.dtype);
            const auto y = b.view(c.rows, c.cols, c.dtype);
            auto* const call = b.find(&tenon_forward, "tenon_forward");
            return [=, &b, how = options(c.precision)] {
              tenon_forward_args args{};
              args.size = sizeof args;
              args.x = x.get();
              args.y = y.get();
              b.check(call(act, &args, &how));
            };
          }};
}

Case backward(const char* kind, const char* act, const Call& c, int64_t inputs = 1) {
  return {std::string(kind) + ": backward + dbias " + act + " " + text(c),
          [=](const Build& b) -> Run {
            const auto x = b.view(c.rows, c.cols * inputs, c.dtype);
            const auto dx = b.view(c.rows, c.cols * inputs, c.dtype);
            const auto grad = b.view(c.rows, c.cols, c.dtype);
            const auto dbias = b.view(1, c.cols * inputs, c.dtype);
            auto* const call = b.find(&tenon_backward, "tenon_backward");
            return [=, &b, how = options(c.precision)] {
              tenon_backward_args args{};
              args.size = sizeof args;
              args.x = x.get();
              args.grad = grad.get();
              args.dx = dx.get();
              args.dbias = dbias.get();
              b.check(call(act, &args, &how));
            };
          }};
}

std::shared_ptr<tenon_plan> built(const Build& b, const char* chain, const Call& c,
                                  const char* recipe, const char* keep) {
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = c.cols;
  request.dtype = c.dtype;
  request.recipe = recipe;
  request.keep = keep;
  const tenon_options how = options(c.precision);
  tenon_plan* made = nullptr;
  b.check(b.find(&tenon_plan_build, "tenon_plan_build")(chain, &request, &how, &made));
  return {made, b.find(&tenon_plan_free, "tenon_plan_free")};
}

// By buffer: whether it is another tensor, so that it has no address of its own. Read from the JSON
// text, which all builds have in common.
std::vector<bool> other_tensors(const Build& b, const tenon_plan* plan, int64_t rows) {
  auto* const describe = b.find(&tenon_plan_describe, "tenon_plan_describe");
  size_t size = 0;
  b.check(describe(plan, rows, "json", nullptr, 0, &size));
  std::string json(size, '\0');
  b.check(describe(plan, rows, "json", json.data(), size, nullptr));
  std::vector<bool> list;
  const size_t end = json.rfind(']');
  for (size_t at = json.find('{', json.find("\"buffers\":[")); at < end;
       at = json.find('{', at + 1)) {
    const std::string one = json.substr(at, json.find('}', at) - at);
    list.push_back(one.find("\"same_as\"") != std::string::npos);
  }
  return list;
}

// Both passes of a plan.
Case plan(const char* kind, const char* chain, const Call& c, const char* recipe = "none",
          const char* keep = "input") {
  return {
      std::string(kind) + ": " + chain + " " + text(c) + " " + recipe + " " + keep,
      [=](const Build& b) -> Run {
        const auto made = built(b, chain, c, recipe, keep);
        auto* const sizes = b.find(&tenon_plan_sizes, "tenon_plan_sizes");
        std::vector<int64_t> bytes(1);
        int64_t workspace = 0;
        // tenon_plan_sizes accepts only the exact number of buffers, so this loop searches for it.
        while (sizes(made.get(), c.rows, bytes.data(), bytes.size(), &workspace) != TENON_OK) {
          bytes.push_back(0);
          if (bytes.size() > 1000) b.check(TENON_RUNTIME);
        }
        const std::vector<bool> other = other_tensors(b, made.get(), c.rows);
        std::vector<void*> memory;
        for (const int64_t n : bytes)
          memory.push_back(other[memory.size()] ? nullptr : b.arena->take(n, c.dtype));
        void* const work = b.arena->take(workspace, c.dtype);
        auto* const run = b.find(&tenon_plan_run, "tenon_plan_run");
        return [=, &b] {
          for (const int pass : {0, 1})
            b.check(run(made.get(), pass, c.rows, memory.data(), memory.size(), work, 0, nullptr));
        };
      }};
}

// Plans a chain. `known`: the plan is in the cache. Otherwise each call uses a new width.
Case planning(const char* chain, bool known) {
  return {std::string(known ? "small calls: a known plan of " : "planning: ") + chain,
          [=](const Build& b) -> Run {
            auto cols = std::make_shared<int64_t>(64);
            return [=, &b] {
              built(b, chain, {1, *cols}, "none", "input");
              if (!known) *cols += 2;
            };
          }};
}

std::vector<Case> cases() {
  constexpr const char *kSmall = "small calls", *kAct = "activations", *kNorm = "norms",
                       *kProduct = "products", *kMlp = "MLP";
  constexpr auto kBf16 = TENON_BF16;
  constexpr auto kStrict = TENON_STRICT;
  const char* const mlp = "rmsnorm linear(512,2048) bias swiglu linear(1024,512) bias";
  std::vector<Case> all{
      forward(kSmall, "gelu", {4, 8}),
      forward(kSmall, "x*sigmoid(1.5*x) + 0.1*tanh(x)", {4, 8}),
      forward(kSmall, "swiglu", {4, 8, kBf16}, 2),
      backward(kSmall, "gelu", {4, 8}),
      plan(kSmall, "bias gelu", {4, 64}),
      plan(kSmall, "rmsnorm linear(out=64) bias silu linear(out=64) bias", {4, 64}),
      plan(kSmall, "layernorm", {4, 256}),
      planning("rmsnorm linear(out=64) bias swiglu linear(out=64) bias", true),
      planning("rmsnorm linear(out=64) bias swiglu linear(out=64) bias", false),

      forward(kAct, "gelu", {512, 2048}),
      forward(kAct, "gelu", {512, 2048, kBf16}),
      forward(kAct, "gelu", {512, 2048, kBf16, kStrict}),
      forward(kAct, "swiglu", {512, 1024, kBf16}, 2),
      backward(kAct, "silu", {256, 1024}),
      backward(kAct, "swiglu", {256, 1024, kBf16}, 2),
      plan(kAct, "bias gelu", {512, 1024, kBf16}),
      plan(kAct, "bias dropout(0.1) add", {512, 1024, kBf16}),

      plan(kNorm, "layernorm", {2048, 1024}),
      plan(kNorm, "rmsnorm", {2048, 1024}),
      plan(kNorm, "l2norm", {1024, 1024}),
      plan(kNorm, "layernorm", {1024, 1024, kBf16}),
      plan(kNorm, "add rmsnorm", {1024, 1024, kBf16}),
      plan(kNorm, "layernorm", {1024, 1024, kBf16, kStrict}),

      plan(kProduct, "linear(out=1024) bias gelu", {64, 1024}),
      plan(kProduct, "linear(out=1024) bias gelu", {512, 1024}),
      plan(kProduct, "linear(out=2048)", {256, 2048}),
      plan(kProduct, "linear(out=1024)", {512, 1024, kBf16}),
      plan(kProduct, "linear(out=1024)", {256, 1024, kBf16, kStrict}),
  };
  for (const char* recipe : {"delayed", "current", "mxfp8", "block"})
    all.push_back(plan(kProduct, "gelu linear(out=512)", {256, 512, kBf16}, recipe));
  all.push_back(plan(kMlp, mlp, {256, 512}));
  for (const char* keep : {"input", "fp8", "recompute"})
    all.push_back(plan(kMlp, mlp, {256, 512, kBf16}, "none", keep));
  all.push_back(plan(kMlp, mlp, {256, 512, kBf16, kStrict}));
  for (const char* recipe : {"delayed", "mxfp8"})
    all.push_back(plan(kMlp, mlp, {256, 512, kBf16}, recipe));
  return all;
}

double seconds(const Run& run, int count) {
  const auto start = Clock::now();
  for (int i = 0; i < count; ++i) run();
  return std::chrono::duration<double>(Clock::now() - start).count() / count;
}

struct Result {
  double micros[2];  // medians
  Estimate ratio;
  size_t rounds;
};

Result measure(const Run (&runs)[2]) {
  constexpr double kBatch = 2e-4, kTotal = 3;  // seconds
  constexpr int kLeast = 41, kMost = 4000;
  for (const Run& run : runs) seconds(run, 2);
  const double once = seconds(runs[0], 3);
  const int count = std::max(1, static_cast<int>(kBatch / once));
  const int rounds = std::clamp(static_cast<int>(kTotal / (2 * once * count)), kLeast, kMost);
  std::vector<double> times[2], ratios;
  for (int r = 0; r < rounds; ++r) {
    double pair[2];
    for (const int k : {r % 2, 1 - r % 2}) {
      pair[k] = seconds(runs[k], count);
      times[k].push_back(pair[k]);
    }
    ratios.push_back(pair[1] / pair[0]);
  }
  Result result{};
  result.rounds = ratios.size();
  for (const int k : {0, 1}) result.micros[k] = median(times[k]) * 1e6;
  result.ratio = estimate(ratios);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) stop("give two libraries: builds_bench OLD NEW [part of a name]");
  constexpr double kSlower = 1.03;
  const Build builds[] = {Build(argv[1]), Build(argv[2])};
  const std::string part = argc == 4 ? argv[3] : "";
  std::vector<std::string> slower;
  std::printf("%-96s %11s %11s %8s %15s %6s\n", "case", "old us", "new us", "new/old",
              "95 % interval", "rounds");
  for (const Case& c : cases()) {
    if (c.name.find(part) == std::string::npos) continue;
    for (const Build& b : builds) b.arena->reset();
    const Run runs[] = {c.make(builds[0]), c.make(builds[1])};
    const Result r = measure(runs);
    std::printf("%-96s %11.3f %11.3f %8.3f [%6.3f, %6.3f] %6zu\n", c.name.c_str(), r.micros[0],
                r.micros[1], r.ratio.median, r.ratio.low, r.ratio.high, r.rounds);
    std::fflush(stdout);
    if (r.ratio.low > kSlower) slower.push_back(c.name);
  }
  std::printf("%zu intervals are wholly above %.2f\n", slower.size(), kSlower);
  for (const std::string& name : slower) std::printf("  %s\n", name.c_str());
}
