// Buffers as views, attributes and errors of the XLA FFI handlers.
#include "xla/frame.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

namespace tenon::ffi {

namespace {

using ::xla::ffi::DataType;
using ::xla::ffi::ErrorCode;
template <class T>
using Span = ::xla::ffi::Span<T>;

constexpr std::array<std::string_view, 11> kNames{
    "act",      "act_params", "scaling_mode", "quantize_layout", "output_amax_when_no_scaling",
    "is_dbias", "eps",        "power_of_two", "swizzled",        "precision",
    "rounding"};

DType dtype(std::string_view op, std::string_view name, DataType type) {
  switch (type) {
    case DataType::F32:
      return DType::f32;
    case DataType::F16:
      return DType::f16;
    case DataType::BF16:
      return DType::bf16;
    case DataType::F8E4M3FN:
      return DType::e4m3;
    case DataType::F8E5M2:
      return DType::e5m2;
    case DataType::U8:
    case DataType::F8E8M0FNU:
      return DType::e8m0;
    default:
      fail(Code::invalid_argument, op, ": ", name, " has the XLA type number ",
           static_cast<int>(type), "; it must be f32, f16, bf16, f8e4m3fn, f8e5m2 or f8e8m0fnu");
  }
}

constexpr size_t kAlignment = 64;         // alignment of a workspace
constexpr size_t kBufferAlignment = 256;  // alignment of XLA buffers on a GPU

}  // namespace

CallContext CallContext::with(const Buffer& workspace) const {
  CallContext p = *this;
  p.memory = workspace.untyped_data();
  p.bytes = workspace.size_bytes();
  return p;
}

Options CallContext::options() const {
  Options o{.device = device, .stream = stream};
  if (scratch) {
    o.user =
        const_cast<CallContext*>(this);  // NOLINT(cppcoreguidelines-pro-type-const-cast): C's way
    o.allocate = [](void* user, size_t bytes) {
      const auto& context = *static_cast<const CallContext*>(user);
      if (bytes <= context.bytes) return context.memory;
      return context.scratch->Allocate(bytes, kAlignment).value_or(nullptr);
    };
  }
  return o;
}

Ahead::Ahead() {
  set_observer([](const Step& step, const RunArgs& args, const Options& options, const auto&) {
    kernel_for(step, options.device).kernel->prepare_for(args);
  });
}

int64_t choice(std::string_view op, const Attributes& all, std::string_view name, size_t count,
               std::optional<int64_t> otherwise) {
  const auto value = attribute<int64_t>(op, all, name, otherwise);
  require(value >= 0 && value < static_cast<int64_t>(count), op, ": ", name, " = ", value,
          "; it must be from 0 to ", count - 1);
  return value;
}

Request request(std::string_view op, const Attributes& all, const CallContext& context,
                bool backward) {
  for (const std::string_view name : all)
    require(std::find(kNames.begin(), kNames.end(), name) != kNames.end() &&
                (backward || name != "is_dbias"),
            op, ": there is no attribute '", name, "'; leave it out or correct its name");
  Request r;
  r.f = activation(attribute<std::string_view>(op, all, "act"));
  const auto values = attribute<Span<const float>>(op, all, "act_params");
  require(values.size() == 0 || values.size() == r.f.parameters.size(), op, ": act_params has ",
          values.size(), " numbers, but ", r.f.name, " has ", r.f.parameters.size(),
          " parameters; give all of them or none");
  for (size_t i = 0; i < values.size(); ++i) r.f.parameters[i].value = values[i];
  r.format.scaling = static_cast<Scaling>(choice(op, all, "scaling_mode", kScalings.size()));
  const int64_t layout = choice(op, all, "quantize_layout", 3);
  r.rowwise = layout != 1;
  r.columnwise = layout != 0;
  r.wants_amax =
      attribute<bool>(op, all, "output_amax_when_no_scaling") && r.format.scaling == Scaling::none;
  r.wants_dbias = backward && attribute<bool>(op, all, "is_dbias");
  r.format.eps = attribute<float>(op, all, "eps", 0.0F);
  if (const int64_t power = choice(op, all, "power_of_two", 3, 0); power != 0)
    r.format.power_of_two = power == 1;
  r.format.swizzled = attribute<bool>(op, all, "swizzled", false);
  r.options = context.options();
  r.options.precision = static_cast<Precision>(choice(op, all, "precision", kPrecisions.size(), 0));
  r.options.rounding = static_cast<Rounding>(choice(op, all, "rounding", kRoundings.size(), 0));
  return r;
}

Folded folded(std::string_view op, std::string_view name, const Buffer& buffer) {
  const auto dims = buffer.dimensions();
  require(dims.size() >= 2, op, ": ", name, " has ", dims.size(),
          " dimensions; it must be [..., 1 or 2, H]");
  Folded f{.rows = 1, .inputs = dims[dims.size() - 2], .columns = dims.back()};
  for (size_t i = 0; i + 2 < dims.size(); ++i) f.rows *= dims[i];
  return f;
}

View Frame::view(std::string_view name, const Buffer& buffer, Shape shape) {
  const DType type = dtype(op_, name, buffer.element_type());
  const auto count = static_cast<int64_t>(buffer.element_count());
  require(count == shape.rows * shape.cols, op_, ": ", name, " has ", count,
          " elements; it must have ", shape.rows, "x", shape.cols);
  // XLA gives no memory to buffers without elements, but the call still needs a non-null address.
  static std::byte nothing;
  void* data = buffer.untyped_data();
  if (dry_) {
    taken_ += kBufferAlignment;
    data = reinterpret_cast<void*>(taken_);  // NOLINT(performance-no-int-to-ptr): never read
    taken_ += buffer.size_bytes() / kBufferAlignment * kBufferAlignment;
  }
  return matrix(data ? data : &nothing, type, shape.rows, shape.cols);
}

Encoding Frame::encoding(const Format& format, Orientation o, Shape shape, const Buffer& data,
                         const Buffer& scale_inv) {
  const auto [rows, cols] = shape;
  Encoding e{.data = view("data", data, format.data_shape(rows, cols, o))};
  if (format.scaling != Scaling::none)
    e.scale_inv = view("scale_inv", scale_inv, format.scale_shape(rows, cols, o));
  return e;
}

Tensor Frame::tensor(const Request& request, Shape shape, const Buffer& scale,
                     const Results& results) {
  Tensor t;
  t.format = request.format;
  t.format.dtype =
      dtype(op_, "data", (request.rowwise ? results.data : results.columnwise_data).element_type());
  if (request.rowwise)
    t.rowwise = encoding(t.format, Orientation::rowwise, shape, results.data, results.scale_inv);
  if (request.columnwise)
    t.columnwise = encoding(t.format, Orientation::columnwise, shape, results.columnwise_data,
                            results.columnwise_scale_inv);
  const Scaling mode = t.format.scaling;
  if (mode == Scaling::delayed) t.scale = view("scale", scale, {1, 1});
  if (mode == Scaling::delayed || mode == Scaling::current)
    t.amax = view("amax", results.amax, {1, 1});
  return t;
}

Tensor Frame::tensor(Format format, bool columnwise, Shape shape, const Buffer& data,
                     const Buffer& scale_inv) {
  const Orientation o = columnwise ? Orientation::columnwise : Orientation::rowwise;
  format.dtype = dtype(op_, "data", data.element_type());
  const Encoding e = encoding(format, o, shape, data, scale_inv);
  return columnwise ? Tensor(format, {}, e) : Tensor(format, e);
}

void Frame::carry(const Buffer& from, const Buffer& to) const {
  if (from.untyped_data() == to.untyped_data() || to.size_bytes() == 0) return;
  require(from.size_bytes() == to.size_bytes(), op_, ": amax has ", from.size_bytes(),
          " bytes and the updated amax ", to.size_bytes(), "; they must be alike");
  if (context_.device == Device::cpu) {
    if (!context_.initialises())
      std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
    return;
  }
  // On CUDA a copy is a step too.
  const auto one = [](const Buffer& b) {
    const auto count = static_cast<int64_t>(b.element_count());
    return matrix(b.untyped_data(), DType::f32, 1, count);
  };
  Options options = context_.options();
  options.precision = Precision::strict;
  quantize({.x = one(from), .y = one(to)}, options);
}

::xla::ffi::Error caught() {
  try {
    throw;
  } catch (const Error& e) {
    switch (e.code()) {
      case Code::invalid_argument:
        return {ErrorCode::kInvalidArgument, e.what()};
      case Code::unsupported:
        return {ErrorCode::kUnimplemented, e.what()};
      default:
        return {ErrorCode::kInternal, e.what()};
    }
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kResourceExhausted, "tenon: out of memory"};
  } catch (const std::exception& e) {
    return {ErrorCode::kInternal, e.what()};
  } catch (...) {
    return {ErrorCode::kInternal, "tenon: unknown exception"};
  }
}

}  // namespace tenon::ffi
