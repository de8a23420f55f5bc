// Rewrites approximated formulas.
#include "expr/native.h"

#include <algorithm>

#include "expr/approximated.h"
#include "expr/hardware.h"

namespace tenon {

using namespace hardware;

namespace {

// Replaces divisions by constants.
Lowered with_quotients(const Lowered& from) {
  return rewritten(from, [](const Node& n, const Images& image) -> std::optional<Expr> {
    if (n.word != Word::div) return std::nullopt;
    const Expr a = image[n.in[0]], b = image[n.in[1]];
    if (!b.is_constant() || !divides(b.constant()) || a.is_constant()) return std::nullopt;
    return quotient(a, b.constant());
  });
}

}  // namespace

Lowered unclamped(const Lowered& from) {
  const Graph& graph = from.graph;
  const std::vector<uint32_t> nodes = order(graph, from.roots);
  const auto hides = [&](const Node& n, const Node& most) {
    return n.word == Word::select && n.rel() == Rel::lt && n.in[0] == most.in[0] &&
           n.in[1] == most.in[1] && graph[n.in[2]].word == Word::constant;
  };
  const auto hidden = [&](const Node& most) {
    if (most.word != Word::max || graph[most.in[1]].word != Word::constant ||
        graph[most.in[1]].value == 0)
      return false;
    std::vector<bool> seen(graph.size(), false);
    for (const uint32_t root : from.roots) seen[root] = true;
    for (size_t k = nodes.size(); k-- > 0;) {
      const Node& n = graph[nodes[k]];
      if (!seen[nodes[k]]) continue;
      if (&n == &most) return false;
      for (int i = 0; i < (hides(n, most) ? 3 : n.arity()); ++i) seen[n.in[i]] = true;
    }
    return true;
  };
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    return hidden(n) ? std::optional(image[n.in[0]]) : std::nullopt;
  });
}

Lowered contracted(const Lowered& from) {
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    const auto in = [&](int i) { return image[n.in[static_cast<size_t>(i)]]; };
    const auto product = [&](int i) { return from.graph[n.in[i]].word == Word::mul; };
    const auto factor = [&](int i, int k) { return image[from.graph[n.in[i]].in[k]]; };
    if (n.word == Word::add && (product(0) || product(1))) {
      const int i = product(0) ? 0 : 1;
      return fma(factor(i, 0), factor(i, 1), in(1 - i));
    }
    if (n.word == Word::sub && product(0)) return fma(factor(0, 0), factor(0, 1), -in(1));
    if (n.word == Word::sub && product(1)) return fma(-factor(1, 0), factor(1, 1), in(0));
    return std::nullopt;
  });
}

Approximated native(const Graph& graph, std::span<const uint32_t> roots, double error,
                    const std::vector<Loaded>& loads) {
  if (error == 0) return approximated(graph, roots, error, loads);
  const auto errs = [&](uint32_t id) {
    return info(graph[id].word).kind == WordKind::transcendental;
  };
  const std::vector<uint32_t> nodes = order(graph, roots);
  // Norms have the bits of the fused loops.
  const bool has_roots = std::ranges::any_of(nodes, [&](uint32_t id) {
    return graph[id].word == Word::sqrt || graph[id].word == Word::rsqrt;
  });
  if (std::ranges::none_of(nodes, errs))
    return has_roots ? Approximated{with_quotients(lower(graph, roots, Precision::strict)), {}}
                     : approximated(graph, roots, error, loads);
  const Approximated first = approximated(graph, roots, error, loads);
  return {contracted(unclamped(first.formula)), first.positive};
}

Lowered native(const Graph& graph, std::span<const uint32_t> roots, double error) {
  return native(graph, roots, error, {}).formula;
}

}  // namespace tenon
