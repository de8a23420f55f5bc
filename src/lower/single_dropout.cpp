// The mask is a load like any other, so nothing is stored between forward and backward.
#include "lower/single_dropout.h"

#include "lazy/builder.h"
#include "step/key.h"

namespace tenon {

namespace {

Expr masked(StepBuilder& build, Expr x) {
  const Expr bits = build.load({.from = Load::From::random});
  const Expr threshold = build.load({.from = Load::From::parameter, .arg = 0});
  const Expr scale = build.load({.from = Load::From::parameter, .arg = 1});
  return select(bits >= threshold, x * scale, 0.0F);
}

}  // namespace

Step dropout_step(const DropoutForm& form) {
  StepBuilder build(form.training ? "bias_dropout_add" : "bias_add", form.cols, form.precision);
  const auto between = [&](Expr e) {
    return form.rounding == Rounding::eager ? round(e, form.chain) : e;
  };
  Expr y = build.load({Load::From::tile, 0, form.x});
  if (form.bias) y = between(y + build.load({Load::From::row, 1, *form.bias}));
  if (form.training) y = between(masked(build, y));
  if (form.residual) y = between(build.load({Load::From::tile, 2, *form.residual}) + y);
  build.store({Store::To::tile, 0, *form.y}, y);
  return build.finish();
}

Step dropout_backward_step(const DropoutForm& form) {
  StepBuilder build(form.training ? "bias_dropout_add.bwd" : "bias_add.bwd", form.cols,
                    form.precision);
  const Expr grad = build.load({Load::From::tile, 0, form.x});
  Expr dx = grad;
  // Dropout is linear in its input, so what stands for the input does not appear in the result.
  if (form.training && (form.y || form.bias))
    dx = build.grad(masked(build, grad), grad, std::span(&grad, 1))[0];
  if (form.rounding == Rounding::eager) dx = round(dx, form.chain);
  if (form.y) build.store({Store::To::tile, 0, *form.y}, dx);
  if (form.bias) build.store({Store::To::column_sum, 1, *form.bias}, dx);
  if (form.residual) build.store({Store::To::tile, 2, *form.residual}, grad);
  return build.finish();
}

Key key(const DropoutForm& form, bool backward) {
  Key key('d');
  key.add(backward).add(form.training).add(form.cols).add(form.precision).add(form.rounding);
  key.add(form.chain).add(form.x).add(form.bias).add(form.residual).add(form.y);
  return key;
}

}  // namespace tenon
