// Checks what a kernel wrote against float64, element by element and sum by sum.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "step/step.h"
#include "tenon/view.h"

namespace tenon {

// Element (r, c) of a load, as fp32.
float load_element(const Load& l, std::span<const View> in, std::span<const float> parameters,
                   int64_t r, int64_t c);

// Host views. Nothing if every result lies within the bound E; else the first that does not.
std::optional<std::string> verify(const Step& step, int64_t rows, std::span<const View> in,
                                  std::span<const View> out, std::span<const float> parameters);

}  // namespace tenon
