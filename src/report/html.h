// The parts of the HTML page of a plan.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "report/describe.h"

namespace tenon::page {

// Escapes for text and attributes. Removes control characters, which neither allows.
[[nodiscard]] std::string escaped(std::string_view text);

[[nodiscard]] std::string bytes_text(int64_t bytes);
[[nodiscard]] std::string flops_text(int64_t flops);
[[nodiscard]] std::string percent_text(double share);
[[nodiscard]] std::string short_number(double value);  // for a coordinate or a width

// The colour class of an op: mul, norm, move or map.
[[nodiscard]] std::string_view kind_of(std::string_view op);

// A kernel pass as the page shows it. Steps that prepare weights are not passes.
struct Shown {
  const PlanStep* step;
  Pass pass;
  std::string tag;  // F1, B2, or W if only changed weights need it
  int64_t bytes, flops;
  struct Chip {
    std::string text, title;
    std::string_view kind;
  };
  std::vector<Chip> chips;
  std::string note;  // which product of linear's backward, or the op that a tensor is quantised for
};
struct Model {
  const PlanData& d;
  int64_t rows;
  std::vector<Shown> forward, backward, weights;
  int64_t bytes = 0, flops = 0;  // totals of all passes
};
[[nodiscard]] Model model_of(const PlanData& d, int64_t rows);

// Tensors of the forward pass that backward reads: saved tensors, and inputs that the caller keeps.
struct Kept {
  std::string name, format;
  int64_t bytes = 0;
  bool callers = false;
  std::vector<int> buffers;
  int producer = -1;  // index in Model::forward; -1 for an input
  std::vector<size_t> readers;
};
[[nodiscard]] std::vector<Kept> kept_of(const Model& m);

// Draws passes as boxes. Wide: forward goes down on the left, backward goes up on the right, kept
// tensors are between. Narrow: all in one column.
[[nodiscard]] std::string figure(const Model& m, bool wide);

extern const std::string_view kStyle;

}  // namespace tenon::page
