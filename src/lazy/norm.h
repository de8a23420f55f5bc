// Formulas of row norms for any source of row totals, and the nodes that the head of a step names.
#pragma once

#include <functional>
#include <optional>

#include "step/step.h"

namespace tenon {

using RowTotal = std::function<Expr(Expr)>;
struct NormStatistics {
  std::optional<Expr> mean;  // layer only
  Expr from_mean, rstdev;
};
NormStatistics norm_statistics(NormKind kind, int64_t cols, Expr x, Expr eps,
                               const RowTotal& total);
Norm::Nodes norm_nodes(NormKind kind, Expr x, Expr eps, const NormStatistics& s, Expr y);
// dx, with w = grad·gamma.
Expr norm_gradient(NormKind kind, int64_t cols, Expr w, Expr from_mean, Expr rstdev,
                   const RowTotal& total);
// The nodes that both dx and dgamma read.
NormGrad::Nodes norm_grad_nodes(NormKind kind, Expr x, std::optional<Expr> mean, Expr rstdev);

}  // namespace tenon
