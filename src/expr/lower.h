// Lowering: replaces each transcendental word by its sequence of IEEE operations.
#pragma once

#include <vector>

#include "tenon/expr.h"
#include "tenon/options.h"

namespace tenon {

// Operations that occur only in lowered graphs.
Expr fma(Expr a, Expr b, Expr c);
Expr inverse(Expr x);
Expr pow2(Expr n);
Expr exponent(Expr x);
Expr mantissa(Expr x);

struct Lowered {
  Graph graph{true};
  std::vector<uint32_t> roots;
};

// Every backend evaluates this graph, or the templates from which it was traced.
Lowered lower(const Graph& graph, std::span<const uint32_t> roots, Precision precision);

}  // namespace tenon
