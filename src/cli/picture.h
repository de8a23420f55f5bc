// Pictures of what a recipe does: an SVG file, and histograms for the terminal.
#pragma once

#include <span>
#include <string>

#include "cli/measure.h"

namespace tenon::cli {

// One panel a tensor: how large its elements are, what each recipe can represent, and the error by
// magnitude. For light and dark pages, without outside resources.
std::string svg_picture(const std::string& file, std::span<const Report> reports);

// Shares by magnitude as bars, with what the first recipe does to each.
std::string text_histogram(const Report& report);

// The same shape on one line.
std::string spark_line(const Census& census);

// A share of a whole in percent.
std::string percent(int64_t part, int64_t whole);

}  // namespace tenon::cli
