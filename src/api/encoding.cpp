// Checks all rules for the format of a tensor, its encodings, its scales and its amax.
#include "api/encoding.h"

#include <cmath>
#include <string>

#include "step/operand.h"
#include "step/step.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr std::array<std::string_view, 2> kData{".rowwise.data", ".columnwise.data"};
constexpr std::array<std::string_view, 2> kScales{".rowwise.scale_inv", ".columnwise.scale_inv"};

std::string_view part(Orientation o, const std::array<std::string_view, 2>& names) {
  return names[static_cast<size_t>(o)];
}

bool has_shape(const View& v, Shape s) { return v.rows == s.rows && v.cols == s.cols; }

bool single_scale(const Tensor& t) { return info(t.format.scaling).reads_scale; }

// Both encodings share one scale, so either scale_inv view may hold it.
const View& scale_view(const Tensor& t, Orientation o) {
  const View& own = t.encoding(o).scale_inv;
  if (own.given() || !single_scale(t)) return own;
  return o == Orientation::rowwise ? t.columnwise.scale_inv : t.rowwise.scale_inv;
}

void check_format(std::string_view op, const NamedTensor& t) {
  const Format& f = t.tensor.format;
  require(static_cast<size_t>(f.scaling) < kScalings.size(), op, ": ", t.name,
          " has the scaling number ", static_cast<int>(f.scaling), "; it must be below ",
          kScalings.size());
  require(static_cast<size_t>(f.dtype) < kDTypes.size(), op, ": ", t.name, " has the dtype number ",
          static_cast<int>(f.dtype), "; it must be below ", kDTypes.size());
  const std::string_view mode = info(f.scaling).name;
  const bool quantised = f.scaling != Scaling::none;
  const bool fp8 = f.dtype == DType::e4m3 || f.dtype == DType::e5m2;
  if (quantised)
    require(fp8, op, ": ", t.name, " is ", info(f.dtype).name, " with scaling ", mode,
            "; scaled data are e4m3 or e5m2");
  else if (!info(f.dtype).plain)
    fail(Code::unsupported, op, ": ", t.name, " is ", info(f.dtype).name,
         "; without a scale it must be f32, f16 or bf16, or give it a scaling mode");
  require(f.eps >= 0 && std::isfinite(f.eps), op, ": ", t.name, " has eps = ", f.eps,
          "; it must be finite and not negative");
  require(f.fp32_rule() || f.eps == 0, op, ": ", t.name, " has eps = ", f.eps, ", but ", mode,
          " has none; it belongs to current and block scaling");
  require(f.fp32_rule() || !f.power_of_two, op, ": ", t.name, " sets power_of_two, but ", mode,
          " has no choice there; it belongs to current and block scaling");
  require(!f.swizzled || info(f.scaling).scale == DType::e8m0, op, ": ", t.name,
          " asks for swizzled scales, but its scaling is ", mode, "; only mxfp8 has them");
}

void check_single(std::string_view op, const Named& v) {
  check_memory(op, v, DType::f32);
  check_shape(op, v, 1, 1, "one number for the tensor");
}

void check_encoding(std::string_view op, const NamedTensor& t, Orientation o, Shape shape,
                    std::string_view rule) {
  const Tensor& x = t.tensor;
  const Encoding& e = x.encoding(o);
  const Named data{t.name, e.data, x.plain() ? std::string_view{} : part(o, kData)};
  check_memory(op, data, x.format.dtype);
  const Shape want = x.format.data_shape(shape.rows, shape.cols, o);
  // The message text is built only for an error.
  if (!has_shape(data.view, want))
    check_shape(op, data, want.rows, want.cols,
                want == shape ? std::string(rule) : str(rule, ", transposed"));
  const Named scale{t.name, scale_view(x, o), part(o, kScales)};
  if (x.format.scaling == Scaling::none) {
    require(!scale.view.given(), op, ": ", t.name, scale.part,
            " is given, but its scaling is none; leave it out or name a scaling mode");
    return;
  }
  const Shape scales = x.format.scale_shape(shape.rows, shape.cols, o);
  const std::string_view mode = info(x.format.scaling).name;
  require(scale.view.given() || scales.rows * scales.cols == 0, op, ": ", t.name, scale.part,
          " is not given; ", mode, " needs ", scales.rows, "x", scales.cols, " ",
          info(info(x.format.scaling).scale).name);
  if (!scale.view.given()) return;
  check_memory(op, scale, info(x.format.scaling).scale);
  if (!has_shape(scale.view, scales))
    check_shape(op, scale, scales.rows, scales.cols,
                str("what ", mode, " needs for ", shape.rows, "x", shape.cols));
  require(!x.format.swizzled || scale.view.rows <= 1 || scale.view.stride == scale.view.cols, op,
          ": ", t.name, scale.part, " has row stride ", scale.view.stride,
          "; swizzled scales are dense, give ", scale.view.cols);
}

void check_encodings(std::string_view op, const NamedTensor& t, Shape shape,
                     std::string_view rule = "the shape of the tensor") {
  const Tensor& x = t.tensor;
  for (const Orientation o : kOrientations) {
    const Encoding& e = x.encoding(o);
    if (e.data.given()) {
      check_encoding(op, t, o, shape, rule);
    } else if (e.scale_inv.given()) {
      require(single_scale(x), op, ": ", t.name, part(o, kScales),
              " is given, but that encoding has no data; leave it out, or give the data");
      check_single(op, {t.name, e.scale_inv, part(o, kScales)});
    }
  }
}

// A fast check: true if the tensor is certainly a valid plain matrix.
bool fine(const Tensor& x) {
  const Format& f = x.format;
  return f.scaling == Scaling::none && f.dtype == x.rowwise.data.dtype && f.eps == 0 &&
         !f.power_of_two && !f.swizzled && fine(x.rowwise.data) && !x.rowwise.scale_inv.given() &&
         !x.columnwise.data.given() && !x.columnwise.scale_inv.given();
}

// The dtypes of a plain matrix and of its format must agree. A plain matrix has no scale fields.
void check_plain(std::string_view op, const NamedTensor& t) {
  if (t.tensor.given()) check_format(op, t);
  check_view(op, {t.name, t.tensor.rowwise.data});
  if (!t.tensor.given()) return;
  check_encodings(op, t, t.tensor.shape());
}

}  // namespace

void check_input(std::string_view op, const NamedTensor& t) {
  const Tensor& x = t.tensor;
  if (fine(x)) return;
  if (x.plain()) return check_plain(op, t);
  check_format(op, t);
  // Check the sizes first: other shapes are derived from shape().
  for (const Orientation o : kOrientations)
    check_memory(op, {t.name, x.encoding(o).data, part(o, kData)},
                 x.encoding(o).data.given() ? x.format.dtype : x.encoding(o).data.dtype);
  check_encodings(op, t, x.shape());
}

void check_tensor_shape(std::string_view op, const NamedTensor& t, int64_t rows, int64_t cols,
                        std::string_view rule) {
  const Shape s = t.tensor.shape();
  require(s.rows == rows && s.cols == cols, op, ": ", t.name, " is ", s.rows, "x", s.cols,
          " but must be ", rows, "x", cols, ": ", rule);
}

void check_output(std::string_view op, const NamedTensor& t, int64_t rows, int64_t cols,
                  std::string_view rule) {
  const Tensor& x = t.tensor;
  if (fine(x) && has_shape(x.rowwise.data, {rows, cols}) && !x.scale.given() && !x.amax.given() &&
      !x.amax_given && !x.health.given())
    return;
  if (x.plain()) {
    check_plain(op, t);
    check_shape(op, {t.name, x.rowwise.data}, rows, cols, rule);
  } else {
    check_format(op, t);
    check_encodings(op, t, {rows, cols}, rule);
  }
  const std::string_view mode = info(x.format.scaling).name;
  const bool delayed = info(x.format.scaling).scale_given;
  const bool current = info(x.format.scaling).reads_amax();
  require(!delayed || x.scale.given(), op, ": ", t.name,
          ".scale is not given; delayed scaling multiplies by it, one f32 number");
  require(delayed || !x.scale.given(), op, ": ", t.name, ".scale is given, but ", mode,
          " finds its own; leave it out");
  if (delayed) check_single(op, {t.name, x.scale, ".scale"});
  require(delayed || current || !x.amax.given(), op, ": ", t.name, ".amax is given, but ", mode,
          " has no amax for the tensor; use the amax of the call");
  if (x.amax.given()) check_single(op, {t.name, x.amax, ".amax"});
  require(!x.amax_given || (current && x.amax.given()), op, ": ", t.name,
          ".amax_given is set; it needs scaling current and an amax");
  if (!x.health.given()) return;
  require(x.format.scaling != Scaling::none, op, ": ", t.name,
          ".health is given, but nothing is quantised; leave it out or name a scaling mode");
  check_memory(op, {t.name, x.health, ".health"}, DType::f32);
  check_shape(op, {t.name, x.health, ".health"}, 1, 3,
              "counts of saturated, flushed and non-finite elements");
}

void append_inputs(NamedList& list, const NamedTensor& t) {
  const Tensor& x = t.tensor;
  if (x.plain()) return append(list, t.name, x.rowwise.data);
  if (!x.given()) return;  // an absent tensor was not checked
  for (const Orientation o : kOrientations) {
    const Encoding& e = x.encoding(o);
    append(list, t.name, e.data, part(o, kData));
    append(list, t.name, e.scale_inv, part(o, kScales));
  }
}

void append_outputs(NamedList& inputs, NamedList& outputs, const NamedTensor& t) {
  const Tensor& x = t.tensor;
  if (x.plain()) return append(outputs, t.name, x.rowwise.data);
  if (!x.given()) return;
  for (const Orientation o : kOrientations) {
    const Encoding& e = x.encoding(o);
    // Rowwise data without a scale are stored elementwise, so this output may be in place.
    const bool direct = o == Orientation::rowwise && x.format.scaling == Scaling::none;
    append(outputs, t.name, e.data, direct ? "" : part(o, kData));
    const bool shared =
        o == Orientation::columnwise && single_scale(x) && same(e.scale_inv, x.rowwise.scale_inv);
    if (!shared) append(outputs, t.name, e.scale_inv, part(o, kScales));
  }
  append(inputs, t.name, x.scale, ".scale");
  append(x.amax_given ? inputs : outputs, t.name, x.amax, ".amax");
  append(outputs, t.name, x.health, ".health");
}

void place_input(const Tensor& t, View* views) {
  const Orientation o = t.rowwise.data.given() ? Orientation::rowwise : Orientation::columnwise;
  views[in_data] = t.encoding(o).data;
  views[in_scale_inv] = scale_view(t, o);
}

void place_output(const Tensor& t, View* views) {
  views[Encoder::row_data] = t.rowwise.data;
  views[Encoder::row_scale] = t.rowwise.scale_inv;
  views[Encoder::column_data] = t.columnwise.data;
  views[Encoder::column_scale] = t.columnwise.scale_inv;
  views[Encoder::health] = t.health;
}

bool finds_amax(const Tensor& t) {
  return t.given() && info(t.format.scaling).reads_amax() && !t.amax_given;
}

}  // namespace tenon
