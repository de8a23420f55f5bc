// Checks the results of a kernel against float64, element by element and sum by sum.
#pragma once

#include <optional>
#include <string>

#include "step/backend.h"

namespace tenon {

// Element (r, c) of a load, as fp32.
float load_element(const Load& l, const RunArgs& args, int64_t r, int64_t c);

// Checks the results of a run in host views. Returns nothing if all are within the bound E, else
// the first error.
std::optional<std::string> verify(const Step& step, const RunArgs& args);
// The same for matrix units that lose up to `lost` times the sum of |a·b| of a product.
std::optional<std::string> verify_losing(const Step& step, const RunArgs& args, double lost);

}  // namespace tenon
