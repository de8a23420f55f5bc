// What a plan is made of: buffers, and the steps of both passes with the buffers they use.
#pragma once

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "ops/operand.h"
#include "plan/execute.h"
#include "tenon/plan.h"

namespace tenon {

constexpr int kNoBuffer = -1;

// How many rows a value has for `rows` rows of the input: rows·mul ÷ div, or `fixed`.
struct Factor {
  int64_t mul = 1, div = 1, fixed = 0;

  [[nodiscard]] int64_t operator()(int64_t rows) const { return fixed ? fixed : rows * mul / div; }
  [[nodiscard]] Factor times(int64_t by, int64_t over) const {
    const int64_t common = std::gcd(mul * by, div * over);
    return {mul * by / common, div * over / common};
  }
  friend bool operator==(const Factor&, const Factor&) = default;
};

// A tensor of the plan: how it is encoded, and the buffers that hold it.
struct Place {
  std::string name;
  Operand operand;
  int64_t cols = 0;
  Factor rows = {};
  int row_data = kNoBuffer, row_scale = kNoBuffer, col_data = kNoBuffer, col_scale = kNoBuffer;
  int scale = kNoBuffer;  // delayed: the multiplier; current: the amax, once it is found
  int amax = kNoBuffer;   // delayed: joined by maximum

  [[nodiscard]] bool plain() const { return operand.plain(); }
};

// A view of a step's list: a buffer in one of its forms.
struct Slot {
  enum class Form : uint8_t { none, data, scale, scalar };
  Form form = Form::none;
  int buffer = kNoBuffer;
  Format format = {};
  Orientation orientation = Orientation::rowwise;
  int64_t cols = 0;
  Factor rows = {};
};

struct PlanStep {
  Step step;
  Chosen chosen;
  Factor rows;  // what the call gives the step
  std::vector<Slot> in, out;
  std::vector<float> parameters;
  std::vector<size_t> ops;  // of the chain
  std::vector<std::string> reads;
  struct Write {
    std::string name;
    Operand operand;
  };
  std::vector<Write> writes;
  bool weights = false;  // only when the weights changed
  std::string why;       // what was decided here and the reason
  // An op that is not ours: runs instead of the step; the maker says of which kind it is.
  std::function<void(const RunArgs&)> opaque;
  int random = kNoBuffer;
};

struct PlanData {
  Chain chain;
  PlanRequest request;
  std::vector<Buffer> buffers;
  // Workspace buffers by number: the slot each lies in, slots shared by those that never live at
  // once.
  std::vector<int> slot_of;
  int slots = 0;
  std::vector<PlanStep> forward, backward;
  int rng = kNoBuffer, saved_rng = kNoBuffer;
  int dropouts = 0;
  struct Whole {
    std::string op;
    Factor rows;
  };
  std::vector<Whole> whole;  // numbers of rows that must come out whole, by the op that makes them

  [[nodiscard]] const std::vector<PlanStep>& steps(Pass p) const {
    return p == Pass::forward ? forward : backward;
  }
};

}  // namespace tenon
