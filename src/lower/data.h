// What a plan is made of: buffers, and the steps of both passes with the buffers they use.
#pragma once

#include <initializer_list>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "choice/choose.h"
#include "ops/arguments.h"
#include "step/operand.h"
#include "tenon/error.h"
#include "tenon/plan.h"

namespace tenon {

constexpr int kNoBuffer = -1;

// Bytes of all tensors of a plan together: room for sums of several such.
constexpr int64_t kMostBytes = int64_t{1} << 56;

// The product of numbers that are not negative, if it is at most `most`.
inline std::optional<int64_t> product(std::initializer_list<int64_t> factors, int64_t most) {
  int64_t p = 1;
  for (const int64_t f : factors)
    if (__builtin_mul_overflow(p, f, &p) || p > most) return std::nullopt;
  return p;
}

// How many rows a value has for `rows` rows of the input, which Plan::check_rows took:
// rows·mul ÷ div, or `fixed`.
struct Factor {
  int64_t mul = 1, div = 1, fixed = 0;

  [[nodiscard]] int64_t operator()(int64_t rows) const { return fixed ? fixed : rows * mul / div; }
  // `op` is the one that makes them so.
  [[nodiscard]] Factor times(int64_t by, int64_t over, std::string_view op) const {
    const int64_t common = std::gcd(by, over);
    const int64_t a = std::gcd(mul, over / common), b = std::gcd(by / common, div);
    const auto above = product({mul / a, by / common / b}, kMostCols);
    const auto below = product({div / b, over / common / a}, kMostCols);
    require(above && below, op, ": its output has ", mul, "/", div, "*", by, "/", over,
            " times the input's rows; both numbers of that must be at most ", kMostCols);
    return {*above, *below};
  }
  friend bool operator==(const Factor&, const Factor&) = default;
};

// A tensor of the plan: how it is encoded, and the buffers that hold it.
struct StoredTensor {
  std::string name = {};
  Operand operand;
  int64_t cols = 0;
  Factor rows = {};
  int row_data = kNoBuffer, row_scale = kNoBuffer, col_data = kNoBuffer, col_scale = kNoBuffer;
  int scale = kNoBuffer;   // delayed: the multiplier; current: the amax, once it is found
  int amax = kNoBuffer;    // delayed: joined by maximum
  int health = kNoBuffer;  // counts of values that the format cannot hold

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
  const Target* target = nullptr;
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

// The inside of a plan, for the library and its tests.
inline const PlanData& data_of(const Plan& plan) { return *plan.data_; }

}  // namespace tenon
