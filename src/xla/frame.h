// What the XLA FFI handlers share: attributes by name, buffers as views, errors with their text.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::ffi {

using Buffer = ::xla::ffi::AnyBuffer;
using Result = ::xla::ffi::Result<Buffer>;
using Attributes = ::xla::ffi::Dictionary;
using Stage = ::xla::ffi::ExecutionStage;

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
Request request(std::string_view op, const Attributes& attributes, Device device, bool backward);

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

// Buffers as views. An initialising call has no data yet: its views have memory of their own.
class Frame {
 public:
  Frame(std::string_view op, Stage stage) : op_(op), dry_(stage == Stage::kInitialize) {}

  View view(std::string_view name, const Buffer& buffer, Shape shape);
  // The tensor of `shape` that the first four results of a handler hold, and the fifth, its amax.
  struct Results {
    Buffer data, columnwise_data, scale_inv, columnwise_scale_inv, amax;
  };
  Tensor tensor(const Request& request, Shape shape, const Buffer& scale, const Results& results);
  // A tensor of one encoding; the format's dtype is that of the data.
  Tensor tensor(Format format, bool columnwise, Shape shape, const Buffer& data,
                const Buffer& scale_inv);
  // `to` starts as `from`, where the two are not one buffer.
  void carry(const Buffer& from, const Buffer& to) const;

 private:
  Encoding encoding(const Format& format, Orientation o, Shape shape, const Buffer& data,
                    const Buffer& scale_inv);

  std::string_view op_;
  bool dry_;
  std::vector<std::vector<std::byte>> scratch_;
};

// The FFI error of an exception in flight.
::xla::ffi::Error caught();

template <class F>
::xla::ffi::Error guarded(F f) {
  try {
    f();
    return ::xla::ffi::Error::Success();
  } catch (...) {
    return caught();
  }
}

}  // namespace tenon::ffi
