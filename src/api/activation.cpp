// forward and backward of one activation: checks, then one step.
#include "ops/activation.h"

#include <string>

#include "api/validate.h"
#include "core/fp_mode.h"
#include "plan/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

namespace {

std::optional<DType> dtype(const View& v) {
  return v.given() ? std::optional(v.dtype) : std::nullopt;
}

std::vector<float> values(const Activation& f) {
  std::vector<float> result;
  for (const Parameter& p : f.parameters) {
    require(p.value >= p.least && p.value <= p.most, f.name, ": ", p.name, " = ", p.value,
            " is outside [", p.least, ", ", p.most, "]; give a value inside");
    result.push_back(p.value);
  }
  return result;
}

// The inputs that forward and backward share, checked; gives the form with their dtypes.
struct Common {
  View x, b, bias, scale;
  Layout layout;
};

ActivationForm check_inputs(const std::string& op, const Activation& f, const Common& in,
                            const Options& options) {
  check_options(op, options);
  require(static_cast<size_t>(in.layout.kind) <= 2, op, ": layout number ",
          static_cast<int>(in.layout.kind), " does not exist; use stacked, swapped or interleaved");
  require(static_cast<bool>(f.body) && (f.inputs == 1 || f.inputs == 2), op,
          ": the activation has no formula; make it with activation(\"name\") or define it first");
  for (const Named& v :
       {Named{"x", in.x}, Named{"b", in.b}, Named{"bias", in.bias}, Named{"scale", in.scale}})
    check_view(op, v);
  const int64_t rows = in.x.rows;
  ActivationForm form;
  form.f = f;
  form.layout = in.layout;
  form.separate = in.b.given();
  form.cols = in.x.cols;
  int64_t bias_cols = in.x.cols;
  if (f.inputs == 2 && form.separate) {
    check_shape(op, {"b", in.b}, rows, in.x.cols, "the halves a (x) and b have one shape");
    require(in.layout == Layout{}, op, ": a layout is given, but a and b are two tensors; ",
            "leave one of the two out");
    bias_cols = 2 * in.x.cols;
  } else if (f.inputs == 2) {
    require(in.x.cols % 2 == 0, op, ": x has ", in.x.cols,
            " columns; a gated input holds a and b, so its columns must be even");
    form.cols = in.x.cols / 2;
    const Layout& l = in.layout;
    require(l.k >= 1, op, ": interleaved(", l.k, "): k must be at least 1");
    require(l.kind != Layout::Kind::interleaved || form.cols % l.k == 0, op, ": interleaved(", l.k,
            ") needs a half width divisible by ", l.k, ", it is ", form.cols);
  } else {
    require(!form.separate, op, ": b is given, but ", f.name,
            " has one input; leave b out, or use ", "gated(", f.name, ")");
    require(in.layout == Layout{}, op, ": a layout is given, but ", f.name,
            " is not gated; leave it out");
  }
  if (in.bias.given())
    check_shape(op, {"bias", in.bias}, 1, bias_cols, "one number for each column of the input");
  require(in.scale.given() == f.scaled, op, ": ",
          f.scaled ? "a scaled activation needs scale, one number a row"
                   : "scale is given, but the activation is not scaled; use scaled(…)");
  if (f.scaled) check_shape(op, {"scale", in.scale}, rows, 1, "one number for each row of x");
  form.precision = options.precision;
  form.rounding = options.rounding;
  form.x = in.x.dtype;
  form.b = dtype(in.b);
  form.bias = dtype(in.bias);
  form.scale = dtype(in.scale);
  return form;
}

void check_amax(const std::string& op, const View& amax) {
  if (!amax.given()) return;
  check_view(op, {"amax", amax});
  check_shape(op, {"amax", amax}, 1, 1, "one number for the tensor");
  require(amax.dtype == DType::f32, op, ": amax is ", info(amax.dtype).name, "; it must be f32");
}

}  // namespace

void forward(const Activation& f, const Forward& c, const Options& options) {
  const FpMode ieee;
  const std::string op = f.name + " forward";
  ActivationForm form = check_inputs(op, f, {c.x, c.b, c.bias, c.scale, c.layout}, options);
  check_view(op, {"y", c.y});
  check_shape(op, {"y", c.y}, c.x.rows, form.cols,
              f.inputs == 2 ? "half the columns of the gated input" : "the shape of x");
  check_amax(op, c.amax);
  check_overlap(op, {{"x", c.x}, {"b", c.b}, {"bias", c.bias}, {"scale", c.scale}},
                {{"y", c.y}, {"amax", c.amax}}, {{"x", c.x}, {"b", c.b}});
  form.y = c.y.dtype;
  form.amax = dtype(c.amax);
  using A = ActivationArgs;
  std::array<View, A::inputs> in{c.x, c.b, c.bias, c.scale, View{}};
  std::array<View, A::outputs> out{c.y, View{}, View{}, View{}, c.amax};
  const std::vector<float> parameters = values(f);
  execute(activation_step(form), {.rows = c.x.rows, .in = in, .out = out, .parameters = parameters},
          options);
}

void backward(const Activation& f, const Backward& c, const Options& options) {
  const FpMode ieee;
  const std::string op = f.name + " backward";
  ActivationForm form = check_inputs(op, f, {c.x, c.b, c.bias, c.scale, c.layout}, options);
  check_view(op, {"grad", c.grad});
  check_shape(op, {"grad", c.grad}, c.x.rows, form.cols, "the shape of the forward's output");
  const bool nothing = c.x.rows == 0 && c.x.cols == 0;
  require(nothing || c.dx.given() || c.db.given() || c.dbias.given() || c.dscale.given() ||
              c.amax.given(),
          op, ": no output is given; pass dx, db, dbias or dscale");
  if (c.dx.given()) {
    check_view(op, {"dx", c.dx});
    check_shape(op, {"dx", c.dx}, c.x.rows, c.x.cols, "the shape of x");
  }
  if (c.db.given()) {
    require(form.separate, op, ": db is given, but b is not a tensor of its own; dx holds both");
    check_view(op, {"db", c.db});
    check_shape(op, {"db", c.db}, c.b.rows, c.b.cols, "the shape of b");
  }
  if (c.dbias.given()) {
    // Without a bias the column sums are still well defined: those of a bias of zero.
    check_view(op, {"dbias", c.dbias});
    check_shape(op, {"dbias", c.dbias}, 1, form.separate ? 2 * c.x.cols : c.x.cols,
                "one number for each column of the input");
  }
  if (c.dscale.given()) {
    require(f.scaled, op, ": dscale is given, but the activation is not scaled; use scaled(…)");
    check_view(op, {"dscale", c.dscale});
    check_shape(op, {"dscale", c.dscale}, c.x.rows, 1, "one number for each row of x");
  }
  check_amax(op, c.amax);
  check_overlap(
      op, {{"grad", c.grad}, {"x", c.x}, {"b", c.b}, {"bias", c.bias}, {"scale", c.scale}},
      {{"dx", c.dx}, {"db", c.db}, {"dbias", c.dbias}, {"dscale", c.dscale}, {"amax", c.amax}},
      {{"grad", c.grad}, {"x", c.x}, {"b", c.b}});
  form.backward = true;
  form.grad = c.grad.dtype;
  form.y = dtype(c.dx);
  form.db = dtype(c.db);
  form.dbias = dtype(c.dbias);
  form.dscale = dtype(c.dscale);
  form.amax = dtype(c.amax);
  using A = ActivationArgs;
  std::array<View, A::inputs> in{c.x, c.b, c.bias, c.scale, c.grad};
  std::array<View, A::outputs> out{c.dx, c.db, c.dbias, c.dscale, c.amax};
  const std::vector<float> parameters = values(f);
  execute(activation_step(form), {.rows = c.x.rows, .in = in, .out = out, .parameters = parameters},
          options);
}

}  // namespace tenon
