// Bias, dropout and residual add in one pass, forward and backward.
#include <vector>

#include "api/validate.h"
#include "choice/backends.h"
#include "core/fp_mode.h"
#include "lower/single_dropout.h"
#include "runtime/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

namespace {

std::optional<DType> dtype(const View& v) {
  return v.given() ? std::optional(v.dtype) : std::nullopt;
}

void check_random(std::string_view op, double p, bool training, const Random* random, int64_t cols,
                  const Options& options) {
  check_options(op, options);
  require(p >= 0 && p <= 1, op, ": p = ", p, "; a probability lies in [0, 1]");
  if (!training) return;
  require(random != nullptr, op, ": random is null; training needs a state, e.g. a seed, with ",
          "columns = ", cols);
  if (options.device == Device::cuda) return;  // the state is in device memory
  const auto width = static_cast<uint64_t>(cols);
  require(random->columns >= width && random->col0 <= random->columns - width, op,
          ": random has columns = ", random->columns, " and col0 = ", random->col0, ", but ", cols,
          " columns are drawn; set columns to the width of the whole tensor");
}

static_assert(sizeof(Random) == 5 * sizeof(uint64_t));

// The bytes of the state, for the overlap check.
View bytes(const Random* random) {
  return random ? matrix(random, DType::f32, 1, sizeof(Random) / sizeof(float)) : View{};
}

void run(const Prepared& step, int64_t rows, std::span<const View> in, std::span<const View> out,
         const DropoutRule& rule, const Random* random, const Options& options) {
  const std::array parameters{rule.threshold, rule.scale};
  execute(step,
          {.rows = rows,
           .in = in,
           .out = out,
           .parameters = parameters,
           .random = reinterpret_cast<const uint64_t*>(random)},
          options);
}

}  // namespace

void bias_dropout_add(const BiasDropoutAdd& c, const Options& options) {
  constexpr std::string_view kOp = "bias_dropout_add";
  const FpMode ieee;
  check_view(kOp, {"x", c.x});
  check_random(kOp, c.p, c.training, c.random, c.x.cols, options);
  check_view(kOp, {"y", c.y});
  check_shape(kOp, {"y", c.y}, c.x.rows, c.x.cols, "the shape of x");
  if (c.bias.given()) {
    check_view(kOp, {"bias", c.bias});
    check_shape(kOp, {"bias", c.bias}, 1, c.x.cols, "one number for each column of x");
  }
  if (c.residual.given()) {
    check_view(kOp, {"residual", c.residual});
    check_shape(kOp, {"residual", c.residual}, c.x.rows, c.x.cols, "the shape of x");
  }
  check_overlap(
      kOp, {{"x", c.x}, {"bias", c.bias}, {"residual", c.residual}, {"random", bytes(c.random)}},
      {{"y", c.y}}, {{"x", {}}, {"residual", {}}});
  const DropoutForm form{.training = c.training,
                         .cols = c.x.cols,
                         .precision = options.precision,
                         .rounding = options.rounding,
                         .chain = c.x.dtype,
                         .x = c.x.dtype,
                         .bias = dtype(c.bias),
                         .residual = dtype(c.residual),
                         .y = c.y.dtype};
  const auto step =
      prepared(key(form, false), nullptr, options.device, [&] { return dropout_step(form); });
  const std::array in{c.x, c.bias, c.residual};
  run(*step, c.x.rows, in, std::span(&c.y, 1), dropout_rule(c.p), c.random, options);
  auto* const state = reinterpret_cast<uint64_t*>(c.random);
  if (c.training) backend_for(options.device).draw(state, state, 1, options.stream);
}

void bias_dropout_add_backward(const BiasDropoutAddBackward& c, const Options& options) {
  constexpr std::string_view kOp = "bias_dropout_add backward";
  const FpMode ieee;
  check_view(kOp, {"grad", c.grad});
  check_random(kOp, c.p, c.training, c.random, c.grad.cols, options);
  const bool nothing = c.grad.rows == 0 && c.grad.cols == 0;
  require(nothing || c.dx.given() || c.dbias.given() || c.dresidual.given(), kOp,
          ": no output is given; pass dx, dbias or dresidual");
  for (const Named& v : {Named{"dx", c.dx}, Named{"dresidual", c.dresidual}}) {
    if (!v.view.given()) continue;
    check_view(kOp, v);
    check_shape(kOp, v, c.grad.rows, c.grad.cols, "the shape of grad");
  }
  if (c.dbias.given()) {
    check_view(kOp, {"dbias", c.dbias});
    check_shape(kOp, {"dbias", c.dbias}, 1, c.grad.cols, "one number for each column of grad");
  }
  check_overlap(kOp, {{"grad", c.grad}, {"random", bytes(c.random)}},
                {{"dx", c.dx}, {"dbias", c.dbias}, {"dresidual", c.dresidual}}, {{"grad", {}}});
  const DropoutForm form{.training = c.training,
                         .cols = c.grad.cols,
                         .precision = options.precision,
                         .rounding = options.rounding,
                         .chain = c.dx.given() ? c.dx.dtype : c.grad.dtype,  // dtype of x
                         .x = c.grad.dtype,
                         .bias = dtype(c.dbias),
                         .residual = dtype(c.dresidual),
                         .y = dtype(c.dx)};
  const auto step = prepared(key(form, true), nullptr, options.device,
                             [&] { return dropout_backward_step(form); });
  const std::array out{c.dx, c.dbias, c.dresidual};
  run(*step, c.grad.rows, std::span(&c.grad, 1), out, dropout_rule(c.p), c.random, options);
}

}  // namespace tenon
