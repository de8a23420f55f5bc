// The encoding of a tensor in memory: dtype, scaling mode, and the resulting shapes.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

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

// Element (r, c) has scale (r ÷ rows, c ÷ cols). 0 means one scale for the whole tensor.
struct Blocks {
  int64_t rows = 0, cols = 0;
  bool transposed = false;  // scale (i, j) is in row j, column i of the scale tensor

  [[nodiscard]] constexpr bool single() const { return rows == 0; }
  // The number of scales of an m x k tensor.
  [[nodiscard]] constexpr Shape count(int64_t m, int64_t k) const {
    return single() ? Shape{1, 1} : Shape{cdiv(m, rows), cdiv(k, cols)};
  }
  friend bool operator==(const Blocks&, const Blocks&) = default;
};

// One row per scaling mode.
struct ScalingInfo {
  std::string_view name;
  DType scale = DType::f32;   // dtype of scale_inv
  bool reads_scale = false;   // reads one value for the tensor: its multiplier or its amax
  bool scale_given = false;   // that value is the multiplier, and the caller gives it
  bool transposes = true;     // columnwise data has shape [K, M]
  bool power_of_two = false;  // default: fp32 scales are powers of two
  std::array<Blocks, 2> blocks = {};
  Shape (*scales)(int64_t m, int64_t k, Orientation);

  // The scale is computed from the amax of the whole tensor.
  [[nodiscard]] constexpr bool reads_amax() const { return reads_scale && !scale_given; }
};

inline constexpr std::array<ScalingInfo, 6> kScalings{{
    {.name = "none", .scales = [](int64_t, int64_t, Orientation) { return Shape{}; }},
    {.name = "delayed",
     .reads_scale = true,
     .scale_given = true,
     .scales =
         [](int64_t, int64_t, Orientation) {
           return Shape{1, 1};
         }},
    {.name = "current",
     .reads_scale = true,
     .scales =
         [](int64_t, int64_t, Orientation) {
           return Shape{1, 1};
         }},
    {.name = "mxfp8",
     .scale = DType::e8m0,
     .transposes = false,
     .power_of_two = true,
     .blocks = {{{1, 32, false}, {32, 1, false}}},
     .scales =
         [](int64_t m, int64_t k, Orientation o) {
           return o == Orientation::rowwise ? Shape{rup(m, 128), rup(cdiv(k, 32), 4)}
                                            : Shape{rup(cdiv(m, 32), 4), rup(k, 128)};
         }},
    {.name = "block1x128",
     .power_of_two = true,
     .blocks = {{{1, 128, true}, {128, 1, false}}},
     .scales =
         [](int64_t m, int64_t k, Orientation o) {
           return o == Orientation::rowwise ? Shape{cdiv(k, 128), rup(m, 4)}
                                            : Shape{cdiv(m, 128), rup(k, 4)};
         }},
    {.name = "block128x128",
     .power_of_two = true,
     .blocks = {{{128, 128, false}, {128, 128, true}}},
     .scales =
         [](int64_t m, int64_t k, Orientation o) {
           return o == Orientation::rowwise ? Shape{cdiv(m, 128), rup(cdiv(k, 128), 4)}
                                            : Shape{cdiv(k, 128), rup(cdiv(m, 128), 4)};
         }},
}};

constexpr const ScalingInfo& info(Scaling s) { return kScalings[static_cast<size_t>(s)]; }

constexpr std::optional<Scaling> scaling_named(std::string_view name) {
  for (size_t i = 0; i < kScalings.size(); ++i)
    if (kScalings[i].name == name) return static_cast<Scaling>(i);
  return std::nullopt;
}

struct Format {
  DType dtype = DType::f32;
  Scaling scaling = Scaling::none;
  float eps = 0;                          // current, block: lower limit of the amax
  std::optional<bool> power_of_two = {};  // current, block: scales are powers of two
  bool swizzled = false;                  // mxfp8: scales in tensor core order

  [[nodiscard]] constexpr Blocks blocks(Orientation o) const {
    return info(scaling).blocks[static_cast<size_t>(o)];
  }
  [[nodiscard]] constexpr Shape data_shape(int64_t m, int64_t k, Orientation o) const {
    return o == Orientation::columnwise && info(scaling).transposes ? Shape{k, m} : Shape{m, k};
  }
  [[nodiscard]] constexpr Shape scale_shape(int64_t m, int64_t k, Orientation o) const {
    return info(scaling).scales(m, k, o);
  }
  // True if the mode computes fp32 scales. eps and power_of_two are then its parameters.
  [[nodiscard]] constexpr bool fp32_rule() const {
    const ScalingInfo& mode = info(scaling);
    return scaling != Scaling::none && !mode.scale_given && mode.scale == DType::f32;
  }
  [[nodiscard]] constexpr bool powers() const {
    return power_of_two.value_or(info(scaling).power_of_two);
  }
  friend bool operator==(const Format&, const Format&) = default;
};

// The offset of scale (i, j) in a scale tensor of the given shape and stride, in elements. Swizzled
// scales are contiguous tiles of 128 lines x 4 blocks. A line is a row (rowwise) or a column
// (columnwise).
constexpr int64_t scale_offset(const Format& f, Orientation o, int64_t i, int64_t j, Shape scales,
                               int64_t stride) {
  if (!f.swizzled) return f.blocks(o).transposed ? j * stride + i : i * stride + j;
  const bool rowwise = o == Orientation::rowwise;
  const int64_t line = rowwise ? i : j;
  const int64_t block = rowwise ? j : i;
  const int64_t tiles = (rowwise ? scales.cols : scales.rows) / 4;
  return (line / 128 * tiles + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4;
}

// Data and scales. Without data the encoding is absent.
struct Encoding {
  View data = {}, scale_inv = {};
};

// An M x K tensor with a rowwise encoding, a columnwise encoding, or both. A View converts to a
// Tensor with a rowwise encoding and no scale.
struct Tensor {
  Format format;
  Encoding rowwise = {}, columnwise = {};
  View scale = {};          // delayed, written: [1, 1] f32, the multiplier
  View amax = {};           // delayed, written: [1, 1] f32, joined by maximum (row 0 of a history);
                            // current, written: [1, 1] f32, the computed amax
  bool amax_given = false;  // current: read amax (e.g. of a group) instead of computing it
  View health = {};         // written: [1, 3] f32, counts: saturated, flushed to zero, not finite

  Tensor() = default;
  Tensor(const View& plain) : format{.dtype = plain.dtype}, rowwise{plain, {}} {}  // NOLINT
  Tensor(const Format& f, const Encoding& row, const Encoding& column = {})
      : format(f), rowwise(row), columnwise(column) {}

  [[nodiscard]] bool given() const { return rowwise.data.given() || columnwise.data.given(); }
  // Whether the tensor is an unscaled matrix.
  [[nodiscard]] bool plain() const {
    return format.scaling == Scaling::none && !columnwise.data.given();
  }
  [[nodiscard]] const Encoding& encoding(Orientation o) const {
    return o == Orientation::rowwise ? rowwise : columnwise;
  }
  // M x K, from the encoding that is present.
  [[nodiscard]] Shape shape() const {
    if (rowwise.data.given()) return {rowwise.data.rows, rowwise.data.cols};
    const View& d = columnwise.data;
    return info(format.scaling).transposes ? Shape{d.cols, d.rows} : Shape{d.rows, d.cols};
  }
};

}  // namespace tenon

#endif
