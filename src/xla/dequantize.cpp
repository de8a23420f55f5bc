// The XLA FFI handler that reads an encoded tensor back: data, scale_inv -> y.
#include "xla/frame.h"

namespace tenon::ffi {

namespace {

// Attributes: scaling_mode, columnwise (which encoding the data are), swizzled, and the size of the
// tensor, rows x columns.
template <Stage stage, Device device>
::xla::ffi::Error handle(Buffer data, Buffer scale_inv, Result y, Attributes all) {
  return guarded([&] {
    constexpr std::string_view kOp = "dequantize";
    const bool dry = stage == Stage::kInitialize;
    const Shape shape{dry ? 0 : attribute<int64_t>(kOp, all, "rows"),
                      attribute<int64_t>(kOp, all, "columns")};
    require(shape.rows >= 0 && shape.cols >= 0, kOp, ": the tensor is ", shape.rows, "x",
            shape.cols, "; sizes are not negative");
    Frame frame(kOp, stage);
    const Format format{
        .scaling = static_cast<Scaling>(choice(kOp, all, "scaling_mode", kScalings.size())),
        .swizzled = attribute<bool>(kOp, all, "swizzled", false)};
    const bool columnwise = attribute<bool>(kOp, all, "columnwise");
    quantize({.x = frame.tensor(format, columnwise, shape, data, scale_inv),
              .y = frame.view("y", *y, shape)},
             {.device = device});
  });
}

template <Stage stage>
auto binding() {
  return ::xla::ffi::Ffi::Bind<stage>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Ret<Buffer>()
      .template Attrs<Attributes>();
}

}  // namespace

#pragma GCC visibility push(default)
// NOLINTBEGIN(readability-identifier-naming): named like the other handlers.
XLA_FFI_DEFINE_HANDLER_SYMBOL(tenon_Dequantize, (handle<Stage::kExecute, Device::cpu>),
                              binding<Stage::kExecute>(),
                              {::xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(tenon_DequantizeInitialize, (handle<Stage::kInitialize, Device::cpu>),
                              binding<Stage::kInitialize>());
// NOLINTEND(readability-identifier-naming)
#pragma GCC visibility pop

}  // namespace tenon::ffi
