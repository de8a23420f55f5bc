// The inputs: every 16-bit code, fp32 values over all exponents, neighbours of roots and kinks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "function.h"

namespace tenon::accuracy {

struct Amounts {
  uint32_t spread = 64;  // chunks of fp32 values spread over all bit patterns
  uint32_t others = 64;  // values of one gated input that are combined with all values of the other
};
inline constexpr Amounts kUsual{.spread = 16, .others = 16};
inline constexpr Amounts kQuick{.spread = 3, .others = 4};

// Creates a chunk. Calls may be in any order and from any thread.
using Chunk = std::function<Points()>;

// All chunks of a function for inputs of the given dtype.
std::vector<Chunk> chunks(const Function& f, DType dtype, const Amounts& amounts);

// The fp32 values with these bit patterns.
Points patterns(uint32_t first, size_t count);
// A unary function by name, for all bit patterns.
Function for_all_patterns(const std::string& name);

}  // namespace tenon::accuracy
