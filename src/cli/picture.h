// Pictures of a recipe's effect: an SVG file, and histograms for the terminal.
#pragma once

#include <span>
#include <string>

#include "cli/measure.h"

namespace tenon::cli {

// One panel per tensor: the magnitudes of its elements, the range of each recipe, and the error by
// magnitude. Works on light and dark pages, without external resources.
std::string svg_picture(const std::string& file, std::span<const Report> reports);

// Shares of elements by magnitude as bars, with the effect of the first recipe on each bar.
std::string text_histogram(const Report& report);

// The same histogram on one line.
std::string spark_line(const Census& census);

// A share in percent.
std::string percent(int64_t part, int64_t whole);

}  // namespace tenon::cli
