// Forward and backward calls of one activation: checks the arguments, then runs one step.
#include <string>

#include "api/encoding.h"
#include "api/validate.h"
#include "core/fp_mode.h"
#include "lazy/halves.h"
#include "lower/single_activation.h"
#include "runtime/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

namespace {

std::optional<DType> dtype(const View& v) {
  return v.given() ? std::optional(v.dtype) : std::nullopt;
}

std::optional<Operand> operand(const Tensor& t) {
  return t.given() ? std::optional(Operand(t)) : std::nullopt;
}

using Parameters = Few<float, 8>;

Parameters values(const Activation& f) {
  Parameters result;
  for (const Parameter& p : f.parameters) {
    require(p.value >= p.least && p.value <= p.most, f.name, ": ", p.name, " = ", p.value,
            " is outside [", p.least, ", ", p.most, "]; give a value inside");
    result.push_back(p.value);
  }
  return result;
}

// Checks the inputs that forward and backward share, and returns the form with their dtypes.
struct Common {
  const Tensor& x;
  const Tensor& b;
  const View& bias;
  const View& scale;
  const Layout& layout;
};

ActivationForm check_inputs(const std::string& op, const Activation& f, const Common& in,
                            const Options& options) {
  check_options(op, options);
  require(static_cast<size_t>(in.layout.kind) <= 2, op, ": layout number ",
          static_cast<int>(in.layout.kind), " does not exist; use stacked, swapped or interleaved");
  require(static_cast<bool>(f.body) && (f.inputs == 1 || f.inputs == 2), op,
          ": the activation has no formula; make it with activation(\"name\") or define it first");
  check_input(op, {"x", in.x});
  check_input(op, {"b", in.b});
  check_view(op, {"bias", in.bias});
  check_view(op, {"scale", in.scale});
  const auto [rows, x_cols] = in.x.shape();
  ActivationForm form;
  form.layout = in.layout;
  form.separate = in.b.given();
  form.cols = x_cols;
  int64_t bias_cols = x_cols;
  if (f.inputs == 2 && form.separate) {
    check_tensor_shape(op, {"b", in.b}, rows, x_cols, "the halves a (x) and b have one shape");
    require(in.layout == Layout{}, op, ": a layout is given, but a and b are two tensors; ",
            "leave one of the two out");
    bias_cols = 2 * x_cols;
  } else if (f.inputs == 2) {
    check_halves(op, "x", x_cols, in.layout);
    form.cols = x_cols / 2;
    if (form.cols == 0) form.layout = {};  // every k is valid for 0 columns
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
  form.x = Operand(in.x);
  form.b = operand(in.b);
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

// The views of a call in the order of ActivationArgs.
using Inputs = std::array<View, ActivationArgs::inputs>;
using Outputs = std::array<View, ActivationArgs::outputs>;

// Runs one pass. A tensor with current scaling needs an earlier pass that finds its amax.
void run(const Activation& f, ActivationForm& form, Inputs& in, Outputs& out, const Tensor& y,
         const Tensor& db, int64_t rows, const Options& options) {
  using A = ActivationArgs;
  const Parameters parameters = values(f);
  const auto prepare = [&](const ActivationForm& of) {
    return prepared(key(f, of), f.body.identity(), options.device,
                    [&] { return activation_step(f, of); });
  };
  const auto go = [&](const Prepared& step) {
    execute(step, {.rows = rows, .in = in, .out = out, .parameters = parameters}, options);
  };
  std::array<float, 2> found{};
  const auto place = [&](const Tensor& t, size_t i, bool& writes_amax) {
    if (!t.given()) return;
    place_output(t, out.data() + (i == 0 ? A::y : A::db));
    if (!info(t.format.scaling).reads_scale) return;
    View& scale = in[A::y_scale + i];
    View& amax = out[A::y_amax + i];
    const bool finds = finds_amax(t);
    require(!finds || t.amax.given() || options.device != Device::cuda, f.name,
            ": current scaling on cuda needs a place for the amax; give amax, [1,1] f32 there");
    amax = t.amax.given() ? t.amax : matrix(&found[i], DType::f32, 1, 1);
    scale = info(t.format.scaling).scale_given ? t.scale : amax;
    writes_amax = finds || (info(t.format.scaling).scale_given && t.amax.given());
  };
  place(y, 0, form.y_amax);
  place(db, 1, form.db_amax);
  form.y = operand(y);
  form.db = operand(db);
  if (!finds_amax(y) && !finds_amax(db)) return go(*prepare(form));

  // The first pass must find the amax of exactly the values that the second pass encodes. Both
  // passes therefore use the same precision.
  ActivationForm second = form;
  if (finds_amax(y)) second.y_amax = false;
  if (finds_amax(db)) second.db_amax = false;
  const auto encode = prepare(second);
  ActivationForm first = form;
  first.amax_only = true;
  first.y_amax = finds_amax(y);
  first.db_amax = finds_amax(db);
  first.precision = encode->step.effective_precision();
  go(*prepare(first));
  go(*encode);
}

}  // namespace

void forward(const Activation& f, const Forward& c, const Options& options) {
  const FpMode ieee;
  const std::string op = f.name + " forward";
  ActivationForm form = check_inputs(op, f, {c.x, c.b, c.bias, c.scale, c.layout}, options);
  const int64_t rows = c.x.shape().rows;
  const bool nothing = rows == 0 && form.cols == 0;
  require(nothing || c.y.given() || c.amax.given(), op, ": no output is given; pass y, or amax");
  if (c.y.given())
    check_output(op, {"y", c.y}, rows, form.cols,
                 f.inputs == 2 ? "half the columns of the gated input" : "the shape of x");
  check_amax(op, c.amax);
  NamedList inputs;
  NamedList outputs;
  append_inputs(inputs, {"x", c.x});
  append_inputs(inputs, {"b", c.b});
  append(inputs, "bias", c.bias);
  append(inputs, "scale", c.scale);
  append_outputs(inputs, outputs, {"y", c.y});
  append(outputs, "amax", c.amax);
  static const NamedList kInPlace{{"x", {}}, {"b", {}}};
  check_overlap(op, inputs, outputs, kInPlace);
  form.amax = dtype(c.amax);
  using A = ActivationArgs;
  Inputs in{};
  place_input(c.x, in.data() + A::x);
  place_input(c.b, in.data() + A::b);
  in[A::bias] = c.bias;
  in[A::scale] = c.scale;
  Outputs out{};
  out[A::amax] = c.amax;
  static const Tensor kNone;
  run(f, form, in, out, c.y, kNone, rows, options);
}

void backward(const Activation& f, const Backward& c, const Options& options) {
  const FpMode ieee;
  const std::string op = f.name + " backward";
  ActivationForm form = check_inputs(op, f, {c.x, c.b, c.bias, c.scale, c.layout}, options);
  const auto [rows, cols] = c.x.shape();
  check_input(op, {"grad", c.grad});
  check_tensor_shape(op, {"grad", c.grad}, rows, form.cols, "the shape of the forward's output");
  const bool nothing = rows == 0 && cols == 0;
  require(nothing || c.dx.given() || c.db.given() || c.dbias.given() || c.dscale.given() ||
              c.amax.given(),
          op, ": no output is given; pass dx, db, dbias or dscale");
  if (c.dx.given()) check_output(op, {"dx", c.dx}, rows, cols, "the shape of x");
  if (c.db.given()) {
    require(form.separate, op, ": db is given, but b is not a tensor of its own; dx holds both");
    check_output(op, {"db", c.db}, rows, cols, "the shape of b");
  }
  if (c.dbias.given()) {
    // Without a bias the column sums are still defined: they are the gradient of a zero bias.
    check_view(op, {"dbias", c.dbias});
    check_shape(op, {"dbias", c.dbias}, 1, form.separate ? 2 * cols : cols,
                "one number for each column of the input");
  }
  if (c.dscale.given()) {
    require(f.scaled, op, ": dscale is given, but the activation is not scaled; use scaled(…)");
    check_view(op, {"dscale", c.dscale});
    check_shape(op, {"dscale", c.dscale}, rows, 1, "one number for each row of x");
  }
  check_amax(op, c.amax);
  NamedList inputs;
  NamedList outputs;
  append_inputs(inputs, {"grad", c.grad});
  append_inputs(inputs, {"x", c.x});
  append_inputs(inputs, {"b", c.b});
  append(inputs, "bias", c.bias);
  append(inputs, "scale", c.scale);
  append_outputs(inputs, outputs, {"dx", c.dx});
  append_outputs(inputs, outputs, {"db", c.db});
  append(outputs, "dbias", c.dbias);
  append(outputs, "dscale", c.dscale);
  append(outputs, "amax", c.amax);
  static const NamedList kInPlace{{"grad", {}}, {"x", {}}, {"b", {}}};
  check_overlap(op, inputs, outputs, kInPlace);
  form.backward = true;
  form.grad = Operand(c.grad);
  form.dbias = dtype(c.dbias);
  form.dscale = dtype(c.dscale);
  form.amax = dtype(c.amax);
  using A = ActivationArgs;
  Inputs in{};
  place_input(c.x, in.data() + A::x);
  place_input(c.b, in.data() + A::b);
  place_input(c.grad, in.data() + A::grad);
  in[A::bias] = c.bias;
  in[A::scale] = c.scale;
  Outputs out{};
  out[A::dbias] = c.dbias;
  out[A::dscale] = c.dscale;
  out[A::amax] = c.amax;
  run(f, form, in, out, c.dx, c.db, rows, options);
}

}  // namespace tenon
