// The conformance cases: every cell of the cross table, and every pair of values of two columns.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "tenon/options.h"

namespace tenon::support {

// The columns of a case, in print order.
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

// Sizes and placement of a shape such as "37x96+pad3+shift1". cols are those of the output.
// "+strided" is a pad of 3 elements after each row, "+unaligned" is a shift by one byte.
struct ShapeCase {
  int64_t rows = 0, cols = 0;
  int64_t pad = 0, shift = 0;
};
ShapeCase parse_shape(const std::string& text);

// All valid cells, and a list of cases that covers them. The list is the same in every run.
std::vector<std::string> cells();
std::vector<Case> cases();
// The same for a device that compiles kernels. Cells that differ only in the layout of a gated
// tensor share values, bias, precision and rounding, and so their kernels.
std::vector<Case> cases_of_few_kernels();

// Strict cases of `forms` kinds with random shapes, strides, addresses, layouts and parameters.
std::vector<Case> random_cases(size_t count, size_t forms, uint64_t seed);

}  // namespace tenon::support
