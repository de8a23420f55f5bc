// A matrix in memory that the caller owns.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <cstdint>

#include "tenon/dtype.h"

namespace tenon {

// Rows are `stride` elements apart. A row is contiguous. Front ends fold leading dimensions into
// rows. A View without data is an argument that is not given.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0, stride = 0;

  [[nodiscard]] bool given() const { return data != nullptr || rows != 0 || cols != 0; }
};

// A contiguous matrix. Inputs are never written through it.
inline View matrix(const void* data, DType dtype, int64_t rows, int64_t cols) {
  return {const_cast<void*>(data), dtype, rows, cols, cols};
}
inline View matrix(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t stride) {
  return {const_cast<void*>(data), dtype, rows, cols, stride};
}

}  // namespace tenon

#endif
