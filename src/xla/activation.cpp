// The XLA FFI handlers of activations as C symbols. Arguments and results have the order of
// Transformer Engine. All scaling modes are supported; activations are given by name. The
// initialise stage makes the kernels and touches no buffer. On CUDA, XLA runs it before it records
// a command buffer.
#include "xla/frame.h"

namespace tenon::ffi {

namespace {

void check_inputs(std::string_view op, const Request& request, const Folded& x) {
  require(x.inputs == request.f.inputs, op, ": x has ", x.inputs, " in its last axis but one; ",
          request.f.name, " has ", request.f.inputs, request.f.inputs == 1 ? " input" : " inputs",
          ", so it must be [..., ", request.f.inputs, ", H]");
}

// An optional sixth result is a workspace.
void act_lu(const CallContext& given, Buffer x, Buffer scale, Buffer amax, Result data,
            Result columnwise_data, Result scale_inv, Result columnwise_scale_inv,
            Result updated_amax, ::xla::ffi::RemainingRets rest, const Attributes& attributes) {
  constexpr std::string_view kOp = "act_lu";
  const CallContext context = rest.size() > 0 ? given.with(**rest.get<Buffer>(0)) : given;
  const Request r = request(kOp, attributes, context, false);
  const Frame::Results y{*data, *columnwise_data, *scale_inv, *columnwise_scale_inv, *updated_amax};
  const Folded in = folded(kOp, "x", x);
  check_inputs(kOp, r, in);
  Frame frame(kOp, context, x);
  frame.carry(amax, y.amax);
  Forward call{.x = frame.view("x", x, {in.rows, in.inputs * in.columns}),
               .y = frame.tensor(r, {in.rows, in.columns}, scale, y)};
  if (r.wants_amax) call.amax = frame.view("amax", y.amax, {1, 1});
  forward(r.f, call, r.options);
}

void dact_lu_dbias_quantize(const CallContext& given, Buffer dz, Buffer x, Buffer scale,
                            Buffer amax, Result data, Result columnwise_data, Result scale_inv,
                            Result columnwise_scale_inv, Result updated_amax, Result dbias,
                            Result workspace, const Attributes& attributes) {
  constexpr std::string_view kOp = "dact_lu";
  const CallContext context = given.with(*workspace);
  const Request r = request(kOp, attributes, context, true);
  const Frame::Results dx{*data, *columnwise_data, *scale_inv, *columnwise_scale_inv,
                          *updated_amax};
  const Folded in = folded(kOp, "x", x);
  check_inputs(kOp, r, in);
  Frame frame(kOp, context, x);
  const Shape shape{in.rows, in.inputs * in.columns};
  frame.carry(amax, dx.amax);
  Backward call{.grad = frame.view("dz", dz, {in.rows, in.columns}),
                .x = frame.view("x", x, shape),
                .dx = frame.tensor(r, shape, scale, dx)};
  if (r.wants_dbias) call.dbias = frame.view("dbias", *dbias, {1, shape.cols});
  if (r.wants_amax) call.amax = frame.view("amax", dx.amax, {1, 1});
  backward(r.f, call, r.options);
}

template <class Binding>
auto act_lu_arguments(Binding binding) {
  return std::move(binding)
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .RemainingRets()
      .template Attrs<Attributes>();
}

template <class Binding>
auto dact_lu_arguments(Binding binding) {
  return std::move(binding)
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Attrs<Attributes>();
}

}  // namespace

#pragma GCC visibility push(default)
// NOLINTBEGIN(readability-identifier-naming): the handlers have Transformer Engine's names.
TENON_XLA_HANDLERS(tenon_ActLu, act_lu, act_lu_arguments);
TENON_XLA_HANDLERS(tenon_DActLuDBiasQuantize, dact_lu_dbias_quantize, dact_lu_arguments);
// NOLINTEND(readability-identifier-naming)
#pragma GCC visibility pop

}  // namespace tenon::ffi
