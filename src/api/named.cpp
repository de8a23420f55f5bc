// The named functions: prefixes of an activation's name, and the L2 normalisation.
#include <array>

#include "api/validate.h"
#include "core/fp_mode.h"
#include "expr/registry.h"
#include "lower/single_norm.h"
#include "runtime/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

namespace {

struct NamedCall {
  std::string_view name;
  std::span<const View> in, out;
  const Options& options;

  void expect(size_t inputs, size_t outputs, std::string_view signature) const {
    require(in.size() == inputs && out.size() == outputs, name, ": ", in.size(), " inputs and ",
            out.size(), " outputs given; call it as ", signature);
  }
};

std::optional<Activation> unary_after(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  auto f = registered(name.substr(prefix.size()));
  return f && f->inputs == 1 ? f : std::nullopt;
}

bool run_l2(const NamedCall& c) {
  constexpr float kEps = 1e-6F;
  if (c.name == "l2normalization") {
    c.expect(1, 1, "(x -> y)");
    l2_normalization(c.in[0], c.out[0], {}, kEps, c.options);
  } else if (c.name == "l2normalization_fwd") {
    c.expect(1, 2, "(x -> y, r)");
    l2_normalization(c.in[0], c.out[0], c.out[1], kEps, c.options);
  } else if (c.name == "l2normalization_bwd") {
    c.expect(3, 1, "(grad, x, r -> dx)");
    l2_normalization_backward(c.in[0], c.in[1], c.in[2], c.out[0], c.options);
  } else {
    return false;
  }
  return true;
}

NormForm l2_form(const View& x, const View& y, const Options& options) {
  NormForm form;
  form.kind = NormKind::l2;
  form.cols = x.cols;
  form.precision = options.precision;
  form.rounding = options.rounding;
  form.x = x.dtype;
  form.y = y.dtype;
  return form;
}

void check_l2(std::string_view op, const View& r, int64_t rows, const Options& options) {
  check_options(op, options);
  if (!r.given()) return;
  check_view(op, {"r", r});
  check_shape(op, {"r", r}, rows, 1, "one number for each row of x");
  require(r.dtype == DType::f32, op, ": r is ", info(r.dtype).name, "; it must be f32");
}

}  // namespace

void run(std::string_view name, std::span<const View> in, std::span<const View> out,
         const Options& options) {
  const NamedCall c{name, in, out, options};
  if (run_l2(c)) return;
  if (const auto f = unary_after(name, "")) {
    c.expect(1, 1, "(x -> y)");
    return forward(*f, {.x = in[0], .y = out[0]}, options);
  }
  if (const auto f = unary_after(name, "bias_")) {
    c.expect(2, 1, "(x, bias -> y)");
    return forward(*f, {.x = in[0], .bias = in[1], .y = out[0]}, options);
  }
  if (const auto f = unary_after(name, "bgrad_d")) {
    c.expect(3, 2, "(grad, x, bias -> dbias, dx)");
    return backward(*f, {.grad = in[0], .x = in[1], .bias = in[2], .dx = out[1], .dbias = out[0]},
                    options);
  }
  if (const auto f = unary_after(name, "d")) {
    c.expect(2, 1, "(grad, x -> dx)");
    return backward(*f, {.grad = in[0], .x = in[1], .dx = out[0]}, options);
  }
  fail(Code::invalid_argument, "function '", name, "' is not known", suggestion(name),
       "; named functions are act, bias_act, dact and bgrad_dact for a unary activation act, and ",
       "l2normalization, l2normalization_fwd, l2normalization_bwd");
}

void l2_normalization(const View& x, const View& y, const View& r, float eps,
                      const Options& options) {
  constexpr std::string_view kOp = "l2_normalization";
  const FpMode ieee;
  check_view(kOp, {"x", x});
  check_view(kOp, {"y", y});
  check_shape(kOp, {"y", y}, x.rows, x.cols, "the shape of x");
  require(eps >= 0, kOp, ": eps = ", eps, "; it must not be negative");
  if (x.cols == 0 && !r.given()) return;  // nothing to write
  check_l2(kOp, r, x.rows, options);
  check_overlap(kOp, {{"x", x}}, {{"y", y}}, {{"x", x}});
  check_overlap(kOp, {{"x", x}, {"y", y}}, {{"r", r}}, {});

  NormForm form = l2_form(x, y, options);
  form.rstdev = r.given();
  std::array<View, NormArgs::inputs> in{};
  std::array<View, NormArgs::outputs> out{};
  in[NormArgs::x] = x;
  out[NormArgs::y] = y;
  out[NormArgs::rstdev] = r;
  const auto step =
      prepared(key(form, false), nullptr, options.device, [&] { return norm_step(form); });
  execute(*step, {.rows = x.rows, .in = in, .out = out, .parameters = std::span(&eps, 1)}, options);
}

void l2_normalization_backward(const View& grad, const View& x, const View& r, const View& dx,
                               const Options& options) {
  constexpr std::string_view kOp = "l2_normalization_backward";
  const FpMode ieee;
  for (const Named& v : {Named{"grad", grad}, Named{"x", x}, Named{"dx", dx}}) {
    check_view(kOp, v);
    check_shape(kOp, v, x.rows, x.cols, "the shape of x");
  }
  check_l2(kOp, r, x.rows, options);
  check_overlap(kOp, {{"grad", grad}, {"x", x}, {"r", r}}, {{"dx", dx}},
                {{"grad", grad}, {"x", x}});

  if (x.cols == 0) return;  // nothing to write
  NormForm form = l2_form(x, dx, options);
  form.grad = grad.dtype;
  std::array<View, NormArgs::inputs> in{};
  in[NormArgs::x] = x;
  in[NormArgs::grad] = grad;
  in[NormArgs::rstdev_in] = r;
  const auto step =
      prepared(key(form, true), nullptr, options.device, [&] { return norm_backward_step(form); });
  execute(*step, {.rows = x.rows, .in = in, .out = std::span(&dx, 1), .parameters = {}}, options);
}

}  // namespace tenon
