// `tenon demo`: an activation from text to a checked, timed, differentiated kernel.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "cli/commands.h"
#include "cli/progress.h"
#include "plan/execute.h"
#include "step/verify.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

namespace {

constexpr const char* kName = "soft_step";
constexpr const char* kFormula = "x*sigmoid(beta*x) + 0.1*tanh(x); beta = 1.5";
constexpr int64_t kRows = 1024, kCols = 4096;

double median_ms(const std::function<void()>& f) {
  constexpr int kRounds = 7;
  std::vector<double> times;
  for (int i = 0; i < kRounds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    times.push_back(ms.count());
  }
  std::ranges::nth_element(times, times.begin() + kRounds / 2);
  return times[kRounds / 2];
}

// What one would write by hand: the formula and its derivative in plain C++, one thread.
void plain_forward(const std::vector<float>& x, std::vector<float>& y) {
  for (size_t i = 0; i < x.size(); ++i)
    y[i] = x[i] / (1 + std::exp(-1.5F * x[i])) + 0.1F * std::tanh(x[i]);
}
void plain_backward(const std::vector<float>& x, const std::vector<float>& g,
                    std::vector<float>& dx) {
  for (size_t i = 0; i < x.size(); ++i) {
    const float s = 1 / (1 + std::exp(-1.5F * x[i]));
    const float t = std::tanh(x[i]);
    dx[i] = g[i] * (s + x[i] * 1.5F * s * (1 - s) + 0.1F * (1 - t * t));
  }
}

// Checks each executed step of a small call against float64.
std::string checked(const std::function<void()>& call) {
  std::string result = "no step ran";
  set_observer(
      [&](const Step& s, const RunArgs& a, const Options&, const std::function<void()>& run) {
        run();
        const auto wrong = verify(s, a);
        result = wrong ? "WRONG: " + *wrong : "within the bound";
      });
  call();
  set_observer({});
  return result;
}

}  // namespace

int demo() {
  fmt::print(
      "This defines an activation from one line of text, derives its gradient, runs both on this "
      "machine,\nchecks them against float64 and times them against plain C++. It takes a few "
      "seconds.\n\n");
  fmt::print("1. define   {}(x) = {}\n", kName, kFormula);
  define(kName, kFormula);

  fmt::print("\n2. derive\n");
  Graph graph;
  const Activation f = activation(kName);
  const Expr x = graph.load(0);
  const Expr g = graph.load(1);
  const Expr beta = graph.load(2);
  const std::vector<Expr> d =
      grad(call(f, std::span(&x, 1), std::span(&beta, 1)), g, std::span(&x, 1));
  const std::vector<std::string> names{"x", "g", "beta"};
  const uint32_t root = graph.id(d[0]);
  fmt::print("{}", "   dx, with g the incoming gradient:\n");
  const std::string text = formula_text(graph, std::span(&root, 1), names);
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    fmt::print("     {}\n", text.substr(at, end - at));
    at = end + 1;
  }

  fmt::print("\n3. run and check, bf16 in and out, {} x {}, {} threads\n", kRows, kCols, threads());
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 2);
  const size_t n = kRows * kCols;
  std::vector<float> xs(n), gs(n), ys(n), ds(n);
  for (size_t i = 0; i < n; ++i) xs[i] = normal(random), gs[i] = normal(random);
  std::vector<uint16_t> xb(n), gb(n), yb(n), db(n), biasb(kCols), dbias(kCols);
  for (size_t i = 0; i < n; ++i) {
    xb[i] = static_cast<uint16_t>(encode<DType::bf16>(xs[i]));
    gb[i] = static_cast<uint16_t>(encode<DType::bf16>(gs[i]));
  }
  const auto bf16 = [&](std::vector<uint16_t>& v, int64_t rows) {
    return matrix(v.data(), DType::bf16, rows, kCols);
  };
  constexpr int64_t kChecked = 64;
  bool good = true;
  const auto report = [&](const char* what, const std::function<void()>& call) {
    const std::string result = checked(call);
    good = good && result == "within the bound";
    fmt::print("   {:<42} {}\n", what, result);
  };
  report("forward", [&] { forward(f, {.x = bf16(xb, kChecked), .y = bf16(yb, kChecked)}); });
  report("bias + forward", [&] {
    forward(f, {.x = bf16(xb, kChecked), .bias = bf16(biasb, 1), .y = bf16(yb, kChecked)});
  });
  report("backward + bias gradient, one pass", [&] {
    backward(f, {.grad = bf16(gb, kChecked),
                 .x = bf16(xb, kChecked),
                 .bias = bf16(biasb, 1),
                 .dx = bf16(db, kChecked),
                 .dbias = bf16(dbias, 1)});
  });
  const Activation pair = gated(f);
  report("gated: f(a)*b of two halves", [&] {
    const View halves = matrix(xb.data(), DType::bf16, kChecked, 2 * kCols);
    forward(pair, {.x = halves, .y = bf16(yb, kChecked)});
  });

  fmt::print("\n4. time, f32, median of 7\n");
  const auto f32 = [&](std::vector<float>& v) {
    return matrix(v.data(), DType::f32, kRows, kCols);
  };
  const double ours = median_ms([&] { forward(f, {.x = f32(xs), .y = f32(ys)}); });
  const double plain = median_ms([&] { plain_forward(xs, ys); });
  const double ours_back =
      median_ms([&] { backward(f, {.grad = f32(gs), .x = f32(xs), .dx = f32(ds)}); });
  const double plain_back = median_ms([&] { plain_backward(xs, gs, ds); });
  fmt::print("   forward   tenon {:6.1f} ms   plain C++, one thread {:6.1f} ms   {:4.1f}x\n", ours,
             plain, plain / ours);
  fmt::print("   backward  tenon {:6.1f} ms   plain C++, one thread {:6.1f} ms   {:4.1f}x\n",
             ours_back, plain_back, plain_back / ours_back);
  fmt::print("\nNext: tenon show \"{}\" --backward, tenon list, tenon check (build/tenon here)\n",
             kFormula);
  return good ? ok : failed;
}

}  // namespace tenon::cli
