// The parts of a plan's page.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "report/describe.h"

namespace tenon::page {

// For text and for attributes; control characters have no place in either.
[[nodiscard]] std::string escaped(std::string_view text);

[[nodiscard]] std::string bytes_text(int64_t bytes);
[[nodiscard]] std::string flops_text(int64_t flops);
[[nodiscard]] std::string percent_text(double share);
[[nodiscard]] std::string short_number(double value);  // a coordinate or a width

// Which colour an op has: mul, norm, move or map.
[[nodiscard]] std::string_view kind_of(std::string_view op);

// A pass as the page shows it; steps that prepare weights are none.
struct Shown {
  const PlanStep* step;
  Pass pass;
  std::string tag;  // F1, B2, or W where only changed weights need it
  int64_t bytes, flops;
  struct Chip {
    std::string text, title;
    std::string_view kind;
  };
  std::vector<Chip> chips;
  std::string note;  // which product of a linear's backward, or for whom something is quantised
};
struct Model {
  const PlanData& d;
  int64_t rows;
  std::vector<Shown> forward, backward, weights;
  int64_t bytes = 0, flops = 0;  // of all passes
};
[[nodiscard]] Model model_of(const PlanData& d, int64_t rows);

// What the backward pass finds of the forward one: saved tensors, and inputs that the caller keeps.
struct Kept {
  std::string name, format;
  int64_t bytes = 0;
  bool callers = false;
  std::vector<int> buffers;
  int producer = -1;  // of Model::forward; -1: an input
  std::vector<size_t> readers;
};
[[nodiscard]] std::vector<Kept> kept_of(const Model& m);

// Passes as boxes. Wide: forward down the left side, backward up the right one, what is kept
// between them. Narrow: one below the other.
[[nodiscard]] std::string figure(const Model& m, bool wide);

extern const std::string_view kStyle;

}  // namespace tenon::page
