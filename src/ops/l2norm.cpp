// Row sums first, then one element-wise pass.
#include "ops/l2norm.h"

#include "ops/builder.h"

namespace tenon {

namespace {

constexpr auto kTile = Load::From::tile;
constexpr auto kColumn = Load::From::column;

Step row_sum(const char* name, const L2Form& form, bool square) {
  StepBuilder build(name, form.cols, Precision::strict);
  const Expr x = build.load({kTile, 0, form.x, {}});
  const Expr other = square ? x : build.load({kTile, 1, form.grad, {}});
  build.store({Store::To::row_sum, 0, DType::f32, {}}, x * other);
  return build.finish();
}

}  // namespace

Step l2_square_sum(const L2Form& form) { return row_sum("l2norm.sum", form, true); }
Step l2_product_sum(const L2Form& form) { return row_sum("l2norm.bwd.sum", form, false); }

Step l2_rsqrt(const L2Form& /*form*/) {
  StepBuilder build("l2norm.rsqrt", 1, Precision::strict);
  const Expr s = build.load({kTile, 0, DType::f32, {}});
  const Expr eps = build.load({Load::From::parameter, 0, DType::f32, {}});
  build.store({Store::To::tile, 0, DType::f32, {}}, rsqrt(s + eps));
  return build.finish();
}

Step l2_scale(const L2Form& form) {
  StepBuilder build("l2norm", form.cols, form.options.precision);
  const Expr x = build.load({kTile, 0, form.x, {}});
  Expr y = x * build.load({kColumn, 1, DType::f32, {}});
  if (form.options.rounding == Rounding::eager) y = round(y, form.x);
  build.store({Store::To::tile, 0, form.y, {}}, y);
  return build.finish();
}

Step l2_backward(const L2Form& form) {
  StepBuilder build("l2norm.bwd", form.cols, form.options.precision);
  const Expr g = build.load({kTile, 0, form.grad, {}});
  const Expr x = build.load({kTile, 1, form.x, {}});
  const Expr r = build.load({kColumn, 2, DType::f32, {}});
  const Expr t = build.load({kColumn, 3, DType::f32, {}});
  build.store({Store::To::tile, 0, form.y, {}}, r * (g - x * (r * r) * t));
  return build.finish();
}

}  // namespace tenon
