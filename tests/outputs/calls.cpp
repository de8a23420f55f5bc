// Calls that are not in the conformance list: fused functions with every kind of argument, and
// functions by name.
#include <deque>

#include "outputs/hash.h"
#include "tenon/tenon.hpp"

namespace tenon::test {
namespace {

constexpr int64_t kRows = 37, kCols = 129;

struct Formula {
  const char* text;
  std::vector<std::string> names;
  std::vector<Shape> shapes;
};

const std::vector<Formula> kFormulas{
    {"x*sigmoid(1.5*x) + 0.1*tanh(x)", {"x"}, {{kRows, kCols}}},
    {"tanh(x + bias)*s", {"x", "bias", "s"}, {{kRows, kCols}, {1, kCols}, {kRows, 1}}},
    {"max(x, c*y) + exp(min(bias, 1))",
     {"x", "y", "bias", "c"},
     {{kRows, kCols}, {kRows, kCols}, {1, kCols}, {1, 1}}},
    {"select(x > c, x*s, log1p(exp(min(y, 20))))",
     {"x", "y", "s", "c"},
     {{kRows, kCols}, {kRows, kCols}, {kRows, 1}, {1, 1}}},
};

class Arena {
 public:
  explicit Arena(uint64_t seed) : draw_(seed) {}
  View empty(DType dtype, Shape s) {
    const Memory& m = blocks_.emplace_back(s.rows * s.cols * info(dtype).bytes);
    return views_.emplace_back(matrix(m.data(), dtype, s.rows, s.cols));
  }
  View filled(DType dtype, Shape s) {
    const View v = empty(dtype, s);
    fill(v, [&] { return sometimes_special(draw_); });
    return v;
  }
  [[nodiscard]] uint64_t hash() const {
    Hash h;
    for (const View& v : views_) h.elements(v);
    return h.value();
  }

 private:
  Draw draw_;
  std::deque<Memory> blocks_;
  std::vector<View> views_;
};

uint64_t fused(const Formula& f, DType dtype, const Options& options) {
  Arena arena(f.names.size());
  std::vector<View> in, gradients;
  for (const Shape& s : f.shapes) in.push_back(arena.filled(dtype, s));
  for (const Shape& s : f.shapes) gradients.push_back(arena.empty(dtype, s));
  const Fused function = fuse_text(f.text, f.names);
  function.forward(in, arena.empty(dtype, {kRows, kCols}), options);
  function.backward(in, arena.filled(dtype, {kRows, kCols}), gradients, options);
  return arena.hash();
}

uint64_t named(const std::string& name, DType dtype, const Options& options) {
  Arena arena(name.size());
  const Shape whole{kRows, kCols}, row{1, kCols};
  const View x = arena.filled(dtype, whole), grad = arena.filled(dtype, whole);
  const View bias = arena.filled(dtype, row);
  const auto out = [&] { return arena.empty(dtype, whole); };
  run(name, {x}, {out()}, options);
  run("bias_" + name, {x, bias}, {out()}, options);
  run("d" + name, {grad, x}, {out()}, options);
  run("bgrad_d" + name, {grad, x, bias}, {arena.empty(dtype, row), out()}, options);
  return arena.hash();
}

}  // namespace

void hash_single_calls(const Report& report) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const Rounding rounding : {Rounding::once, Rounding::eager}) {
      const Options options{.precision = Precision::strict, .rounding = rounding};
      const std::string how =
          str(" ", info(dtype).name, " ", kRoundings[static_cast<size_t>(rounding)]);
      for (const Formula& f : kFormulas)
        report("single-calls", f.text + how, fused(f, dtype, options));
      for (const char* name : {"gelu", "silu", "relu", "srelu", "qgelu", "mish", "softplus"})
        report("single-calls", name + how, named(name, dtype, options));
    }
}

}  // namespace tenon::test
