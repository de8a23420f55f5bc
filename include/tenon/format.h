// How a tensor is encoded in memory: its dtype, its scaling mode, and the shapes that follow.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "tenon/dtype.h"
#include "tenon/view.h"

namespace tenon {

enum class Scaling : uint8_t { none, delayed, current, mxfp8, block1x128, block128x128 };
enum class Orientation : uint8_t { rowwise, columnwise };

struct Shape {
  int64_t rows = 0, cols = 0;
  friend bool operator==(const Shape&, const Shape&) = default;
};

constexpr int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t rup(int64_t a, int64_t b) { return cdiv(a, b) * b; }

// One row for each scaling mode. Shapes are functions of the tensor's M rows and K columns as seen
// along the scaled direction, so that columnwise is rowwise with M and K exchanged unless told.
struct ScalingInfo {
  std::string_view name;
  DType scale;         // dtype of scale_inv
  int64_t block_rows;  // 0: one scale for the whole tensor
  int64_t block_cols;
  bool transposes;  // columnwise data are [K, M]
  Shape (*scales)(int64_t m, int64_t k, Orientation);
};

inline constexpr std::array<ScalingInfo, 6> kScalings{{
    {"none", DType::f32, 0, 0, true, [](int64_t, int64_t, Orientation) { return Shape{}; }},
    {"delayed", DType::f32, 0, 0, true,
     [](int64_t, int64_t, Orientation) {
       return Shape{1, 1};
     }},
    {"current", DType::f32, 0, 0, true,
     [](int64_t, int64_t, Orientation) {
       return Shape{1, 1};
     }},
    {"mxfp8", DType::e8m0, 1, 32, false,
     [](int64_t m, int64_t k, Orientation o) {
       return o == Orientation::rowwise ? Shape{rup(m, 128), rup(cdiv(k, 32), 4)}
                                        : Shape{rup(cdiv(m, 32), 4), rup(k, 128)};
     }},
    {"block1x128", DType::f32, 1, 128, true,
     [](int64_t m, int64_t k, Orientation o) {
       return o == Orientation::rowwise ? Shape{cdiv(k, 128), rup(m, 4)}
                                        : Shape{cdiv(m, 128), rup(k, 4)};
     }},
    {"block128x128", DType::f32, 128, 128, true,
     [](int64_t m, int64_t k, Orientation o) {
       return o == Orientation::rowwise ? Shape{cdiv(m, 128), rup(cdiv(k, 128), 4)}
                                        : Shape{cdiv(k, 128), rup(cdiv(m, 128), 4)};
     }},
}};

constexpr const ScalingInfo& info(Scaling s) { return kScalings[static_cast<size_t>(s)]; }

struct Format {
  DType dtype = DType::f32;
  Scaling scaling = Scaling::none;
  bool rowwise = true, columnwise = false;

  [[nodiscard]] constexpr Shape data_shape(int64_t m, int64_t k, Orientation o) const {
    return o == Orientation::columnwise && info(scaling).transposes ? Shape{k, m} : Shape{m, k};
  }
  [[nodiscard]] constexpr Shape scale_shape(int64_t m, int64_t k, Orientation o) const {
    return info(scaling).scales(m, k, o);
  }
};

// A tensor may hold a rowwise and a columnwise encoding, each data and scales.
struct Encoding {
  View data, scale_inv;
};
struct Tensor {
  Format format;
  Encoding rowwise, columnwise;
};

}  // namespace tenon
