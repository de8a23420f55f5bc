// Computes the shapes of the views of a step.
#include "runtime/views.h"

namespace tenon {

View view_of(const BufferView& v, void* data, const Buffer& b, int64_t rows) {
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

}  // namespace tenon
