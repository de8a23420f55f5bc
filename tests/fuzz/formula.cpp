// Fuzzer of formula texts, for libFuzzer, or a seeded run with TENON_FUZZ_MAIN.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "expr/lower.h"
#include "expr/parse.h"
#include "expr/print.h"
#include "fuzz/support.h"
#include "lower/single_activation.h"
#include "tenon/tenon.hpp"

namespace {

using namespace tenon;

constexpr int64_t kRows = 3;
constexpr int64_t kCols = 5;

void check(bool holds, const char* what, std::string_view text) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_formula: %s: '%.*s'\n", what, static_cast<int>(text.size()),
               text.data());
  std::abort();
}

// Only tenon::Error may leave the library. Any other exception ends the process.
template <class F>
bool succeeds(F f) {
  try {
    f();
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool same_nodes(const Formula& a, const Formula& b) {
  if (a.root != b.root || a.graph->size() != b.graph->size()) return false;
  for (uint32_t i = 0; i < a.graph->size(); ++i) {
    const Node &n = (*a.graph)[i], &m = (*b.graph)[i];
    if (n.word != m.word || n.detail != m.detail || n.slot != m.slot || n.in != m.in ||
        __builtin_bit_cast(uint32_t, n.value) != __builtin_bit_cast(uint32_t, m.value))
      return false;
  }
  return true;
}

// Converts text to a graph, a derivative, a lowered graph, and text again.
void through_formula(std::string_view text) {
  static const std::vector<std::string> kInputs{"x", "a", "b"};
  Formula formula;
  if (!succeeds([&] { formula = parse(text, kInputs); })) return;
  check(formula.graph->size() <= kMaxFormulaNodes + 1, "too many nodes", text);
  check(same_nodes(formula, parse(text, kInputs)), "two readings differ", text);

  Graph graph;
  std::vector<Expr> loads;
  std::vector<std::string> names = kInputs;
  for (const Parameter& p : formula.parameters) names.push_back(p.name);
  for (uint32_t i = 0; i < names.size(); ++i) loads.push_back(graph.load(i));
  const Expr seed = graph.load(static_cast<uint32_t>(names.size()));
  const Expr out = substitute(formula, loads);
  std::vector<uint32_t> roots{graph.id(out)};
  for (const Expr& d : grad(out, seed, loads)) roots.push_back(graph.id(d));
  check(!formula_text(graph, roots, names).empty(), "no text", text);
  for (const Precision p : {Precision::strict, Precision::native}) {
    const Lowered lowered = lower(graph, roots, p);
    for (uint32_t i = 0; i < lowered.graph.size(); ++i)
      check(info(lowered.graph[i].word).kind != WordKind::transcendental, "not lowered", text);
    check(!print(lowered.graph, lowered.roots).empty(), "no statements", text);
  }
}

// Converts text to an activation and steps, and runs a small call.
void through_activation(std::string_view text) {
  Activation f;
  if (!succeeds([&] { f = activation(text); })) return;
  const int64_t in_cols = kCols * f.inputs;
  ActivationForm form;
  form.cols = kCols;
  form.y = DType::bf16;
  if (f.scaled) form.scale = DType::f32;
  activation_step(f, form);
  form.backward = true;
  form.grad = DType::f32;
  activation_step(f, form);

  std::vector<float> x(static_cast<size_t>(kRows * in_cols)), s(kRows, 1.5F);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.75F * static_cast<float>(i) - 5;
  x[1] = INFINITY;
  x[3] = NAN;
  // One element more than the call gets. It must keep its value.
  std::vector<float> y(kRows * kCols + 1, 42), dx(x.size() + 1, 42);
  const View scale = f.scaled ? matrix(s.data(), DType::f32, kRows, 1) : View{};
  const View in = matrix(x.data(), DType::f32, kRows, in_cols);
  const View out = matrix(y.data(), DType::f32, kRows, kCols);
  forward(f, {.x = in, .scale = scale, .y = out});
  const std::vector<float> g(kRows * kCols, 1);
  backward(f, {.grad = matrix(g.data(), DType::f32, kRows, kCols),
               .x = in,
               .scale = scale,
               .dx = matrix(dx.data(), DType::f32, kRows, in_cols)});
  check(y.back() == 42 && dx.back() == 42, "wrote past the end", text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Kernels live as long as the process. One thread keeps the fuzzer fast.
  static const bool kOneThread = [] {
    set_threads(1);
    return true;
  }();
  static_cast<void>(kOneThread);
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  through_formula(text);
  through_activation(text);
  return 0;
}

#if defined(TENON_FUZZ_MAIN)

namespace {

using namespace tenon::test;  // NOLINT: a test program

constexpr std::string_view kBytes = "xab().,;=<>+-*/ \n019eE_\0\xff";
constexpr std::array<const char*, 14> kUnary{"neg",   "abs",     "sqrt", "rsqrt", "exp",
                                             "expm1", "log",     "tanh", "erf",   "erfc",
                                             "log1p", "sigmoid", "mish", "elu"};
constexpr std::array<const char*, 10> kLeaves{"x",  "x",   "x",    "a",     "b",
                                              ".5", "1e3", "2.25", "1e-40", "p"};
constexpr std::array<const char*, 6> kOperators{"+", "-", "*", "/", " + ", "*-"};
constexpr std::array<const char*, 6> kRelations{"<", "<=", ">", ">=", "==", "!="};
constexpr std::array<const char*, 4> kFormats{"bf16", "f16", "e4m3", "e5m2"};

std::string sentence(Generator& r, int depth) {
  const auto inner = [&] { return sentence(r, depth - 1); };
  if (depth <= 0) return pick(r, kLeaves);
  switch (below(r, 8)) {
    case 0:
      return pick(r, kLeaves);
    case 1:
      return pick(r, kUnary) + "(" + inner() + ")";
    case 2:
      return inner() + pick(r, kOperators) + inner();
    case 3:
      return "(" + inner() + ")";
    case 4:
      return "clamp(" + inner() + ",-2," + inner() + ")";
    case 5:
      return "select(" + inner() + pick(r, kRelations) + inner() + "," + inner() + "," + inner() +
             ")";
    case 6:
      return "round(" + inner() + "," + pick(r, kFormats) + ")";
    default:
      return (below(r, 2) ? "max(" : "min(") + inner() + "," + inner() + ")";
  }
}

std::string example(Generator& r) {
  std::string text = sentence(r, static_cast<int>(below(r, 6)));
  if (below(r, 3) == 0) text += "; p = -0.5";
  const size_t wrap = below(r, 12);
  if (wrap == 0) text = "gated(" + text + ")";
  if (wrap == 1) text = "scaled(" + text + ")";
  if (wrap == 2) text = "elu(alpha=" + std::to_string(below(r, 100)) + ")";
  const size_t kind = below(r, 10);
  if (kind == 0) return noise(r);
  return kind < 4 ? mutated(r, text, kBytes) : text;
}

}  // namespace

int main(int argc, char** argv) {
  const long iterations = argc > 1 ? std::atol(argv[1]) : 20000;
  Generator random(argc > 2 ? static_cast<uint32_t>(std::atol(argv[2])) : 1);
  const std::vector<std::string> inputs{"x", "a", "b"};
  long parsed = 0;
  for (long i = 0; i < iterations; ++i) {
    const std::string text = example(random);
    parsed += succeeds([&] { parse(text, inputs); });
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  }
  std::printf("%ld formulas, %ld of them valid\n", iterations, parsed);
  // Fails if the generator makes too few valid texts.
  return parsed * 4 > iterations ? 0 : 1;
}

#endif
