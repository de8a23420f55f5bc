// Reverse-mode derivatives: one rule a word.
#include <algorithm>
#include <optional>

#include "expr/order.h"
#include "tenon/error.h"
#include "tenon/expr.h"

namespace tenon {

namespace {

constexpr float kTwoOverRootPi = 1.1283791670955126F;

// The contribution of one node, with value y and adjoint d, to its child number i.
// tanh and sigmoid avoid 1 − y, which loses all relative accuracy where y tends to 1.
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
      return i == 0 ? select(a > b, 0.0F, d) : select(a <= b, 0.0F, d);
    case Word::max:
      return i == 0 ? select(a < b, 0.0F, d) : select(a >= b, 0.0F, d);
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
    case Word::select: {
      const Condition c{n.rel(), in[0], in[1]};
      return i == 2 ? select(c, d, 0.0F) : select(c, 0.0F, d);
    }
    default:
      fail(Code::unsupported, "grad: the word ", info(n.word).name, " has no derivative");
  }
}

}  // namespace

std::vector<Expr> grad(Expr out, Expr seed, std::span<const Expr> wrt) {
  std::vector<Expr> result(wrt.size());
  if (!out.graph()) return result;  // a constant
  Graph& graph = *out.graph();
  const uint32_t root = out.id();
  const std::vector<uint32_t> nodes = order(graph, std::span(&root, 1));

  // Only nodes on a way to some wrt need an adjoint.
  std::vector<uint32_t> targets;
  for (const Expr& w : wrt) targets.push_back(graph.id(w));
  std::vector<bool> wanted(graph.size(), false);
  for (const uint32_t id : targets) wanted[id] = true;
  for (const uint32_t id : nodes)
    for (int i = 0; i < graph[id].arity(); ++i)
      if (wanted[graph[id].in[i]]) wanted[id] = true;

  std::vector<std::optional<Expr>> adjoint(wanted.size());
  adjoint[root] = seed;
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
    const Node n = graph[*it];  // a copy: contributions add nodes
    if (!adjoint[*it]) continue;
    std::vector<Expr> in;
    for (int i = 0; i < n.arity(); ++i) in.emplace_back(&graph, n.in[i]);
    for (int i = n.arity() - 1; i >= (n.word == Word::select ? 2 : 0); --i) {
      if (!wanted[n.in[i]]) continue;
      const Expr d = contribution(n, i, {&graph, *it}, *adjoint[*it], in);
      std::optional<Expr>& sum = adjoint[n.in[i]];
      sum = sum ? *sum + d : d;
    }
  }
  for (size_t i = 0; i < wrt.size(); ++i) result[i] = adjoint[targets[i]].value_or(Expr(0.0F));
  return result;
}

}  // namespace tenon
