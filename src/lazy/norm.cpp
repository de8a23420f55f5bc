// The closed forms of norms and of their gradients.
#include "lazy/norm.h"

namespace tenon {

NormStatistics norm_statistics(NormKind kind, int64_t cols, Expr x, Expr eps,
                               const RowTotal& total) {
  const auto count = static_cast<float>(cols);
  NormStatistics s{{}, x, {}};
  if (kind == NormKind::layer) {
    s.mean = total(x) / count;
    s.from_mean = x - *s.mean;
  }
  const Expr square = total(s.from_mean * s.from_mean);
  s.rstdev = rsqrt((kind == NormKind::l2 ? square : square / count) + eps);
  return s;
}

Norm::Nodes norm_nodes(NormKind kind, Expr x, Expr eps, const NormStatistics& s, Expr y) {
  return {kind, x.id(), eps.id(), s.mean ? s.mean->id() : kNoNode, s.rstdev.id(), y.id()};
}

NormGrad::Nodes norm_grad_nodes(NormKind kind, Expr x, std::optional<Expr> mean, Expr rstdev) {
  NormGrad::Nodes nodes{.kind = kind, .x = x.id(), .rstdev = rstdev.id()};
  if (mean) nodes.mean = mean->id();
  if (kind != NormKind::l2) nodes.normal = ((mean ? x - *mean : x) * rstdev).id();
  return nodes;
}

Expr norm_gradient(NormKind kind, int64_t cols, Expr w, Expr from_mean, Expr rstdev,
                   const RowTotal& total) {
  if (kind == NormKind::l2)
    return rstdev * (w - from_mean * (rstdev * rstdev) * total(from_mean * w));
  const auto count = static_cast<float>(cols);
  const Expr normal = from_mean * rstdev;
  const Expr centred = kind == NormKind::layer ? w - total(w) / count : w;
  return rstdev * (centred - normal * (total(w * normal) / count));
}

}  // namespace tenon
