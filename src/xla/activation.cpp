// The XLA FFI handlers of activations, as C symbols: arguments and results in Transformer Engine's
// order, every scaling mode, activations by name. Initialising makes the kernels and touches no
// buffer; XLA asks for it on CUDA.
#include "xla/frame.h"

namespace tenon::ffi {

namespace {

// What a handler knows besides its buffers.
struct Place {
  Stage stage;
  Device device;
};

void check_inputs(std::string_view op, const Request& request, const Folded& x) {
  require(x.inputs == request.f.inputs, op, ": x has ", x.inputs, " in its last axis but one; ",
          request.f.name, " has ", request.f.inputs, request.f.inputs == 1 ? " input" : " inputs",
          ", so it must be [..., ", request.f.inputs, ", H]");
}

void act_lu(Place place, const Buffer& x, const Buffer& scale, const Buffer& amax,
            const Frame::Results& y, const Attributes& attributes) {
  constexpr std::string_view kOp = "act_lu";
  const Request r = request(kOp, attributes, place.device, false);
  Folded in = folded(kOp, "x", x);
  check_inputs(kOp, r, in);
  if (place.stage == Stage::kInitialize) in.rows = 0;
  Frame frame(kOp, place.stage);
  frame.carry(amax, y.amax);
  Forward call{.x = frame.view("x", x, {in.rows, in.inputs * in.columns}),
               .y = frame.tensor(r, {in.rows, in.columns}, scale, y)};
  if (r.wants_amax) call.amax = frame.view("amax", y.amax, {1, 1});
  forward(r.f, call, r.options);
}

void dact_lu_dbias_quantize(Place place, const Buffer& dz, const Buffer& x, const Buffer& scale,
                            const Buffer& amax, const Frame::Results& dx, const Buffer& dbias,
                            const Attributes& attributes) {
  constexpr std::string_view kOp = "dact_lu";
  const Request r = request(kOp, attributes, place.device, true);
  Folded in = folded(kOp, "x", x);
  check_inputs(kOp, r, in);
  if (place.stage == Stage::kInitialize) in.rows = 0;
  const Shape shape{in.rows, in.inputs * in.columns};
  Frame frame(kOp, place.stage);
  frame.carry(amax, dx.amax);
  Backward call{.grad = frame.view("dz", dz, {in.rows, in.columns}),
                .x = frame.view("x", x, shape),
                .dx = frame.tensor(r, shape, scale, dx)};
  if (r.wants_dbias) call.dbias = frame.view("dbias", dbias, {1, shape.cols});
  if (r.wants_amax) call.amax = frame.view("amax", dx.amax, {1, 1});
  backward(r.f, call, r.options);
}

template <Stage stage, Device device>
::xla::ffi::Error handle_act_lu(Buffer x, Buffer scale, Buffer amax, Result y, Result columnwise_y,
                                Result scale_inv, Result columnwise_scale_inv, Result updated_amax,
                                Attributes attributes) {
  return guarded([&] {
    act_lu({stage, device}, x, scale, amax,
           {*y, *columnwise_y, *scale_inv, *columnwise_scale_inv, *updated_amax}, attributes);
  });
}

// The workspace has its place in the order of results; nothing needs it.
template <Stage stage, Device device>
::xla::ffi::Error handle_dact_lu(Buffer dz, Buffer x, Buffer scale, Buffer amax, Result dx,
                                 Result columnwise_dx, Result scale_inv,
                                 Result columnwise_scale_inv, Result updated_amax, Result dbias,
                                 Result /*workspace*/, Attributes attributes) {
  return guarded([&] {
    dact_lu_dbias_quantize({stage, device}, dz, x, scale, amax,
                           {*dx, *columnwise_dx, *scale_inv, *columnwise_scale_inv, *updated_amax},
                           *dbias, attributes);
  });
}

template <Stage stage>
auto act_lu_binding() {
  return ::xla::ffi::Ffi::Bind<stage>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Attrs<Attributes>();
}

template <Stage stage>
auto dact_lu_binding() {
  return ::xla::ffi::Ffi::Bind<stage>()
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(tenon_ActLu, (handle_act_lu<Stage::kExecute, Device::cpu>),
                              act_lu_binding<Stage::kExecute>(),
                              {::xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(tenon_ActLuInitialize,
                              (handle_act_lu<Stage::kInitialize, Device::cpu>),
                              act_lu_binding<Stage::kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tenon_DActLuDBiasQuantize,
                              (handle_dact_lu<Stage::kExecute, Device::cpu>),
                              dact_lu_binding<Stage::kExecute>(),
                              {::xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(tenon_DActLuDBiasQuantizeInitialize,
                              (handle_dact_lu<Stage::kInitialize, Device::cpu>),
                              dact_lu_binding<Stage::kInitialize>());
// NOLINTEND(readability-identifier-naming)
#pragma GCC visibility pop

}  // namespace tenon::ffi
