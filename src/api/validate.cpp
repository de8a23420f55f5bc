// Checks views. Messages name the op, the argument, its value, the rule and the remedy.
#include "api/validate.h"

#include <algorithm>

#include "tenon/error.h"

namespace tenon {

namespace {

struct Bytes {
  uintptr_t begin = 0, end = 0;
  int64_t stride = 0, width = 0;
};

Bytes bytes(const View& v) {
  const int64_t size = info(v.dtype).bytes;
  const auto begin = reinterpret_cast<uintptr_t>(v.data);
  const int64_t stride = v.rows > 1 ? v.stride : 0;  // the stride of a single row is ignored
  const int64_t span = (v.rows - 1) * stride + v.cols;
  return {begin, begin + static_cast<uintptr_t>(span * size), stride * size, v.cols * size};
}

bool empty(const View& v) { return v.rows == 0 || v.cols == 0; }

}  // namespace

void check_options(std::string_view op, const Options& options) {
  const auto check = [&](std::string_view name, size_t value, size_t count) {
    require(value < count, op, ": ", name, " number ", value, " does not exist; it must be below ",
            count);
  };
  check("precision", static_cast<size_t>(options.precision), kPrecisions.size());
  check("rounding", static_cast<size_t>(options.rounding), kRoundings.size());
  check("device", static_cast<size_t>(options.device), kDevices.size());
}

namespace {

void check_sizes(std::string_view op, const Named& v) {
  const View& x = v.view;
  require(x.rows >= 0 && x.cols >= 0, op, ": ", v.name, v.part, " is ", x.rows, "x", x.cols,
          "; sizes must not be negative");
  require(x.rows <= 1 || x.stride >= x.cols, op, ": ", v.name, v.part, " has row stride ", x.stride,
          " but ", x.cols, " columns; rows must not overlap, give a stride of at least ", x.cols);
  constexpr int64_t kMost = int64_t{1} << 60;
  const bool fits =
      x.rows <= kMost && x.cols <= kMost / 4 && (x.rows <= 1 || x.stride <= kMost / x.rows / 4);
  require(fits, op, ": ", v.name, v.part, " of ", x.rows, "x", x.cols, " with stride ", x.stride,
          " does not fit into memory addresses; give the sizes in elements");
}

void check_pointer(std::string_view op, const Named& v) {
  require(v.view.data != nullptr || empty(v.view), op, ": ", v.name, v.part, " is ", v.view.rows,
          "x", v.view.cols, " but its data pointer is null; pass the address of its first element");
}

}  // namespace

void check_spec(std::string_view op, const Named& v) {
  const View& x = v.view;
  require(static_cast<size_t>(x.dtype) < kDTypes.size(), op, ": ", v.name, v.part,
          " has the dtype number ", static_cast<int>(x.dtype),
          "; it must be one of f32, f16, bf16");
  if (!info(x.dtype).plain)
    fail(Code::unsupported, op, ": ", v.name, v.part, " is ", info(x.dtype).name,
         "; without a scale it must be f32, f16 or bf16");
  check_sizes(op, v);
}

void check_view_closely(std::string_view op, const Named& v) {
  check_spec(op, v);
  check_pointer(op, v);
}

void check_memory(std::string_view op, const Named& v, DType dtype) {
  require(v.view.dtype == dtype, op, ": ", v.name, v.part, " has the dtype ",
          static_cast<size_t>(v.view.dtype) < kDTypes.size() ? info(v.view.dtype).name : "?",
          "; it must be ", info(dtype).name);
  check_sizes(op, v);
  check_pointer(op, v);
}

void check_shape(std::string_view op, const Named& v, int64_t rows, int64_t cols,
                 std::string_view rule) {
  require(v.view.rows == rows && v.view.cols == cols, op, ": ", v.name, v.part, " is ", v.view.rows,
          "x", v.view.cols, " but must be ", rows, "x", cols, ": ", rule);
}

bool same(const View& a, const View& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rows == b.rows && a.cols == b.cols &&
         (a.stride == b.stride || a.rows <= 1);
}

bool overlap(const View& a, const View& b) {
  if (empty(a) || empty(b)) return false;
  const Bytes p = bytes(a);
  const Bytes q = bytes(b);
  if (p.end <= q.begin || q.end <= p.begin) return false;
  // Two column ranges of one matrix may be disjoint although their byte ranges overlap. A single
  // row uses the stride of the other view.
  if (a.rows <= 1 && b.rows <= 1) return true;
  const int64_t stride = a.rows > 1 ? p.stride : q.stride;
  if ((a.rows > 1 && b.rows > 1 && p.stride != q.stride) || p.width > stride || q.width > stride)
    return true;
  const auto distance = static_cast<int64_t>(q.begin - p.begin);
  const int64_t offset = ((distance % stride) + stride) % stride;
  return offset < p.width || offset + q.width > stride;
}

void check_overlap(std::string_view op, const NamedList& inputs, const NamedList& outputs,
                   const NamedList& in_place) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Named& out = outputs[i];
    if (!out.view.given()) continue;
    for (size_t j = 0; j < i; ++j)
      require(!overlap(out.view, outputs[j].view), op, ": the outputs ", outputs[j].name,
              outputs[j].part, " and ", out.name, out.part, " overlap; give each its own memory");
    for (const Named& in : inputs) {
      if (!in.view.given() || !overlap(out.view, in.view)) continue;
      const bool allowed =
          same(out.view, in.view) && std::ranges::any_of(in_place, [&](const Named& ok) {
            return ok.name == in.name && in.part.empty() && out.part.empty() && out.name != "amax";
          });
      require(allowed, op, ": the output ", out.name, out.part, " overlaps the input ", in.name,
              in.part,
              "; give it its own memory (only an output that is exactly an input, same pointer, ",
              "stride and dtype, read element by element, may share it)");
    }
  }
}

}  // namespace tenon
