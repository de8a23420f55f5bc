// The inputs: every 16-bit code, fp32 numbers over all exponents, neighbours of roots and kinks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "function.h"

namespace tenon::accuracy {

struct Amounts {
  uint32_t spread = 64;  // chunks of fp32 numbers spread over all bit patterns
  uint32_t others = 64;  // values of one gated input that meet all values of the other
};
inline constexpr Amounts kUsual{.spread = 16, .others = 16};
inline constexpr Amounts kQuick{.spread = 3, .others = 4};

// Calls made in any order by any thread give the chunk they stand for.
using Chunk = std::function<Points()>;

// All chunks of a function whose inputs have the given dtype.
std::vector<Chunk> chunks(const Function& f, DType dtype, const Amounts& amounts);

// The fp32 numbers with these bit patterns.
Points patterns(uint32_t first, size_t count);
// A unary function by name, for all of them.
Function for_all_patterns(const std::string& name);

}  // namespace tenon::accuracy
