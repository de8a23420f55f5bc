// What the evaluators of this program read: one number a point, or one number for all points.
#pragma once

#include <cstddef>

namespace tenon::accuracy {

struct Column {
  const float* data = nullptr;
  size_t step = 1;  // 0: the same number everywhere (a parameter, a gradient of 1)

  float operator[](size_t i) const { return data[i * step]; }
};

}  // namespace tenon::accuracy
