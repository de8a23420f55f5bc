// `tenon show`: an activation's formula, derivative, error bound and code.
#include <fmt/core.h>

#include <cmath>

#include "cli/commands.h"
#include "expr/evaluate.h"
#include "expr/lower.h"
#include "expr/print.h"
#include "ops/activation.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

namespace {

Step step_of(const Activation& f, bool backward) {
  ActivationForm form;
  form.f = f;
  form.backward = backward;
  form.cols = 1;
  form.separate = f.inputs == 2;
  form.precision = Precision::strict;
  form.y = DType::f32;
  if (f.inputs == 2) form.b = DType::f32;
  if (f.inputs == 2 && backward) form.db = DType::f32;
  if (f.scaled) form.scale = DType::f32;
  if (f.scaled && backward) form.dscale = DType::f32;
  if (backward) form.grad = DType::f32;
  return activation_step(form);
}

// What each load is called in the formula.
std::vector<std::string> load_names(const Activation& f, const Step& step) {
  std::vector<std::string> names;
  for (const Load& l : step.loads) {
    if (l.from == Load::From::parameter)
      names.push_back(f.parameters[l.arg].name);
    else if (l.from == Load::From::column)
      names.emplace_back("s");
    else if (l.arg == ActivationArgs::grad)
      names.emplace_back("g");
    else
      names.emplace_back(f.inputs == 1 ? "x" : l.arg == ActivationArgs::b ? "b" : "a");
  }
  return names;
}

void print_lines(const std::string& text) {
  size_t start = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', start)) {
    fmt::print("  {}\n", text.substr(start, end - start));
    start = end + 1;
  }
}

// The largest E over all bf16 values of the first input up to 128 in size, the others 1.
void print_bounds(const Activation& f, const Step& step) {
  const char* input = f.inputs == 2 ? "a" : "x";
  std::vector<float> x;
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float v = decode<DType::bf16>(code);
    if (std::fabs(v) <= 128) x.push_back(v);
  }
  std::vector<std::vector<float>> loads;
  std::vector<const float*> pointers;
  for (const Load& l : step.loads) {
    if (l.from == Load::From::parameter)
      loads.emplace_back(x.size(), f.parameters[l.arg].value);
    else if (l.from == Load::From::tile && l.arg == ActivationArgs::x)
      loads.push_back(x);
    else
      loads.emplace_back(x.size(), 1.0F);
  }
  for (const auto& l : loads) pointers.push_back(l.data());
  const Evaluation e = Oracle(*step.graph, step.roots(), 0).run(x.size(), pointers);
  for (size_t root = 0; root < step.stores.size(); ++root) {
    double ulps = -1;
    float where = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double value = e.value[root][i];
      // Below, subnormal intermediates count; the ulp of infinities and NaN means nothing.
      if (!std::isfinite(value) || std::fabs(value) < 0x1p-100) continue;
      const double u = e.bound[root][i] / ulp32(value);
      if (u > ulps) ulps = u, where = x[i];
    }
    if (ulps < 0)
      fmt::print("  E: no result of ordinary size to measure it at\n");
    else if (std::isinf(ulps))
      fmt::print("  E: not bounded at {} = {:.6g}, where fp32 overflows inside\n", input, where);
    else
      fmt::print(
          "  E: at most {:.3g} ulp, at {} = {:.6g} (bf16 {} up to 128 in size, the rest 1)\n", ulps,
          input, where, input);
  }
}

void print_formula(const char* title, const Activation& f, const Step& step) {
  fmt::print("{}\n", title);
  print_lines(formula_text(*step.graph, step.roots(), load_names(f, step)));
  print_bounds(f, step);
}

}  // namespace

int show(const std::string& text, bool backward) {
  const Activation f = activation(text);
  std::string parameters;
  for (const Parameter& p : f.parameters) parameters += fmt::format(" {}={}", p.name, p.value);
  fmt::print("{}: {}{}\n\n", f.name, f.inputs == 2 ? "of a and b" : "of x",
             parameters.empty() ? "" : ", parameters" + parameters);
  const Step forward_step = step_of(f, false);
  const Step backward_step = step_of(f, true);
  print_formula("value", f, forward_step);
  print_formula(f.inputs == 2 ? "derivatives (g is the incoming gradient; da, then db)"
                              : "derivative (g is the incoming gradient)",
                f, backward_step);
  const Step& printed = backward ? backward_step : forward_step;
  const Lowered lowered = lower(*printed.graph, printed.roots(), Precision::strict);
  fmt::print("code of the {}, strict (one sequence for CPU and CUDA)\n",
             backward ? "derivative" : "value");
  print_lines(print(lowered.graph, lowered.roots));
  return ok;
}

}  // namespace tenon::cli
