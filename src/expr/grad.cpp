// Reverse-mode derivatives: one rule per word.
#include <algorithm>
#include <optional>

#include "expr/order.h"
#include "tenon/error.h"
#include "tenon/expr.h"

namespace tenon {

namespace {

constexpr float kTwoOverRootPi = 1.1283791670955126F;

// The contribution of a node, with value y and adjoint d, to its child i. tanh and sigmoid avoid 1
// − y, which loses all relative accuracy as y tends to 1.
Expr contribution(const Node& n, int i, Expr y, Expr d, std::span<const Expr> in) {
  const Expr a = in[0];
  const Expr b = n.arity() > 1 ? in[1] : a;
  switch (n.word) {
    case Word::add:
      return d;
    case Word::sub:
      return i == 0 ? d : -d;
    case Word::mul:
      return d * (i == 0 ? b : a);
    case Word::div:
      return i == 0 ? d / b : -(d / b * y);
    case Word::min:
    case Word::max:
    case Word::select:
      return d;  // guarded
    case Word::neg:
      return -d;
    case Word::abs:
      return select(a == 0.0F, 0.0F, select(a < 0.0F, -d, d));
    case Word::sqrt:
      return d * 0.5F / y;
    case Word::rsqrt:
      return d * -0.5F * (y / a);
    case Word::exp:
      return d * y;
    case Word::expm1:
      return d * exp(a);
    case Word::log:
      return d / a;
    case Word::log1p:
      return d / (1.0F + a);
    case Word::sigmoid:
      return d * (y * sigmoid(-a));
    case Word::tanh:
      return d * (4.0F * (sigmoid(a + a) * sigmoid(-(a + a))));
    case Word::erf:
      return d * (kTwoOverRootPi * exp(-(a * a)));
    case Word::erfc:
      return d * (-kTwoOverRootPi * exp(-(a * a)));
    case Word::round:
      return d;
    default:
      fail(Code::unsupported, "grad: the word ", info(n.word).name, " has no derivative");
  }
}

// A select that an adjoint passed through. The adjoint is exactly 0 if the branch is not taken.
struct Guard {
  Rel rel;
  uint32_t left, right;
  bool taken;  // true: the branch is taken if the condition holds
  friend bool operator==(const Guard&, const Guard&) = default;
};

std::optional<Guard> guard(const Node& n, int i) {
  if (n.word == Word::select) return Guard{n.rel(), n.in[0], n.in[1], i == 2};
  if (n.word == Word::min) return Guard{i == 0 ? Rel::gt : Rel::le, n.in[0], n.in[1], false};
  if (n.word == Word::max) return Guard{i == 0 ? Rel::lt : Rel::ge, n.in[0], n.in[1], false};
  return std::nullopt;
}

// Guards stay outside the value until it is summed or read. So a NaN or infinite factor of a branch
// that is not taken never multiplies the 0.
struct Adjoint {
  Expr value;
  std::vector<Guard> guards;

  void close(Graph& graph, size_t keep) {
    for (; guards.size() > keep; guards.pop_back()) {
      const Guard& g = guards.back();
      const Condition c{g.rel, {&graph, g.left}, {&graph, g.right}};
      value = g.taken ? select(c, value, 0.0F) : select(c, 0.0F, value);
    }
  }
};

void add(Graph& graph, std::optional<Adjoint>& sum, Adjoint d) {
  if (!sum) {
    sum = std::move(d);
    return;
  }
  const auto common = std::ranges::mismatch(sum->guards, d.guards).in1 - sum->guards.begin();
  sum->close(graph, static_cast<size_t>(common));
  d.close(graph, static_cast<size_t>(common));
  sum->value = sum->value + d.value;
}

}  // namespace

std::vector<Expr> grad(Expr out, Expr seed, std::span<const Expr> wrt) {
  std::vector<Expr> result(wrt.size());
  if (!out.graph()) return result;  // it is a constant
  Graph& graph = *out.graph();
  const uint32_t root = out.id();
  const std::vector<uint32_t> nodes = order(graph, std::span(&root, 1));

  // Only nodes on a path to some wrt need an adjoint.
  std::vector<uint32_t> targets;
  for (const Expr& w : wrt) targets.push_back(graph.id(w));
  std::vector<bool> wanted(graph.size(), false);
  for (const uint32_t id : targets) wanted[id] = true;
  for (const uint32_t id : nodes)
    for (int i = 0; i < graph[id].arity(); ++i)
      if (wanted[graph[id].in[i]]) wanted[id] = true;

  std::vector<std::optional<Adjoint>> adjoint(wanted.size());
  adjoint[root] = Adjoint{seed, {}};
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
    const Node n = graph[*it];  // a copy: contributions add nodes
    if (!adjoint[*it]) continue;
    std::array<Expr, 4> in;
    for (int i = 0; i < n.arity(); ++i) in[static_cast<size_t>(i)] = {&graph, n.in[i]};
    for (int i = n.arity() - 1; i >= (n.word == Word::select ? 2 : 0); --i) {
      if (!wanted[n.in[i]]) continue;
      Adjoint d{contribution(n, i, {&graph, *it}, adjoint[*it]->value, in), adjoint[*it]->guards};
      if (const auto g = guard(n, i)) d.guards.push_back(*g);
      add(graph, adjoint[n.in[i]], std::move(d));
    }
  }
  for (size_t i = 0; i < wrt.size(); ++i) {
    std::optional<Adjoint>& a = adjoint[targets[i]];
    if (a) a->close(graph, 0);
    result[i] = a ? a->value : Expr(0.0F);
  }
  return result;
}

}  // namespace tenon
