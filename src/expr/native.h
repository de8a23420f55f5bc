// Formulas in native precision, made of fp32 operations and the functions of hardware.h.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "expr/approximated.h"
#include "expr/lower.h"
#include "expr/order.h"

namespace tenon {

using Images = std::vector<Expr>;  // by node of the original

// Copies a graph. `change` may replace nodes; it reads the images of all earlier nodes.
template <class Change>
Lowered rewritten(const Lowered& from, const Change& change) {
  Lowered out;
  std::vector<Expr> image(from.graph.size());
  for (const uint32_t id : order(from.graph, from.roots)) {
    const Node& n = from.graph[id];
    if (n.word == Word::constant) {
      image[id] = Expr(n.value);
    } else if (const std::optional<Expr> other = change(n, image)) {
      image[id] = *other;
    } else {
      Node copy = n;
      for (uint32_t& in : std::span(copy.in).first(static_cast<size_t>(n.arity())))
        in = out.graph.id(image[in]);
      image[id] = out.graph.intern(copy);
    }
  }
  for (const uint32_t root : from.roots) out.roots.push_back(out.graph.id(image[root]));
  return out;
}

// If select(x < c, 0, ·) discards values below c, max(x, c) becomes x.
Lowered unclamped(const Lowered& from);
// Contracts sums of products to fma, which errs less.
Lowered contracted(const Lowered& from);

// Functions may err by `error`, relative to their results. Without functions, sums are not
// contracted, which made the LayerNorm kernel slower. With roots, the result then has the strict
// bits, except for subnormal quotients.
Lowered native(const Graph& graph, std::span<const uint32_t> roots, double error);
// `loads` as for approximated().
Approximated native(const Graph& graph, std::span<const uint32_t> roots, double error,
                    const std::vector<Loaded>& loads);

}  // namespace tenon
