// One kernel as data: where each load comes from, the formulas, where each result goes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tenon/dtype.h"
#include "tenon/expr.h"
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
  enum class From : uint8_t { tile, row, column, scalar, parameter };
  From from = From::tile;
  uint32_t arg = 0;  // which input view; for a parameter, which parameter
  DType dtype = DType::f32;
  ColumnMap columns;
};

struct Store {
  enum class To : uint8_t { tile, column_sum, row_sum, sum, amax };
  To to = To::tile;
  uint32_t arg = 0;  // which output view
  DType dtype = DType::f32;
  ColumnMap columns;
  uint32_t value = 0;  // node of the graph
};

inline constexpr std::array<std::string_view, 5> kLoadNames{"tile", "row", "column", "scalar",
                                                            "parameter"};
inline constexpr std::array<std::string_view, 5> kStoreNames{"tile", "column_sum", "row_sum", "sum",
                                                             "amax"};

// A map over rows x cols elements. Slot i of the graph reads loads[i]. Within one element all loads
// come before all stores, which is what makes exact in-place calls right.
struct Step {
  std::string name;
  std::shared_ptr<const Graph> graph;
  std::vector<Load> loads;
  std::vector<Store> stores;
  int64_t cols = 0;
  Precision precision = Precision::native;

  [[nodiscard]] std::vector<uint32_t> roots() const;

  // Strict where asked, and wherever a result is kept in fp32: native promises no less there.
  // An amax is a by-product and follows the others.
  [[nodiscard]] Precision effective_precision() const;

  // Bytes that must move for `rows` rows: each input and output once.
  [[nodiscard]] int64_t bytes(int64_t rows) const;

  // Equal keys mean equal kernels; rows are not part of it.
  [[nodiscard]] std::string key() const;

  // One line: loads, words, stores.
  [[nodiscard]] std::string describe() const;
};

}  // namespace tenon
