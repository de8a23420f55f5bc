// Facts about a step that the text, the JSON and the page share.
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
// The format of the input, and the dtype of the chain if it differs.
[[nodiscard]] std::string input_text(const PlanRequest& r);

// A tensor that a step reads. Block scales belong to the tensor that they scale.
struct Read {
  std::string name;
  int buffer = kNoBuffer;
  Orientation side = Orientation::rowwise;
};
[[nodiscard]] std::vector<Read> reads_of(const PlanData& d, const PlanStep& s);

// The computation of a step: one assignment per line, with the tensor names of the plan.
[[nodiscard]] std::vector<std::string> body_lines(const PlanData& d, const PlanStep& s);

// The makers that refused the step before one accepted it, without makers for other heads.
[[nodiscard]] std::vector<Choice::Refused> refused_makers(const PlanStep& s);

struct AlternativeStep {
  std::string name;
  std::string_view head, maker;
  int64_t bytes = 0;
};
// Another way to run a step: the condition of such calls, the steps, and the bytes moved.
struct Alternative {
  std::string_view maker;
  std::string when;
  std::vector<AlternativeStep> steps;
};
[[nodiscard]] std::vector<Alternative> alternatives(const PlanData& d, const PlanStep& s,
                                                    int64_t rows);

// The steps of a call with `rows` rows at aligned addresses, if its maker takes several.
[[nodiscard]] std::vector<AlternativeStep> steps_of(const PlanData& d, const PlanStep& s,
                                                    int64_t rows);

// The maker that a call with `rows` rows at aligned addresses takes.
[[nodiscard]] std::string_view maker_of(const PlanData& d, const PlanStep& s, int64_t rows);

// "target sm_90a, " if the plan is for another machine.
[[nodiscard]] std::string target_text(const PlanData& d);

// Bytes that a step moves in a call with `rows` rows: each input and output once, and what its
// kernel moves beyond that.
[[nodiscard]] int64_t bytes_of(const PlanData& d, const PlanStep& s, int64_t rows);

// The least time of a step. Empty if the speed is not known.
[[nodiscard]] std::optional<double> floor_us(const PlanData& d, const PlanStep& s, int64_t rows,
                                             const Speed& speed);

// The text with U+FFFD for invalid UTF-8.
[[nodiscard]] std::string valid_utf8(std::string_view text);

// A decimal number, independent of the locale of the host.
[[nodiscard]] std::string fixed(double value, int digits);

}  // namespace tenon
