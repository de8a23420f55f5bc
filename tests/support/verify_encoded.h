// Checks the results of an encoder against float64: scales first, then codes for those scales.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "step/backend.h"

namespace tenon {

// The smallest value that rounds to infinity in fp32.
inline constexpr double kOverflow32 = 0x1.ffffffp127;

// A value with its error bound E.
struct Bounded {
  double v = 0, e = 0;
};

// `values` is the tensor before encoding, row by row.
std::optional<std::string> verify_encoded(const Encoder& encoder, const RunArgs& args,
                                          const std::vector<Bounded>& values);

// An element of a view as a code.
uint32_t code_at(const View& v, int64_t offset);

}  // namespace tenon
