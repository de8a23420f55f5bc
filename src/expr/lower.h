// Lowering: transcendental words become their sequences of IEEE operations.
#pragma once

#include <vector>

#include "tenon/expr.h"
#include "tenon/options.h"

namespace tenon {

// The operations that exist only in lowered graphs.
Expr fma(Expr a, Expr b, Expr c);
Expr inverse(Expr x);
Expr pow2(Expr n);
Expr exponent(Expr x);
Expr mantissa(Expr x);

struct Lowered {
  Graph graph{true};
  std::vector<uint32_t> roots;
};

// Every backend evaluates exactly this graph, or the same templates it was traced from.
Lowered lower(const Graph& graph, std::span<const uint32_t> roots, Precision precision);

}  // namespace tenon
