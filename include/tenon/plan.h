// A chain of ops planned into steps, forward and backward, for any number of rows.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tenon/chain.h"
#include "tenon/format.h"
#include "tenon/options.h"

#pragma GCC visibility push(default)

namespace tenon {

// How a Linear's input, weight and output gradient are quantised; none leaves them as they are.
struct Recipe {
  std::string name = "none";
  Format input, weight, gradient;

  [[nodiscard]] bool quantises() const { return input.scaling != Scaling::none; }
};
// none, delayed, current, mxfp8 or block; gradients of delayed and current are e5m2 unless `e4m3`.
Recipe recipe(std::string_view name, bool e4m3 = false);

// What is kept for the backward pass of an op: its input as it is, its input in FP8, or its input
// with everything that follows from it computed again.
enum class Keep : uint8_t { input, fp8, recompute };
inline constexpr std::array<std::string_view, 3> kKeeps{"input", "fp8", "recompute"};

// What is asked of one parameter's or one extra input's gradient.
struct GradRequest {
  bool wanted = true;
  std::optional<DType> dtype = {};  // the tensor's own unless given, e.g. f32 for a main_grad
  bool accumulate = false;          // is added to what the gradient's memory holds
};

// An op of the caller's own: it reads and writes whole tensors, and cuts the chain in two. Its
// input is kept for backward. What it throws reaches the caller of run with the op's name.
struct OpaqueOp {
  int64_t cols = 0;  // of its output; 0: as many as its input has
  int64_t rows_mul = 1, rows_div = 1;
  std::function<void(int64_t rows, const View& x, const View& y)> forward;
  std::function<void(int64_t rows, const View& x, const View& dy, const View& dx)> backward;
};

// How the ranks of a group exchange tensors. All run the same chain; rank i of n holds the i-th of
// n equal parts of the rows that are scattered. Called from Plan::run; what it throws reaches the
// caller of run with the op's name.
class Collectives {
 public:
  virtual ~Collectives() = default;
  [[nodiscard]] virtual int64_t ranks() const = 0;
  // The sum over ranks.
  virtual void all_reduce(const View& in, const View& out, void* stream) = 0;
  // The rows of all ranks, one rank's below the other's.
  virtual void all_gather(const View& in, const View& out, void* stream) = 0;
  // This rank's rows of the sum over ranks.
  virtual void reduce_scatter(const View& in, const View& out, void* stream) = 0;
};

struct PlanRequest {
  int64_t cols = 0;  // of the input; 0: the chain's first op says
  DType dtype = DType::f32;
  std::optional<DType> parameter_dtype = {};  // the input's unless given
  Recipe recipe = {};
  bool training = true;
  bool backward = true;
  bool input_grad = true;
  std::vector<GradRequest> parameter_grads = {};  // in the order of Plan::parameters(); else wanted
  std::vector<GradRequest> extra_grads = {};      // of extra inputs, likewise
  Keep keep = Keep::input;                        // of ops that do not say
  std::map<std::string, OpaqueOp> opaque = {};    // by the names that the chain uses for them
  std::shared_ptr<Collectives> collectives = {};  // of this rank's group; one rank unless given
  Options options = {};
  // A machine to plan for, e.g. "sm_90a": the plan can be described, not run. Empty: this one.
  std::string target = {};
};

// rup(cdiv(rows·mul, div), round) + add, of rows that Plan::check_rows takes.
struct RowCount {
  int64_t mul = 1, div = 1, round = 1, add = 0;

  [[nodiscard]] int64_t operator()(int64_t rows) const {
    return rup(cdiv(rows * mul, div), round) + add;
  }
  friend bool operator==(const RowCount&, const RowCount&) = default;
};

enum class Role : uint8_t {
  input,
  output,
  param,
  grad,
  extra_in,
  extra_out,
  saved,
  state,
  workspace,
  rng
};
inline constexpr std::array<std::string_view, 10> kRoles{"input",     "output",    "param", "grad",
                                                         "extra_in",  "extra_out", "saved", "state",
                                                         "workspace", "rng"};

// Memory that the caller lends to a run. `rows` is the dimension that depends on the call's rows;
// the other one is `cols`, and `rows_inside` says that the rows are the contiguous one.
struct Buffer {
  std::string name;
  Role role = Role::workspace;
  DType dtype = DType::f32;
  RowCount rows;
  int64_t cols = 0;
  bool rows_inside = false;
  bool random = false;   // five 64-bit numbers, whatever the dtype says
  Initial initial = {};  // of a parameter

  // Refuses more than a plan may have.
  [[nodiscard]] int64_t bytes(int64_t call_rows) const;
};

enum class Pass : uint8_t { forward, backward };

// What the passes do with a buffer. A pass that adds to a buffer counts as writing it.
struct BufferUse {
  std::array<bool, 2> reads = {}, writes = {};  // by Pass
  int same_as = -1;  // number of the first buffer that has the same memory; -1: it is the first
};

struct PlanRun {
  bool weights_changed = true;  // quantise the weights again
  void* stream = nullptr;
};

// Of a device, where it is known; a step takes at least its bytes ÷ gbps and its FLOPs ÷ gflops.
struct Speed {
  double gbps = 0, gflops = 0;
};

struct PlanData;

class Plan {
 public:
  // Throws what is wrong with the chain.
  static Plan build(std::span<const Op> chain, const PlanRequest& request);
  // The same of a text. Texts of one chain (print_chain tells) with equal requests share one plan,
  // unless they have opaque ops or collectives.
  static Plan build(std::string_view chain, const PlanRequest& request);

  // All memory of a run, by number. Workspace lies in one block: buffers with this role have no
  // memory of their own.
  [[nodiscard]] const std::vector<Buffer>& buffers() const;
  // What the passes do with each of them.
  [[nodiscard]] std::vector<BufferUse> uses() const;
  // Numbers of buffers with a role, in the chain's order.
  [[nodiscard]] std::vector<size_t> with(Role role) const;
  [[nodiscard]] int64_t workspace_bytes(int64_t rows) const;
  [[nodiscard]] int64_t saved_bytes(int64_t rows) const;
  // Refuses a number of rows that the chain cannot take; so does all that is given one.
  void check_rows(int64_t rows) const;

  // Writes what a parameter starts as. The numbers follow from the seed and the buffer's name, so
  // plans that share a name share them.
  void initialise(size_t buffer, uint64_t seed, void* memory) const;

  // memory[i] is the address of buffer i; those that the pass does not use may be null. On cuda the
  // workspace begins at a multiple of 64 bytes. Refuses the backward pass of a plan that has none.
  void run(Pass pass, int64_t rows, std::span<void* const> memory, void* workspace,
           const PlanRun& run = {}) const;

  // For people, for programs, and one self-contained page. A known speed adds each step's floor.
  [[nodiscard]] std::string describe(int64_t rows, const Speed& speed = {}) const;
  [[nodiscard]] std::string json(int64_t rows, const Speed& speed = {}) const;
  [[nodiscard]] std::string html(int64_t rows, const Speed& speed = {}) const;

 private:
  friend const PlanData& data_of(const Plan& plan);
  explicit Plan(std::shared_ptr<const PlanData> data) : data_(std::move(data)) {}

  std::shared_ptr<const PlanData> data_;
};

}  // namespace tenon

#pragma GCC visibility pop

#endif
