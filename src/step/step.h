// One kernel as data: where each load comes from, the formulas, where each result goes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tenon/expr.h"
#include "tenon/format.h"
#include "tenon/options.h"

namespace tenon {

// Column c of the step lies at (c ÷ block)·stride + c mod block + offset of the tensor, so halves
// of a gated tensor are read and written in place whatever their layout.
struct ColumnMap {
  int64_t block = 1, stride = 1, offset = 0;

  [[nodiscard]] int64_t operator()(int64_t c) const {
    return c / block * stride + c % block + offset;
  }
  [[nodiscard]] bool contiguous() const { return block == stride; }
  friend bool operator==(const ColumnMap&, const ColumnMap&) = default;
};

struct Load {
  // block: the scale of an encoded input; random: 16 bits of the stream as a number.
  enum class From : uint8_t { tile, row, column, scalar, parameter, block, random };
  From from = From::tile;
  // Which input view; for a parameter, which parameter; for random, the ordinal of its Dropout.
  uint32_t arg = 0;
  DType dtype = DType::f32;
  ColumnMap columns = {};
  bool transposed = false;  // tile: (r, c) lies in row c, column r
  Format format = {};       // block: of the tensor that is scaled
  Orientation orientation = Orientation::rowwise;
};

struct Store {
  // encoded: elements of an encoder's tensor.
  enum class To : uint8_t { tile, column_sum, row_sum, sum, amax, encoded };
  To to = To::tile;
  uint32_t arg = 0;  // which output view, or which encoder
  DType dtype = DType::f32;
  ColumnMap columns = {};
  uint32_t value = 0;  // node of the graph
  bool join = false;   // amax: the larger of the result and of what the view holds
};

inline constexpr std::array<std::string_view, 7> kLoadNames{
    "tile", "row", "column", "scalar", "parameter", "block", "random"};
inline constexpr std::array<std::string_view, 6> kStoreNames{"tile", "column_sum", "row_sum",
                                                             "sum",  "amax",       "encoded"};

// An output whose elements need their neighbours: scales of blocks, transposed copies. Its elements
// come from the stores that name it, two where a gated gradient is one tensor.
struct Encoder {
  // Its views follow one another in the outputs; scale_inv and health only where there is one.
  enum Out : uint32_t { row_data, row_scale, column_data, column_scale, health, outputs };

  Format format;
  int64_t cols = 0;    // of the tensor
  uint32_t out = 0;    // the first of its output views
  uint32_t scale = 0;  // input view: the multiplier of delayed, the amax of current
  bool rowwise = true, columnwise = false, counts = false;

  [[nodiscard]] bool has(Orientation o) const {
    return o == Orientation::rowwise ? rowwise : columnwise;
  }
  [[nodiscard]] uint32_t data(Orientation o) const {
    return out + (o == Orientation::rowwise ? row_data : column_data);
  }
  [[nodiscard]] uint32_t scale_inv(Orientation o) const {
    return out + (o == Orientation::rowwise ? row_scale : column_scale);
  }
};
inline constexpr std::array kOrientations{Orientation::rowwise, Orientation::columnwise};

// A map over rows x cols elements. Slot i of the graph reads loads[i]. Within one element all loads
// come before all stores, which is what makes exact in-place calls right.
struct Step {
  std::string name;
  std::shared_ptr<const Graph> graph;
  std::vector<Load> loads;
  std::vector<Store> stores;
  std::vector<Encoder> encoders;
  int64_t cols = 0;
  Precision precision = Precision::native;

  [[nodiscard]] std::vector<uint32_t> roots() const;

  // Strict where asked, and wherever a result is kept in fp32: native promises no less there.
  // An amax is a by-product and follows the others; alone it is as asked.
  [[nodiscard]] Precision effective_precision() const;

  // Bytes that must move for `rows` rows: each input and output once.
  [[nodiscard]] int64_t bytes(int64_t rows) const;

  // Equal keys mean equal kernels; rows are not part of it.
  [[nodiscard]] std::string key() const;

  // One line: loads, words, stores.
  [[nodiscard]] std::string describe() const;
};

}  // namespace tenon
