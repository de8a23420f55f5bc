// Builds the formula of a call from its parts; the backward formula is derived.
#include "lower/single_activation.h"

#include "lazy/builder.h"
#include "step/key.h"

namespace tenon {

Step activation_step(const Activation& f, const ActivationForm& form) {
  using A = ActivationArgs;
  StepBuilder build(f.name + (form.backward ? ".bwd" : "") + (form.amax_only ? ".amax" : ""),
                    form.cols, form.precision);
  const size_t inputs = f.inputs == 2 ? 2 : 1;
  const std::array<ColumnMap, 2> half = halves(form.layout, form.cols);
  const std::array<ColumnMap, 2> stacked = halves({}, form.cols);
  const bool one_tensor = inputs == 2 && !form.separate;
  // The chain's dtype is its input's; `eager` rounds to it between ops.
  const auto between = [&](Expr e) {
    return form.rounding == Rounding::eager ? round(e, form.x.chain()) : e;
  };

  std::vector<Expr> z;
  for (size_t i = 0; i < inputs; ++i) {
    const bool second = form.separate && i == 1;
    z.push_back(build.load(second ? *form.b : form.x, second ? A::b : A::x,
                           one_tensor ? half[i] : ColumnMap{}));
  }
  for (size_t i = 0; form.bias && i < inputs; ++i) {
    const ColumnMap map = inputs == 1 ? ColumnMap{} : form.separate ? stacked[i] : half[i];
    z[i] = between(z[i] + build.load({Load::From::row, A::bias, *form.bias, map}));
  }
  std::vector<Expr> wrt = z;
  std::optional<Expr> scale;
  if (f.scaled) {
    scale = build.load({Load::From::column, A::scale, *form.scale, {}});
    wrt.push_back(*scale);
  }
  std::optional<Expr> seed;
  if (form.backward) seed = build.load(*form.grad, A::grad, {});
  std::vector<Expr> parameters;
  for (uint32_t i = 0; i < f.parameters.size(); ++i)
    parameters.push_back(build.load({Load::From::parameter, i, DType::f32, {}}));

  Expr y = call(f, z, parameters);
  if (scale) y = y * *scale;

  const auto store_amax = [&](uint32_t arg, Expr value, bool join) {
    build.store({.to = Store::To::amax, .arg = arg, .dtype = DType::f32, .join = join}, value);
  };
  // A tensor with one scale: its amax, and itself unless only that is asked for.
  const auto store_tensor = [&](const Operand& o, bool second,
                                std::span<const StepBuilder::Part> parts, int64_t cols) {
    if (!form.amax_only)
      build.store(o, second ? A::db : A::y, second ? A::db_scale : A::y_scale, cols, parts);
    if (second ? form.db_amax : form.y_amax)
      store_amax(second ? A::db_amax : A::y_amax,
                 parts.size() == 1 ? parts[0].value : max(abs(parts[0].value), abs(parts[1].value)),
                 o.format.scaling == Scaling::delayed);
  };

  if (!form.backward) {
    y = between(y);
    const StepBuilder::Part part{y, {}};
    if (form.y) store_tensor(*form.y, false, std::span(&part, 1), form.cols);
    if (form.amax && !form.amax_only) store_amax(A::amax, y, false);
    return build.finish();
  }
  std::vector<Expr> d = build.grad(y, *seed, wrt);
  std::vector<StepBuilder::Part> parts;
  for (size_t i = 0; i < inputs; ++i) {
    d[i] = between(d[i]);
    parts.push_back({d[i], one_tensor ? half[i] : ColumnMap{}});
    if (!form.dbias || form.amax_only) continue;
    const ColumnMap sums = inputs == 1 ? ColumnMap{} : form.separate ? stacked[i] : half[i];
    build.store({Store::To::column_sum, A::dbias, *form.dbias, sums}, d[i]);
  }
  if (one_tensor) {
    if (form.y) store_tensor(*form.y, false, parts, 2 * form.cols);
  } else {
    if (form.y) store_tensor(*form.y, false, std::span(parts).first(1), form.cols);
    if (form.db) store_tensor(*form.db, true, std::span(parts).subspan(1), form.cols);
  }
  if (form.amax_only) return build.finish();
  if (form.amax) store_amax(A::amax, inputs == 1 ? d[0] : max(abs(d[0]), abs(d[1])), false);
  if (form.dscale) build.store({Store::To::row_sum, A::dscale, *form.dscale, {}}, d[inputs]);
  return build.finish();
}

Key key(const Activation& f, const ActivationForm& form) {
  Key key('a');
  for (const Parameter& p : f.parameters) key.add(p.name);
  key.add(f.inputs).add(form.cols).add(form.layout.kind).add(form.layout.k);
  key.flags(f.scaled, form.backward, form.separate, form.y_amax, form.db_amax, form.amax_only);
  key.add(form.precision).add(form.rounding).add(form.x);
  key.add(form.b).add(form.grad).add(form.y).add(form.db);
  key.add(form.bias).add(form.scale).add(form.dbias).add(form.dscale).add(form.amax);
  return key;
}

}  // namespace tenon
