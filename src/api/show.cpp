// Prints the formula, derivative, error bound and code of an activation as text.
#include <array>
#include <charconv>
#include <cmath>

#include "core/fp_mode.h"
#include "expr/evaluate.h"
#include "expr/lower.h"
#include "expr/print.h"
#include "lower/single_activation.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

namespace {

// A few significant digits, independent of the host's locale.
std::string rounded(double v, int digits) {
  std::array<char, 32> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), v, std::chars_format::general, digits);
  return {text.data(), end.ptr};
}

Step step_of(const Activation& f, bool backward) {
  ActivationForm form;
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
  return activation_step(f, form);
}

// The name of each load in the formula.
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

void print_lines(std::string& out, const std::string& text) {
  size_t start = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', start)) {
    out += str("  ", text.substr(start, end - start), "\n");
    start = end + 1;
  }
}

// The largest error bound over all bf16 values of the first input with magnitude up to 128. The
// other inputs are 1.
void print_bounds(std::string& out, const Activation& f, const Step& step) {
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
      // Below 2^-100 subnormal intermediates dominate the bound. The ulp of infinities and NaN is
      // undefined.
      if (!std::isfinite(value) || std::fabs(value) < 0x1p-100) continue;
      const double u = e.bound[root][i] / ulp32(value);
      if (u > ulps) ulps = u, where = x[i];
    }
    if (ulps < 0)
      out += "  E: no result of ordinary size to measure it at\n";
    else if (std::isinf(ulps))
      out += str("  E: not bounded at ", input, " = ", rounded(where, 6),
                 ", where fp32 overflows inside\n");
    else
      out += str("  E: at most ", rounded(ulps, 3), " ulp, at ", input, " = ", rounded(where, 6),
                 " (bf16 ", input, " up to 128 in size, the rest 1)\n");
  }
}

void print_formula(std::string& out, const char* title, const Activation& f, const Step& step) {
  out += str(title, "\n");
  print_lines(out, formula_text(*step.graph, step.roots(), load_names(f, step)));
  print_bounds(out, f, step);
}

}  // namespace

std::string formula(const Activation& f) {
  const FpMode ieee;
  Graph graph;
  std::vector<std::string> names =
      f.inputs == 1 ? std::vector<std::string>{"x"} : std::vector<std::string>{"a", "b"};
  std::vector<Expr> inputs;
  std::vector<Expr> values;
  uint32_t slot = 0;
  for (int i = 0; i < f.inputs; ++i) inputs.push_back(graph.load(slot++));
  for (const Parameter& p : f.parameters) {
    values.push_back(graph.load(slot++));
    names.push_back(p.name);
  }
  Expr value = call(f, inputs, values);
  if (f.scaled) {
    value = value * graph.load(slot);
    names.emplace_back("s");
  }
  const uint32_t root = graph.id(value);
  std::string text = formula_text(graph, std::span(&root, 1), names);
  text.pop_back();
  for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at))
    text.replace(at, 1, "; ");
  return text;
}

std::string show(const Activation& f, bool backward) {
  const FpMode ieee;
  std::string out = str(f.name, ": ", f.inputs == 2 ? "of a and b" : "of x");
  for (size_t i = 0; i < f.parameters.size(); ++i)
    out += str(i == 0 ? ", parameters " : " ", f.parameters[i].name, "=", f.parameters[i].value);
  out += "\n\n";
  const Step forward_step = step_of(f, false);
  const Step backward_step = step_of(f, true);
  print_formula(out, "value", f, forward_step);
  print_formula(out,
                f.inputs == 2 ? "derivatives (g is the incoming gradient; da, then db)"
                              : "derivative (g is the incoming gradient)",
                f, backward_step);
  const Step& printed = backward ? backward_step : forward_step;
  const Lowered lowered = lower(*printed.graph, printed.roots(), Precision::strict);
  out += str("code of the ", backward ? "derivative" : "value",
             ", strict (one sequence for CPU and CUDA)\n");
  print_lines(out, print(lowered.graph, lowered.roots));
  return out;
}

}  // namespace tenon
