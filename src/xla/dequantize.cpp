// The XLA FFI handler that decodes a tensor: data, scale_inv -> y.
#include "xla/frame.h"

namespace tenon::ffi {

namespace {

// Attributes: scaling_mode, columnwise (the orientation of the data), swizzled, and the size of the
// tensor as rows x columns.
void dequantize(const CallContext& context, Buffer data, Buffer scale_inv, Result y,
                const Attributes& all) {
  constexpr std::string_view kOp = "dequantize";
  Frame frame(kOp, context, data);
  const Shape shape{attribute<int64_t>(kOp, all, "rows"), attribute<int64_t>(kOp, all, "columns")};
  require(shape.rows >= 0 && shape.cols >= 0, kOp, ": the tensor is ", shape.rows, "x", shape.cols,
          "; sizes are not negative");
  const Format format{
      .scaling = static_cast<Scaling>(choice(kOp, all, "scaling_mode", kScalings.size())),
      .swizzled = attribute<bool>(kOp, all, "swizzled", false)};
  const bool columnwise = attribute<bool>(kOp, all, "columnwise");
  quantize({.x = frame.tensor(format, columnwise, shape, data, scale_inv),
            .y = frame.view("y", *y, shape)},
           context.options());
}

template <class Binding>
auto dequantize_arguments(Binding binding) {
  return std::move(binding)
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Ret<Buffer>()
      .template Attrs<Attributes>();
}

}  // namespace

#pragma GCC visibility push(default)
// NOLINTBEGIN(readability-identifier-naming): named like the other handlers.
TENON_XLA_HANDLERS(tenon_Dequantize, dequantize, dequantize_arguments);
// NOLINTEND(readability-identifier-naming)
#pragma GCC visibility pop

}  // namespace tenon::ffi
