// Times a training step of a SwiGLU MLP, forward and backward, in alternating rounds of one run. It
// compares one plan, one plan per op, and oneDNN's matmuls with the library's elementwise kernels.
#include "bench/rounds.h"
#include "tenon/plan.h"
#include "tenon/tenon.hpp"
#ifdef TENON_ONEDNN
#include "bench/onednn.h"
#endif

namespace {

using namespace tenon;         // NOLINT: a benchmark of the library
using namespace tenon::bench;  // NOLINT

constexpr int64_t kRows = 4096;

// A plan with its own memory. Named tensors may use the memory of another plan.
class Part {
 public:
  Part(const std::string& chain, DType dtype, int64_t cols) : plan_(make(chain, dtype, cols)) {
    const std::vector<Buffer>& all = plan_.buffers();
    own_.resize(all.size());
    memory_.resize(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].role == Role::workspace) continue;
      own_[i].resize(static_cast<size_t>(all[i].bytes(kRows)));
      const int64_t elements = all[i].bytes(kRows) / info(all[i].dtype).bytes;
      // Values of about the magnitude of a training run.
      const float scale = all[i].role == Role::param ? 0.02F : 1.0F;
      if (all[i].role == Role::param || all[i].role == Role::input)
        own_[i] = uniform_codes(all[i].dtype, elements, static_cast<uint32_t>(i + 1), scale);
      memory_[i] = own_[i].data();
    }
    workspace_.resize(static_cast<size_t>(plan_.workspace_bytes(kRows)));
  }

  [[nodiscard]] void*& at(std::string_view name) {
    const std::vector<Buffer>& all = plan_.buffers();
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].name == name) return memory_[i];
    std::fprintf(stderr, "mlp_bench: no tensor %s\n", std::string(name).c_str());
    std::abort();
  }
  void run(Pass pass) { plan_.run(pass, kRows, memory_, workspace_.data()); }

 private:
  static Plan make(const std::string& chain, DType dtype, int64_t cols) {
    PlanRequest request;
    request.dtype = dtype;
    request.cols = cols;
    return Plan::build(chain, request);
  }
  Plan plan_;
  std::vector<std::vector<char>> own_;
  std::vector<void*> memory_;
  std::vector<char> workspace_;
};

void measure(benchmark::State& state, DType dtype, int64_t width) {
  const int64_t hidden = 4 * width;
  const std::string first = str("linear(", width, ",", 2 * hidden, "):up");
  const std::string last = str("linear(", hidden, ",", width, "):down");
  Part fused(str(first, " swiglu ", last), dtype, width);
  Part up(first, dtype, width), act("swiglu", dtype, 2 * hidden), down(last, dtype, hidden);
  const auto join = [](Part& a, Part& b) {
    b.at("x") = a.at("y");
    a.at("dy") = b.at("dx");
  };
  join(up, act);
  join(act, down);
  NamedCalls calls{{"fused",
                    [&] {
                      fused.run(Pass::forward);
                      fused.run(Pass::backward);
                    }},
                   {"separate", [&] {
                      for (Part* p : {&up, &act, &down}) p->run(Pass::forward);
                      for (Part* p : {&down, &act, &up}) p->run(Pass::backward);
                    }}};
#ifdef TENON_ONEDNN
  using onednn::product;
  const auto tensor = [&](Part& p, const char* name, int64_t rows, int64_t cols, bool turned) {
    return onednn::Matrix{p.at(name), dtype, rows, cols, turned};
  };
  const int64_t m = kRows;
  const auto x = tensor(up, "x", m, width, false), h = tensor(up, "y", m, 2 * hidden, false);
  const auto a = tensor(act, "y", m, hidden, false), y = tensor(down, "y", m, width, false);
  const auto dy = tensor(down, "dy", m, width, false), da = tensor(down, "dx", m, hidden, false);
  const auto dh = tensor(act, "dx", m, 2 * hidden, false), dx = tensor(up, "dx", m, width, false);
  const auto w1 = tensor(up, "up.weight", 2 * hidden, width, false);
  const auto w2 = tensor(down, "down.weight", width, hidden, false);
  const auto dw1 = tensor(up, "dup.weight", 2 * hidden, width, false);
  const auto dw2 = tensor(down, "ddown.weight", width, hidden, false);
  const auto f1 = product(x, w1.t(), h), f2 = product(a, w2.t(), y);
  const auto b1 = product(dy, w2, da), b2 = product(dy.t(), a, dw2);
  const auto b3 = product(dh, w1, dx), b4 = product(dh.t(), x, dw1);
  calls.emplace_back("onednn", [&] {
    f1();
    act.run(Pass::forward);
    f2();
    b1();
    b2();
    act.run(Pass::backward);
    b3();
    b4();
  });
#endif
  const auto times = rounds(state, calls);
  for (size_t i = 0; i < calls.size(); ++i)
    state.counters[calls[i].first + "_ms"] = 1e3 * median(times[i]);
  for (size_t i = 1; i < calls.size(); ++i)
    state.counters["best_of_" + calls[i].first] =
        *std::ranges::min_element(times[i]) / *std::ranges::min_element(times[0]);
}

}  // namespace

int main(int argc, char** argv) {
#ifdef TENON_ONEDNN
  onednn::prepare();
#endif
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t width : {256, 1024})
      benchmark::RegisterBenchmark(str(info(dtype).name, " width ", width).c_str(), measure, dtype,
                                   width)
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond)
          ->Iterations(width > 256 ? 5 : 15);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
