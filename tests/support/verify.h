// Checks what a kernel wrote against float64, element by element and sum by sum.
#pragma once

#include <optional>
#include <string>

#include "step/backend.h"

namespace tenon {

// Element (r, c) of a load, as fp32.
float load_element(const Load& l, const RunArgs& args, int64_t r, int64_t c);

// What a run left in host views. Nothing if every result lies within the bound E; else the first
// that does not.
std::optional<std::string> verify(const Step& step, const RunArgs& args);

}  // namespace tenon
