// Row totals, then a body that reads them.
#include "lower/single_norm.h"

#include <array>
#include <string>

#include "lazy/builder.h"
#include "step/key.h"

namespace tenon {

namespace {

using A = NormArgs;

constexpr std::array<std::string_view, 3> kNames{"layernorm", "rmsnorm", "l2norm"};

class NormBuilder {
 public:
  NormBuilder(const NormForm& form, std::string_view direction)
      : form_(form),
        build_(std::string(kNames[static_cast<size_t>(form.kind)]) + std::string(direction) +
                   (form.amax_only ? ".amax" : ""),
               form.cols, form.precision) {}

  Step forward() {
    Expr x = build_.load(form_.x, A::x, {});
    if (form_.residual) x = between(x + build_.load(*form_.residual, A::residual, {}));
    const Expr eps = build_.load({.from = Load::From::parameter, .arg = 0});
    const NormStatistics s = norm_statistics(form_.kind, form_.cols, x, eps, total());
    Expr y = s.from_mean * s.rstdev;
    build_.norm(norm_part(form_.kind, x, eps, s, y));
    if (form_.gamma) y = y * gamma();
    if (form_.beta) y = y + build_.load({Load::From::row, A::beta, *form_.beta});
    store(between(y));
    if (form_.amax_only) return build_.finish();
    const StepBuilder::Part sum{x, {}};
    if (form_.sum) build_.store(*form_.sum, A::sum, A::sum_scale, form_.cols, std::span(&sum, 1));
    if (form_.mean && s.mean) build_.store({Store::To::column, A::mean}, *s.mean);
    if (form_.rstdev) build_.store({Store::To::column, A::rstdev}, s.rstdev);
    return build_.finish();
  }

  Step backward() {
    const Expr grad = build_.load(form_.grad, A::grad, {});
    const Expr x = build_.load(form_.x, A::x, {});
    const Expr r = build_.load({Load::From::column, A::rstdev_in});
    std::optional<Expr> mean;
    if (form_.kind == NormKind::layer) mean = build_.load({Load::From::column, A::mean_in});
    const Expr from_mean = mean ? x - *mean : x;
    NormGrad::Part part = norm_grad_part(form_.kind, x, mean, r);
    if (form_.y) {
      const Expr w = form_.gamma ? grad * gamma() : grad;
      const Expr dx = norm_gradient(form_.kind, form_.cols, w, from_mean, r, total());
      part.w = w.id();
      part.dx = dx.id();
      store(added(between(dx)));
    }
    build_.norm_grad(0, part);
    if (form_.amax_only) return build_.finish();
    if (form_.dgamma) store_sum(A::dgamma, *form_.dgamma, grad * (from_mean * r));
    if (form_.dbeta) store_sum(A::dbeta, *form_.dbeta, grad);
    return build_.finish();
  }

 private:
  [[nodiscard]] Expr between(Expr e) const {
    return form_.rounding == Rounding::eager ? round(e, form_.x.chain()) : e;
  }
  [[nodiscard]] Expr added(Expr dx) {
    return form_.added ? between(dx + build_.load(*form_.added, A::added, {})) : dx;
  }
  [[nodiscard]] RowTotal total() {
    return [this](Expr e) { return build_.total(e); };
  }
  [[nodiscard]] Expr gamma() {
    const Expr g = build_.load({Load::From::row, A::gamma, *form_.gamma});
    return form_.zero_centered_gamma ? g + 1.0F : g;
  }

  void store(Expr value) {
    if (!form_.y) return;
    const StepBuilder::Part part{value, {}};
    if (!form_.amax_only) build_.store(*form_.y, A::y, A::y_scale, form_.cols, std::span(&part, 1));
    if (form_.y_amax)
      build_.store({.to = Store::To::amax,
                    .arg = A::y_amax,
                    .join = form_.y->format.scaling == Scaling::delayed},
                   value);
  }
  void store_sum(uint32_t arg, DType dtype, Expr value) {
    build_.store({.to = Store::To::column_sum, .arg = arg, .dtype = dtype, .ordered = true}, value);
  }

  const NormForm& form_;
  StepBuilder build_;
};

}  // namespace

Step norm_step(const NormForm& form) { return NormBuilder(form, "").forward(); }
Step norm_backward_step(const NormForm& form) { return NormBuilder(form, ".bwd").backward(); }

Key key(const NormForm& form, bool backward) {
  Key key('n');
  key.add(backward).add(form.kind).add(form.cols).add(form.zero_centered_gamma);
  key.add(form.precision).add(form.rounding).add(form.x).add(form.residual);
  key.add(form.gamma).add(form.beta).add(form.y).add(form.sum).add(form.mean).add(form.rstdev);
  key.add(form.y_amax).add(form.amax_only).add(form.grad).add(form.added);
  key.add(form.dgamma).add(form.dbeta);
  return key;
}

}  // namespace tenon
