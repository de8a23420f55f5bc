// The views of a plan's step in a call.
#pragma once

#include <vector>

#include "lower/data.h"

namespace tenon {

// A view of buffer `b` at `data`, in a call of `rows` rows. Small calls make many, so it is inline.
inline View view_of(const BufferView& v, void* data, const Buffer& b, int64_t rows) {
  const int64_t m = v.rows(rows);
  switch (v.form) {
    case BufferView::Form::none:
      return {};
    case BufferView::Form::scalar:
      return matrix(data, DType::f32, 1, 1);
    case BufferView::Form::scale: {
      const Shape shape = v.format.scale_shape(m, v.cols, v.orientation);
      return matrix(data, info(v.format.scaling).scale, shape.rows, shape.cols);
    }
    default: {
      const Shape shape = v.format.data_shape(m, v.cols, v.orientation);
      // In transposed data the rows are the inner dimension. Their stride is the rounded number of
      // rows.
      const int64_t stride = b.rows_inside ? b.rows(rows) : shape.cols;
      return matrix(data, v.format.dtype, shape.rows, shape.cols, stride);
    }
  }
}

// The views of a step. `address` gives the memory of a buffer.
template <class Address>
void fill(const PlanData& d, const std::vector<BufferView>& list, int64_t rows,
          const Address& address, std::vector<View>& views) {
  views.clear();
  for (const BufferView& v : list) {
    if (v.buffer == kNoBuffer)
      views.emplace_back();
    else
      views.push_back(
          view_of(v, address(v.buffer), d.buffers[static_cast<size_t>(v.buffer)], rows));
  }
}

// A call at addresses of this alignment that are never used: they only decide which kernels it
// takes. `apart`: each buffer has its own address. Otherwise all are in place of each other. `in`
// and `out` hold the views.
inline RunArgs imagined_call(const PlanData& d, const PlanStep& s, int64_t rows, int64_t alignment,
                             bool apart, std::vector<View>& in, std::vector<View>& out) {
  const auto somewhere = [&](int buffer) {
    const int64_t place = apart ? int64_t{buffer} + 1 : 1;
    return reinterpret_cast<void*>(static_cast<uintptr_t>((place << 20) + alignment));
  };
  fill(d, s.in, rows, somewhere, in);
  fill(d, s.out, rows, somewhere, out);
  return {.rows = s.rows(rows), .in = in, .out = out, .parameters = s.parameters};
}

}  // namespace tenon
