// The halves a and b in one tensor of 2h columns: their rules and their column maps.
#pragma once

#include <array>
#include <string_view>

#include "step/step.h"
#include "tenon/error.h"
#include "tenon/options.h"

namespace tenon {

// Throws if `input`, which has `cols` columns, cannot hold two halves in the layout.
inline void check_halves(std::string_view op, std::string_view input, int64_t cols,
                         const Layout& layout) {
  require(cols % 2 == 0, op, ": ", input, " has ", cols,
          " columns; a gated input holds a and b, so its columns must be even");
  require(layout.k >= 1, op, ": interleaved(", layout.k, "): k must be at least 1");
  require(layout.kind != Layout::Kind::interleaved || cols / 2 % layout.k == 0, op,
          ": interleaved(", layout.k, ") needs a half width divisible by ", layout.k, ", it is ",
          cols / 2);
}

inline std::array<ColumnMap, 2> halves(const Layout& layout, int64_t h) {
  switch (layout.kind) {
    case Layout::Kind::swapped:
      return {{{1, 1, h}, {1, 1, 0}}};
    case Layout::Kind::interleaved:
      return {{{layout.k, 2 * layout.k, 0}, {layout.k, 2 * layout.k, layout.k}}};
    default:
      return {{{1, 1, 0}, {1, 1, h}}};
  }
}

}  // namespace tenon
