// The inputs of the evaluators: one value per point, or one value for all points.
#pragma once

#include <cstddef>

namespace tenon::accuracy {

struct Column {
  const float* data = nullptr;
  size_t step = 1;  // 0: the same value at all points (a parameter, a gradient of 1)

  float operator[](size_t i) const { return data[i * step]; }
};

}  // namespace tenon::accuracy
