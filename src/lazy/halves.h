// Column maps of the halves a and b in one tensor of 2h columns.
#pragma once

#include <array>

#include "step/step.h"
#include "tenon/options.h"

namespace tenon {

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
