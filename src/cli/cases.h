// The conformance cases: every cell of the cross table, and every pair of values of two columns.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "tenon/options.h"

namespace tenon::cli {

// The columns of a case, in the order in which it is printed.
enum class Column : uint8_t {
  op,
  direction,
  input,
  output,
  mode,
  orientation,
  layout,
  shape,
  bias,
  precision,
  rounding,
  count,
};
inline constexpr size_t kColumns = static_cast<size_t>(Column::count);

struct Case {
  std::array<std::string, kColumns> values;

  [[nodiscard]] const std::string& operator[](Column c) const {
    return values[static_cast<size_t>(c)];
  }
  [[nodiscard]] std::string text() const;
  // The cell of the cross table: op, direction, mode, orientation, layout, dbias.
  [[nodiscard]] std::string cell() const;
};

// Sizes and placement of a shape such as "37x96+strided+unaligned"; cols are the output's.
struct ShapeCase {
  int64_t rows = 0, cols = 0;
  bool strided = false, unaligned = false;
};
ShapeCase parse_shape(const std::string& text);

// All cells that exist, and the list that covers them; the same list in every run.
std::vector<std::string> cells();
std::vector<Case> cases();

}  // namespace tenon::cli
