// What the XLA FFI handlers share: attributes by name, buffers as views, errors with their text.
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
using Stage = ::xla::ffi::ExecutionStage;
using Scratch = ::xla::ffi::ScratchAllocator;

// When and where a handler runs.
struct Place {
  Stage stage;
  Device device;
  void* stream = nullptr;
  Scratch* scratch = nullptr;
  void* memory = nullptr;  // a result that is lent as workspace: a command buffer allocates nothing
  size_t bytes = 0;

  [[nodiscard]] bool initialises() const { return stage == Stage::kInitialize; }
  [[nodiscard]] Place with(const Buffer& workspace) const;
  [[nodiscard]] Options options() const;  // which mention this place
};

// The attributes of a call. These must be given:
//   act                          a registered name or the text of a formula
//   act_params                   f32, in the registry's order; none of them for the defaults
//   scaling_mode                 the number of a Scaling
//   quantize_layout              0 rowwise, 1 columnwise, 2 both
//   output_amax_when_no_scaling  whether the amax is wanted with scaling_mode 0
//   is_dbias                     backward: whether dbias is wanted
// and these may be: eps, power_of_two (0 as the mode does, 1, 2 for exact scales), swizzled,
// precision, rounding.
struct Request {
  Activation f;
  Format format;  // its dtype is that of the result
  bool rowwise = true, columnwise = false;
  bool wants_amax = false, wants_dbias = false;
  Options options;
};
Request request(std::string_view op, const Attributes& attributes, const Place& place,
                bool backward);

// An attribute; without a default it must be given.
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
// A number from 0 to count − 1.
int64_t choice(std::string_view op, const Attributes& all, std::string_view name, size_t count,
               std::optional<int64_t> otherwise = std::nullopt);

// M x (inputs·H) from [..., inputs, H].
struct Folded {
  int64_t rows = 0, inputs = 0, columns = 0;
};
Folded folded(std::string_view op, std::string_view name, const Buffer& buffer);

// Buffers as views. Where an initialising call has no data yet, they lie where XLA may put them:
// apart, and aligned, so that the kernels are those of the calls to come. Nobody reads there.
class Frame {
 public:
  Frame(std::string_view op, const Place& place, const Buffer& x)
      : op_(op), place_(place), dry_(place.initialises() && x.untyped_data() == nullptr) {}

  View view(std::string_view name, const Buffer& buffer, Shape shape);
  // The tensor of `shape` that the first four results of a handler hold, and the fifth, its amax.
  struct Results {
    Buffer data, columnwise_data, scale_inv, columnwise_scale_inv, amax;
  };
  Tensor tensor(const Request& request, Shape shape, const Buffer& scale, const Results& results);
  // A tensor of one encoding; the format's dtype is that of the data.
  Tensor tensor(Format format, bool columnwise, Shape shape, const Buffer& data,
                const Buffer& scale_inv);
  // `to` starts as `from`, where the two are not one buffer; an empty `to` is not asked for.
  void carry(const Buffer& from, const Buffer& to) const;

 private:
  Encoding encoding(const Format& format, Orientation o, Shape shape, const Buffer& data,
                    const Buffer& scale_inv);

  std::string_view op_;
  const Place& place_;
  bool dry_;
  size_t taken_ = 0;  // bytes of places without data
};

// The FFI error of an exception in flight.
::xla::ffi::Error caught();

// While it lives, the steps of this thread make their kernels and touch no buffer.
class Ahead {
 public:
  Ahead();
  ~Ahead() { set_observer({}); }
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;
};

template <class F>
::xla::ffi::Error guarded(const Place& place, F f) {
  try {
    std::optional<Ahead> ahead;
    if (place.initialises()) ahead.emplace();
    f(place);
    return ::xla::ffi::Error::Success();
  } catch (...) {
    return caught();
  }
}

// A call of a Place, buffers and attributes as a handler.
template <auto call, Stage stage, Device device>
struct Handler {
  template <class... Given>
  ::xla::ffi::Error operator()(Given... given) const {
    return guarded({stage, device}, [&](const Place& place) { call(place, given...); });
  }
};
// The same with what executing on CUDA takes before the buffers.
template <auto call>
struct CudaHandler {
  template <class... Given>
  ::xla::ffi::Error operator()(void* stream, Scratch scratch, Given... given) const {
    return guarded({Stage::kExecute, Device::cuda, stream, &scratch},
                   [&](const Place& place) { call(place, given...); });
  }
};

// The C symbols of a call for both platforms; `arguments` adds what it takes to a binding.
// NOLINTBEGIN(bugprone-macro-parentheses): names cannot stand in parentheses.
#define TENON_XLA_HANDLERS(name, call, arguments)                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (Handler<call, Stage::kExecute, Device::cpu>{}),            \
                                arguments(::xla::ffi::Ffi::Bind()),                               \
                                {::xla::ffi::Traits::kCmdBufferCompatible});                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##Initialize,                                                 \
                                (Handler<call, Stage::kInitialize, Device::cpu>{}),               \
                                arguments(::xla::ffi::Ffi::Bind<Stage::kInitialize>()));          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                  \
      name##Cuda, (CudaHandler<call>{}),                                                          \
      arguments(::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::PlatformStream<void*>>().Ctx<Scratch>()), \
      {::xla::ffi::Traits::kCmdBufferCompatible});                                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##CudaInitialize,                                             \
                                (Handler<call, Stage::kInitialize, Device::cuda>{}),              \
                                arguments(::xla::ffi::Ffi::Bind<Stage::kInitialize>()))
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace tenon::ffi
