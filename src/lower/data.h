// The data of a plan: its buffers, and the steps of both passes with the buffers that they use.
#pragma once

#include <compare>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
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

// Limit for the bytes of all tensors of a plan together. Sums of several such values fit in
// int64_t.
constexpr int64_t kMostBytes = int64_t{1} << 56;

// The product of nonnegative numbers, if it is at most `most`.
inline std::optional<int64_t> product(std::initializer_list<int64_t> factors, int64_t most) {
  int64_t p = 1;
  for (const int64_t f : factors)
    if (__builtin_mul_overflow(p, f, &p) || p > most) return std::nullopt;
  return p;
}

// The rows of a value as a function of the rows of the input: rows·mul ÷ div, or `fixed`.
// Plan::check_rows has accepted the rows of the input.
struct Factor {
  int64_t mul = 1, div = 1, fixed = 0;

  [[nodiscard]] int64_t operator()(int64_t rows) const { return fixed ? fixed : rows * mul / div; }
  // `op` is the op that changes the number of rows.
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

// A tensor of the plan: its encoding, and the buffers that hold it.
struct StoredTensor {
  std::string name = {};
  Operand operand;
  int64_t cols = 0;
  Factor rows = {};
  int row_data = kNoBuffer, row_scale = kNoBuffer, col_data = kNoBuffer, col_scale = kNoBuffer;
  int scale = kNoBuffer;   // delayed: the multiplier; current: the amax, after it is computed
  int amax = kNoBuffer;    // delayed: the maximum of the old and the new amax
  int health = kNoBuffer;  // counts of values that the format cannot represent

  [[nodiscard]] bool plain() const { return operand.plain(); }
};

// A view in the list of a step: a buffer and the part of it that the step uses.
struct BufferView {
  enum class Form : uint8_t { none, data, scale, scalar };
  Form form = Form::none;
  int buffer = kNoBuffer;
  Format format = {};
  Orientation orientation = Orientation::rowwise;
  int64_t cols = 0;
  Factor rows = {};
  friend bool operator==(const BufferView&, const BufferView&) = default;
};

// The elements of a tensor.
inline BufferView data_view(const StoredTensor& t, Orientation o = Orientation::rowwise) {
  const int buffer = o == Orientation::rowwise ? t.row_data : t.col_data;
  return {BufferView::Form::data, buffer, t.operand.format, o, t.cols, t.rows};
}

struct PlanStep {
  Step step;
  Chosen chosen;
  Factor rows;  // the rows that the call passes to the step
  std::vector<BufferView> in, out;
  std::vector<float> parameters;
  std::vector<size_t> ops;  // ops of the chain
  struct Write {
    std::string name;
    Operand operand;
  };
  std::vector<Write> writes;
  bool weights = false;                  // run only after the weights changed
  bool decodes = false;                  // it only decodes or casts one tensor
  std::string why;                       // the planner's decision and its reason
  std::vector<Choice::Refused> refused;  // makers that refused the step before it was split
  // An opaque op of the caller. It runs instead of the step, and the maker names its kind.
  std::function<void(const RunArgs&)> opaque;
  int random = kNoBuffer;
};

// The places of slots and of the kernels' memory in a workspace, and its size.
struct Workspace {
  std::vector<int64_t> slots = {};
  int64_t kernels = 0, bytes = 0;
};

// Everything that the workspace of a run depends on. The flags are those of PlanRun.
struct WorkspaceKey {
  Pass pass;
  int64_t rows;
  bool overwrite_saved, aligned, separate;
  friend auto operator<=>(const WorkspaceKey&, const WorkspaceKey&) = default;
};

struct PlanData {
  Chain chain;
  PlanRequest request;
  const Target* target = nullptr;
  std::vector<Buffer> buffers;
  // The buffer that has the memory of this one, which no step writes.
  std::vector<int> same_as;
  // The slot of each workspace buffer, by buffer number. Buffers with disjoint lifetimes share a
  // slot. The slots of the forward pass are the first.
  std::vector<int> slot_of;
  int slots = 0, forward_slots = 0;
  // The saved buffer whose memory a workspace buffer of the backward pass takes, if the run may
  // overwrite saved memory. `in_place`: only where a step replaces it element by element.
  std::vector<int> saved_for, in_place;
  std::vector<PlanStep> forward, backward;
  bool has_backward = false;  // a backward pass without steps has gradients that are dy itself
  int rng = kNoBuffer, saved_rng = kNoBuffer;
  int dropouts = 0;
  size_t parameters = 0;  // an encoded one has several buffers
  size_t quantising = 0;  // ops that quantise: linears and quantizes
  struct Whole {
    std::string op;
    Factor rows;
  };
  std::vector<Whole> whole;  // row counts that must be integers, with the op that makes each

  // The workspaces of earlier calls.
  struct Known {
    std::mutex lock;
    std::map<WorkspaceKey, std::shared_ptr<const Workspace>> workspaces;
  };
  std::shared_ptr<Known> known = std::make_shared<Known>();

  [[nodiscard]] const std::vector<PlanStep>& steps(Pass p) const {
    return p == Pass::forward ? forward : backward;
  }
};

// The internal data of a plan, for the library and its tests.
inline const PlanData& data_of(const Plan& plan) { return *plan.data_; }

}  // namespace tenon
