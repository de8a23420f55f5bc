// The adjoint of a broadcast is a sum over what was broadcast.
#include "lower/single_fuse.h"

#include "lazy/builder.h"
#include "step/key.h"

namespace tenon {

namespace {

Store::To adjoint(Load::From from) {
  switch (from) {
    case Load::From::row:
      return Store::To::column_sum;
    case Load::From::column:
      return Store::To::row_sum;
    case Load::From::tile:
      return Store::To::tile;
    default:
      return Store::To::sum;
  }
}

}  // namespace

Step fuse_step(const FuseForm& form) {
  StepBuilder build(form.name + (form.grad ? ".bwd" : ""), form.cols, form.precision);
  std::vector<Expr> in;
  for (uint32_t i = 0; i < form.arguments.size(); ++i)
    in.push_back(build.load({form.arguments[i].from, i, form.arguments[i].dtype, {}}));
  const std::vector<Expr> arguments = in;
  std::optional<Expr> seed;
  if (form.grad)
    seed = build.load(
        {Load::From::tile, static_cast<uint32_t>(form.arguments.size()), *form.grad, {}});
  for (uint32_t i = 0; i < form.parameters; ++i)
    in.push_back(build.load({Load::From::parameter, i, DType::f32, {}}));

  Expr y = form.f(in);
  if (!form.grad) {
    // One function is one op: `eager` rounds its result to the dtype of its first argument.
    if (form.rounding == Rounding::eager && !form.arguments.empty())
      y = round(y, form.arguments[0].dtype);
    build.store({Store::To::tile, 0, form.y, {}}, y);
    return build.finish();
  }
  const std::vector<Expr> d = build.grad(y, *seed, arguments);
  for (uint32_t i = 0; i < form.arguments.size(); ++i)
    if (const auto dtype = form.arguments[i].gradient)
      build.store({adjoint(form.arguments[i].from), i, *dtype, {}}, d[i]);
  return build.finish();
}

Key key(const FuseForm& form) {
  Key key('f');
  for (const FuseForm::Argument& a : form.arguments) key.add(a.from).add(a.dtype).add(a.gradient);
  key.add(form.parameters).add(form.grad).add(form.y).add(form.cols);
  key.add(form.precision).add(form.rounding);
  return key;
}

}  // namespace tenon
