// Converts a tensor between encodings, and updates the state of delayed scaling.
#include <cmath>
#include <cstring>
#include <vector>

#include "api/encoding.h"
#include "core/fp_mode.h"
#include "core/scaling.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

namespace {

// The identity activation. Quantise and dequantise are its encoded output and its encoded input.
const Activation& identity() {
  static const Activation& f =
      *new Activation{.name = "quantize", .inputs = 1, .body = [](const Args& a) { return a.x; }};
  return f;
}

float read(const View& v, int64_t r, int64_t c) {
  float value = 0;
  std::memcpy(&value, static_cast<const char*>(v.data) + (r * v.stride + c) * 4, sizeof value);
  return value;
}
void write(const View& v, int64_t r, int64_t c, float value) {
  std::memcpy(static_cast<char*>(v.data) + (r * v.stride + c) * 4, &value, sizeof value);
}

}  // namespace

void quantize(const Quantize& c, const Options& options) {
  constexpr std::string_view kOp = "quantize";
  check_input(kOp, {"x", c.x});
  require(c.x.given() || !c.y.given() || c.y.shape() == Shape{}, kOp,
          ": x is not given; pass the numbers to encode, or the codes to decode");
  const Shape shape = c.x.shape();
  if (c.y.given()) check_output(kOp, {"y", c.y}, shape.rows, shape.cols, "the shape of x");
  if (!c.dbias.given()) return forward(identity(), {.x = c.x, .y = c.y, .amax = c.amax}, options);
  // The column sums of a gradient are the bias gradient of the identity. Overlaps are checked here,
  // so that messages use the caller's argument names.
  check_view(kOp, {"dbias", c.dbias});
  check_view(kOp, {"amax", c.amax});
  NamedList inputs;
  NamedList outputs;
  append_inputs(inputs, {"x", c.x});
  append_outputs(inputs, outputs, {"y", c.y});
  append(outputs, "dbias", c.dbias);
  append(outputs, "amax", c.amax);
  check_overlap(kOp, inputs, outputs, {{"x", {}}});
  backward(identity(), {.grad = c.x, .x = c.x, .dx = c.y, .dbias = c.dbias, .amax = c.amax},
           options);
}

void update(const DelayedUpdate& c, const Options& options) {
  constexpr std::string_view kOp = "delayed update";
  const FpMode ieee;
  check_options(kOp, options);
  if (options.device == Device::cuda)
    fail(Code::unsupported, kOp, " on cuda: it is made for the cpu; run it there");
  check_memory(kOp, {"history", c.history}, DType::f32);
  check_memory(kOp, {"scale", c.scale}, DType::f32);
  const int64_t length = c.history.rows;
  const int64_t n = c.history.cols;
  require(length >= 1, kOp, ": history has no rows; give at least one");
  check_shape(kOp, {"scale", c.scale}, 1, n, "one number for each column of the history");
  require(c.dtype == DType::e4m3 || c.dtype == DType::e5m2, kOp, ": dtype number ",
          static_cast<int>(c.dtype), "; scaled data are e4m3 or e5m2");
  constexpr int kMostMargin = 64;
  require(c.margin >= -kMostMargin && c.margin <= kMostMargin, kOp, ": margin = ", c.margin,
          "; it must lie in [", -kMostMargin, ", ", kMostMargin, "]");
  check_overlap(kOp, {}, {{"history", c.history}, {"scale", c.scale}}, {});

  for (int64_t k = 0; k < n; ++k) {
    const float last = read(c.history, 0, k);
    if (last == 0) continue;  // nothing was written since the last update
    float most = std::isfinite(last) ? last : 0;
    for (int64_t i = 1; i < length; ++i) {
      const float old = read(c.history, i, k);
      if (!c.most_recent && std::isfinite(old)) most = std::max(most, old);
    }
    for (int64_t i = 1; i + 1 < length; ++i) write(c.history, i, k, read(c.history, i + 1, k));
    if (length > 1) write(c.history, length - 1, k, last);
    write(c.history, 0, k, 0);
    write(c.scale, 0, k, scale_delayed(most, read(c.scale, 0, k), c.dtype, c.margin));
  }
}

}  // namespace tenon
