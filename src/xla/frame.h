// Shared code of the XLA FFI handlers: attributes by name, buffers as views, errors with their
// text.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "runtime/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::ffi {

using Buffer = ::xla::ffi::AnyBuffer;
using Result = ::xla::ffi::Result<Buffer>;
using Attributes = ::xla::ffi::Dictionary;
using ExecutionStage = ::xla::ffi::ExecutionStage;
using Scratch = ::xla::ffi::ScratchAllocator;

// The stage and the device of a handler call.
struct CallContext {
  ExecutionStage stage;
  Device device;
  void* stream = nullptr;
  Scratch* scratch = nullptr;
  void* memory = nullptr;  // a result used as workspace: a command buffer cannot allocate
  size_t bytes = 0;

  [[nodiscard]] bool initialises() const { return stage == ExecutionStage::kInitialize; }
  [[nodiscard]] CallContext with(const Buffer& workspace) const;
  [[nodiscard]] Options options() const;  // options that refer to this context
};

// The attributes of a call. Required:
//   act                          a registered name or the text of a formula
//   act_params                   f32, in the order of the registry; empty for the defaults
//   scaling_mode                 the number of a Scaling
//   quantize_layout              0 rowwise, 1 columnwise, 2 both
//   output_amax_when_no_scaling  whether to compute the amax with scaling_mode 0
//   is_dbias                     backward: whether to compute dbias
// Optional: eps, power_of_two (0: default of the mode, 1: yes, 2: exact scales), swizzled,
// precision, rounding.
struct Request {
  Activation f;
  Format format;  // with the dtype of the result
  bool rowwise = true, columnwise = false;
  bool wants_amax = false, wants_dbias = false;
  Options options;
};
Request request(std::string_view op, const Attributes& attributes, const CallContext& context,
                bool backward);

// Reads an attribute. Without a default it is required.
template <class T>
T attribute(std::string_view op, const Attributes& all, std::string_view name,
            std::optional<T> otherwise = std::nullopt) {
  if (otherwise && !all.contains(name)) return *otherwise;
  const auto value = all.get<T>(name);
  if (!value.has_value())
    fail(Code::invalid_argument, op, ": the attribute ", name,
         " cannot be read: ", value.error().message());
  return *value;
}
// Reads an integer from 0 to count − 1.
int64_t choice(std::string_view op, const Attributes& all, std::string_view name, size_t count,
               std::optional<int64_t> otherwise = std::nullopt);

// M x (inputs·H) from [..., inputs, H].
struct Folded {
  int64_t rows = 0, inputs = 0, columns = 0;
};
Folded folded(std::string_view op, std::string_view name, const Buffer& buffer);

// Buffers as views. In the initialise stage there is no data, so each view gets a separate aligned
// address. This gives the same kernels as later calls. Nothing reads these addresses.
class Frame {
 public:
  Frame(std::string_view op, const CallContext& context, const Buffer& x)
      : op_(op), context_(context), dry_(context.initialises() && x.untyped_data() == nullptr) {}

  View view(std::string_view name, const Buffer& buffer, Shape shape);
  // The tensor of `shape` in the first four results of a handler, with its amax in the fifth.
  struct Results {
    Buffer data, columnwise_data, scale_inv, columnwise_scale_inv, amax;
  };
  Tensor tensor(const Request& request, Shape shape, const Buffer& scale, const Results& results);
  // A tensor with one encoding. The dtype of the format is that of the data.
  Tensor tensor(Format format, bool columnwise, Shape shape, const Buffer& data,
                const Buffer& scale_inv);
  // Copies `from` to `to` unless both are one buffer. An empty `to` is not needed.
  void carry(const Buffer& from, const Buffer& to) const;

 private:
  Encoding encoding(const Format& format, Orientation o, Shape shape, const Buffer& data,
                    const Buffer& scale_inv);

  std::string_view op_;
  const CallContext& context_;
  bool dry_;
  size_t taken_ = 0;  // bytes of addresses without data
};

// Converts the current exception to an FFI error.
::xla::ffi::Error caught();

// While it exists, steps of this thread make their kernels and touch no buffer.
class Ahead {
 public:
  Ahead();
  ~Ahead() { set_observer({}); }
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;
};

template <class F>
::xla::ffi::Error guarded(const CallContext& context, F f) {
  try {
    std::optional<Ahead> ahead;
    if (context.initialises()) ahead.emplace();
    f(context);
    return ::xla::ffi::Error::Success();
  } catch (...) {
    return caught();
  }
}

// Wraps a call of a CallContext, buffers and attributes as a handler.
template <auto call, ExecutionStage stage, Device device>
struct Handler {
  template <class... Given>
  ::xla::ffi::Error operator()(Given... given) const {
    return guarded({stage, device}, [&](const CallContext& context) { call(context, given...); });
  }
};
// The same for execution on CUDA, which has more arguments before the buffers.
template <auto call>
struct CudaHandler {
  template <class... Given>
  ::xla::ffi::Error operator()(void* stream, Scratch scratch, Given... given) const {
    return guarded({ExecutionStage::kExecute, Device::cuda, stream, &scratch},
                   [&](const CallContext& context) { call(context, given...); });
  }
};

// Defines the C symbols of a call for both platforms. `arguments` adds the arguments to a binding.
// NOLINTBEGIN(bugprone-macro-parentheses): names cannot be in parentheses.
#define TENON_XLA_HANDLERS(name, call, arguments)                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (Handler<call, ExecutionStage::kExecute, Device::cpu>{}),   \
                                arguments(::xla::ffi::Ffi::Bind()),                               \
                                {::xla::ffi::Traits::kCmdBufferCompatible});                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##Initialize,                                                 \
                                (Handler<call, ExecutionStage::kInitialize, Device::cpu>{}),      \
                                arguments(::xla::ffi::Ffi::Bind<ExecutionStage::kInitialize>())); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                  \
      name##Cuda, (CudaHandler<call>{}),                                                          \
      arguments(::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::PlatformStream<void*>>().Ctx<Scratch>()), \
      {::xla::ffi::Traits::kCmdBufferCompatible});                                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##CudaInitialize,                                             \
                                (Handler<call, ExecutionStage::kInitialize, Device::cuda>{}),     \
                                arguments(::xla::ffi::Ffi::Bind<ExecutionStage::kInitialize>()))
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace tenon::ffi
