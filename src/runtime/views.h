// The views of a plan's step in a call.
#pragma once

#include <vector>

#include "lower/data.h"

namespace tenon {

// A view of buffer `b` at `data`, in a call of `rows` rows.
View view_of(const BufferView& v, void* data, const Buffer& b, int64_t rows);

// The views of a step. `address` gives the memory of a buffer.
template <class Address>
void fill(const PlanData& d, const std::vector<BufferView>& list, int64_t rows,
          const Address& address, std::vector<View>& views) {
  views.clear();
  for (const BufferView& v : list) {
    if (v.buffer == kNoBuffer)
      views.emplace_back();
    else
      views.push_back(
          view_of(v, address(v.buffer), d.buffers[static_cast<size_t>(v.buffer)], rows));
  }
}

}  // namespace tenon
