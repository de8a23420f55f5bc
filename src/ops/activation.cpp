// Builds the formula of a call from its parts; the backward formula is derived.
#include "ops/activation.h"

#include "ops/builder.h"

namespace tenon {

namespace {

// Column maps of the halves a and b in one tensor of 2H columns.
std::array<ColumnMap, 2> halves(const Layout& layout, int64_t h) {
  switch (layout.kind) {
    case Layout::Kind::swapped:
      return {{{1, 1, h}, {1, 1, 0}}};
    case Layout::Kind::interleaved:
      return {{{layout.k, 2 * layout.k, 0}, {layout.k, 2 * layout.k, layout.k}}};
    default:
      return {{{1, 1, 0}, {1, 1, h}}};
  }
}

}  // namespace

Step activation_step(const ActivationForm& form) {
  using A = ActivationArgs;
  StepBuilder build(form.f.name + (form.backward ? ".bwd" : ""), form.cols, form.precision);
  const size_t inputs = form.f.inputs == 2 ? 2 : 1;
  const std::array<ColumnMap, 2> half = halves(form.layout, form.cols);
  const std::array<ColumnMap, 2> stacked = halves({}, form.cols);
  // The chain's dtype is its input's; `eager` rounds to it between ops.
  const auto between = [&](Expr e) {
    return form.rounding == Rounding::eager ? round(e, form.x) : e;
  };

  std::vector<Expr> z;
  for (size_t i = 0; i < inputs; ++i) {
    const ColumnMap map = inputs == 1 || form.separate ? ColumnMap{} : half[i];
    const bool second = form.separate && i == 1;
    z.push_back(
        build.load({Load::From::tile, second ? A::b : A::x, second ? *form.b : form.x, map}));
  }
  for (size_t i = 0; form.bias && i < inputs; ++i) {
    const ColumnMap map = inputs == 1 ? ColumnMap{} : form.separate ? stacked[i] : half[i];
    z[i] = between(z[i] + build.load({Load::From::row, A::bias, *form.bias, map}));
  }
  std::vector<Expr> wrt = z;
  std::optional<Expr> scale;
  if (form.f.scaled) {
    scale = build.load({Load::From::column, A::scale, *form.scale, {}});
    wrt.push_back(*scale);
  }
  std::optional<Expr> seed;
  if (form.backward) seed = build.load({Load::From::tile, A::grad, *form.grad, {}});
  std::vector<Expr> parameters;
  for (uint32_t i = 0; i < form.f.parameters.size(); ++i)
    parameters.push_back(build.load({Load::From::parameter, i, DType::f32, {}}));

  Expr y = call(form.f, z, parameters);
  if (scale) y = y * *scale;

  if (!form.backward) {
    y = between(y);
    if (form.y) build.store({Store::To::tile, A::y, *form.y, {}}, y);
    if (form.amax) build.store({Store::To::amax, A::amax, *form.amax, {}}, y);
    return build.finish();
  }
  std::vector<Expr> d = build.grad(y, *seed, wrt);
  for (size_t i = 0; i < inputs; ++i) {
    if (form.bias || form.dbias) d[i] = between(d[i]);  // on its way to the bias
    const ColumnMap map = inputs == 1 || form.separate ? ColumnMap{} : half[i];
    const bool second = form.separate && i == 1;
    const auto dtype = second ? form.db : form.y;
    if (dtype) build.store({Store::To::tile, second ? A::db : A::y, *dtype, map}, d[i]);
    if (form.dbias) {
      const ColumnMap sums = form.separate && inputs == 2 ? stacked[i] : map;
      build.store({Store::To::column_sum, A::dbias, *form.dbias, sums}, d[i]);
    }
  }
  if (form.amax)
    build.store({Store::To::amax, A::amax, *form.amax, {}},
                inputs == 1 ? d[0] : max(abs(d[0]), abs(d[1])));
  if (form.dscale) build.store({Store::To::row_sum, A::dscale, *form.dscale, {}}, d[inputs]);
  return build.finish();
}

}  // namespace tenon
