// Builds the graph of a call like the library, runs calls, and finds roots and kinks.
#include "function.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "expr/evaluate.h"
#include "lower/single_activation.h"
#include "support/formula.h"

namespace tenon::accuracy {

namespace {

constexpr float kOne = 1;

// The value, then the derivatives by the inputs. Loads are inputs, gradient, parameters.
Graph backward_graph(const Activation& f, std::vector<uint32_t>& roots) {
  Graph graph;
  const auto inputs = static_cast<uint32_t>(f.inputs);
  std::vector<Expr> in, parameters;
  for (uint32_t i = 0; i < inputs; ++i) in.push_back(graph.load(i));
  const Expr seed = graph.load(inputs);
  for (uint32_t i = 0; i < f.parameters.size(); ++i)
    parameters.push_back(graph.load(inputs + 1 + i));
  const Expr y(&graph, graph.id(call(f, in, parameters)));
  roots.push_back(y.id());
  for (const Expr& d : grad(y, seed, in)) roots.push_back(graph.id(d));
  return graph;
}

std::vector<double> natives() { return {0, native_error(DType::bf16), native_error(DType::f16)}; }
std::vector<double> strict_only() { return {0}; }

// An integer with the order of the fp32 values.
int64_t ordinal(float v) {
  const auto bits = std::bit_cast<uint32_t>(v);
  return bits >> 31 ? -1 - static_cast<int64_t>(bits & 0x7fffffffU) : static_cast<int64_t>(bits);
}
float at_ordinal(int64_t n) {
  const auto bits = n < 0 ? static_cast<uint32_t>(-1 - n) | 0x80000000U : static_cast<uint32_t>(n);
  return std::bit_cast<float>(bits);
}

int sign_of(double d) { return std::isnan(d) ? 2 : d > 0 ? 1 : d < 0 ? -1 : 0; }

}  // namespace

Function::Function(Group group, const std::string& text)
    : group_(group),
      name_(text),
      f_(tenon::activation(text)),
      graph_(backward_graph(f_, root_ids_)),
      exact_(graph_, root_ids_, natives()),
      strict_exact_(graph_, root_ids_, strict_only()),
      reference_(graph_, root_ids_) {
  for (const Parameter& p : f_.parameters) parameters_.push_back(p.value);
  for (const uint32_t root : root_ids_) depends_on_a_.push_back(support::depends(graph_, root, 0));
}

std::string Function::root_name(size_t root) const {
  if (root == 0) return name_;
  return gated() ? (root == 1 ? name_ + " da" : name_ + " db") : name_ + " dx";
}

std::vector<Column> Function::columns(Column a, Column b) const {
  std::vector<Column> all{a};
  if (gated()) all.push_back(b);
  all.push_back({&kOne, 0});
  for (const float& p : parameters_) all.push_back({&p, 0});
  return all;
}

std::vector<Elements> Function::run(const Points& at, DType output, Precision precision) const {
  const size_t n = at.a.size();
  const Options options{.precision = precision};
  std::vector<Elements> out;
  for (size_t r = 0; r < roots(); ++r) out.emplace_back(output, n);
  Elements ones(at.a.dtype(), n);
  ones.fill(kOne);
  const View b = gated() ? at.b.view() : View{};
  forward(f_, {.x = at.a.view(), .b = b, .y = out[0].view()}, options);
  backward(f_,
           {.grad = ones.view(),
            .x = at.a.view(),
            .b = b,
            .dx = out[1].view(),
            .db = gated() ? out[2].view() : View{}},
           options);
  return out;
}

std::vector<float> Function::special_points(int which, float other) const {
  const auto loads = [&](const float& x) {
    const Column moving{&x, 1};
    const Column fixed{&other, 0};
    return which == 0 ? columns(moving, fixed) : columns(fixed, moving);
  };
  // Signs of the exact roots, then of left − right of every comparison in fp32.
  const auto signs = [&](const std::vector<float>& x) {
    const std::vector<Column> at = loads(x[0]);
    std::vector<std::vector<int8_t>> all(x.size());
    Values exact;
    strict_exact_.run(x.size(), at, exact);
    for (size_t i = 0; i < x.size(); ++i)
      for (const auto& v : exact.value) all[i].push_back(static_cast<int8_t>(sign_of(v[i])));
    reference_.visit(x.size(), at, [&](size_t start, size_t count, const auto& values) {
      for (const uint32_t id : reference_.nodes()) {
        const Node& n = reference_.lowered().graph[id];
        if (n.word != Word::min && n.word != Word::max && n.word != Word::select) continue;
        for (size_t i = 0; i < count; ++i) {
          const float left = values[n.in[0]][i];
          const float right = values[n.in[1]][i];
          const int sign = left == right ? 0 : sign_of(static_cast<double>(left) - right);
          all[start + i].push_back(static_cast<int8_t>(sign));
        }
      }
    });
    return all;
  };
  // Coarse scan over all bf16 values, then bisection of each change.
  std::vector<float> scan;
  for (uint32_t code = 0; code < 0x10000U; ++code)
    if (const float v = decode<DType::bf16>(code); std::isfinite(v)) scan.push_back(v);
  std::ranges::sort(scan, {}, ordinal);
  const auto coarse = signs(scan);
  std::vector<float> found;
  for (size_t i = 1; i < scan.size(); ++i)
    for (size_t k = 0; k < coarse[i].size(); ++k) {
      if (coarse[i][k] == coarse[i - 1][k]) continue;
      int64_t low = ordinal(scan[i - 1]);
      int64_t high = ordinal(scan[i]);
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (signs({at_ordinal(middle)})[0][k] == coarse[i - 1][k] ? low : high) = middle;
      }
      found.push_back(at_ordinal(high));
    }
  // Changes that are a few values apart share their neighbours.
  std::ranges::sort(found, {}, ordinal);
  std::vector<float> apart;
  for (const float v : found)
    if (apart.empty() || ordinal(v) - ordinal(apart.back()) > 64) apart.push_back(v);
  return apart;
}

std::vector<Function> all_functions() {
  std::vector<Function> list;
  // sigmoid and tanh are also formula functions. They are in the list of activations.
  for (const char* word : {"exp(x)", "expm1(x)", "log(x)", "log1p(x)", "erf(x)", "erfc(x)",
                           "sqrt(x)", "rsqrt(x)", "abs(x)", "x*x", "1/x", "round(x, bf16)",
                           "round(x, f16)", "round(x, e4m3)", "round(x, e5m2)"})
    list.emplace_back(Function::Group::word, word);
  for (const std::string& name : activation_names()) {
    const bool gated = activation(name).inputs == 2;
    list.emplace_back(gated ? Function::Group::gated : Function::Group::unary, name);
  }
  return list;
}

}  // namespace tenon::accuracy
