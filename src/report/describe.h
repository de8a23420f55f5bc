// What text, JSON and page say about a step, found once.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lower/data.h"

namespace tenon {

[[nodiscard]] std::string_view head_name(const PlanStep& s);

// row, col or rowcol.
[[nodiscard]] std::string orient(const Operand& o);
// bf16, or e4m3 delayed row.
[[nodiscard]] std::string format_of(const Operand& o);

// A tensor that a step reads; scales of blocks belong to the tensor they scale.
struct Read {
  std::string name;
  int buffer = kNoBuffer;
  Orientation side = Orientation::rowwise;
};
[[nodiscard]] std::vector<Read> reads_of(const PlanData& d, const PlanStep& s);

// What the step computes, a line an assignment, by the names of the plan's tensors.
[[nodiscard]] std::vector<std::string> body_lines(const PlanData& d, const PlanStep& s);

// The makers that were asked before the first that took the step; not those of other heads.
[[nodiscard]] std::vector<Choice::Refused> refused_makers(const PlanStep& s);

// Another way of a step, in two steps: when calls go it, and what it then moves.
struct Alternative {
  std::string_view maker;
  std::string when;
  struct Part {
    std::string name;
    std::string_view head;
    int64_t bytes = 0;
  };
  std::vector<Part> parts;
};
[[nodiscard]] std::vector<Alternative> alternatives(const PlanStep& s, int64_t rows);

// "target sm_90a, " where the plan is for another machine than this.
[[nodiscard]] std::string target_text(const PlanData& d);

// Bytes that a step moves in a call of the plan's `rows`: each input and output once.
[[nodiscard]] int64_t bytes_of(const PlanData& d, const PlanStep& s, int64_t rows);

// The least time of a step; nothing where the speed is not known.
[[nodiscard]] std::optional<double> floor_us(const PlanData& d, const PlanStep& s, int64_t rows,
                                             const Speed& speed);

// The text with U+FFFD in place of bytes that are no UTF-8.
[[nodiscard]] std::string valid_utf8(std::string_view text);

// Decimals whatever the host's locale says.
[[nodiscard]] std::string fixed(double value, int digits);

}  // namespace tenon
