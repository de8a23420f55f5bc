// Plans a chain of ops as steps, forward and backward, for any number of rows.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <array>
#include <cstdint>
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

// The formats of a Linear's input, weight and output gradient. An operand whose scaling is `none`
// is not quantised.
struct Recipe {
  std::string name = "none";
  Format input, weight, gradient;
};
// The name is none, delayed, current, mxfp8 or block. With delayed and current, gradients are e5m2,
// or e4m3 if `e4m3` is set.
Recipe recipe(std::string_view name, bool e4m3 = false);

// What is saved for the backward pass of an op. input: its input. fp8: its input in FP8. recompute:
// its input, and everything that follows from it is recomputed.
enum class Keep : uint8_t { input, fp8, recompute };
inline constexpr std::array<std::string_view, 3> kKeeps{"input", "fp8", "recompute"};

// The request for the gradient of one parameter or extra input.
struct GradRequest {
  bool wanted = true;
  std::optional<DType> dtype = {};  // default: the tensor's dtype; e.g. f32 for a main_grad
  bool accumulate = false;          // add to the gradient that is in memory
};

// A tensor that comes encoded: its format, and which encodings the caller gives. Its buffers are
// the codes NAME and NAME.scale_inv, columnwise NAME.t and NAME.t.scale_inv.
struct GivenEncoding {
  Format format;
  bool rowwise = true, columnwise = false;
};

// The request for an op that quantises: a linear or a quantize.
struct OpRequest {
  // Default: the recipe in the op's text, else the recipe of the plan.
  std::optional<Recipe> recipe = {};
  // The weight of a linear comes encoded. It is multiplied as it is, whatever the recipe.
  std::optional<GivenEncoding> weight = {};
  // The encodings that a quantize at the end of a chain gives.
  bool rowwise = true, columnwise = false;
};

// An op of the caller. It reads and writes whole tensors, and splits the chain in two. Its input is
// saved for the backward pass. Its exceptions reach the caller of run with the op's name.
struct OpaqueOp {
  int64_t cols = 0;  // of its output; 0: as its input
  int64_t rows_mul = 1, rows_div = 1;
  std::function<void(int64_t rows, const View& x, const View& y)> forward;
  std::function<void(int64_t rows, const View& x, const View& dy, const View& dx)> backward;
};

// The collectives of a group of ranks. All ranks run the same chain. Scattered rows have n equal
// parts, and rank i of n holds part i. Plan::run calls these functions. Their exceptions reach the
// caller of run with the op's name.
class Collectives {
 public:
  virtual ~Collectives() = default;
  [[nodiscard]] virtual int64_t ranks() const = 0;
  // The sum over ranks.
  virtual void all_reduce(const View& in, const View& out, void* stream) = 0;
  // The rows of all ranks, concatenated in rank order.
  virtual void all_gather(const View& in, const View& out, void* stream) = 0;
  // This rank's rows of the sum over ranks.
  virtual void reduce_scatter(const View& in, const View& out, void* stream) = 0;
};

struct PlanRequest {
  int64_t cols = 0;                       // of the input; 0: inferred from the chain's first op
  DType dtype = DType::f32;               // of the values between ops and of the output
  std::optional<DType> input_dtype = {};  // of x and dx; default: dtype of the chain
  // x comes encoded. A linear that reads it multiplies it as it is, whatever the recipe.
  std::optional<GivenEncoding> input_encoding = {};
  // The output of a quantize at the end: its codes, or the numbers that they represent.
  bool output_encoded = true;
  std::optional<DType> parameter_dtype = {};  // of all parameters; default: dtype of the chain
  // Of single parameters and extra inputs, in the order of with(Role::param), with(Role::extra_in).
  // An encoded weight is one parameter: its dtype is that of its gradient. Default: as above.
  std::vector<std::optional<DType>> parameter_dtypes = {}, extra_dtypes = {};
  Recipe recipe = {};
  bool training = true;
  bool backward = true;
  bool input_grad = true;
  // In the order of the parameters. Default: wanted.
  std::vector<GradRequest> parameter_grads = {};
  std::vector<GradRequest> extra_grads = {};      // the same for extra inputs
  std::vector<OpRequest> op_requests = {};        // for linears and quantizes, in chain order
  Keep keep = Keep::input;                        // for ops without a `keep` argument
  std::map<std::string, OpaqueOp> opaque = {};    // by their names in the chain
  std::shared_ptr<Collectives> collectives = {};  // of this rank's group; default: one rank
  Options options = {};
  // The machine to plan for, e.g. "sm_90a". Such a plan can be described but not run. Empty: this
  // machine.
  std::string target = {};
};

// rup(cdiv(rows·mul, div), round) + add. Plan::check_rows must accept `rows`.
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

// Memory that the caller provides for a run. One dimension is `rows`, which depends on the rows of
// the call. The other dimension is `cols`. `rows_inside`: the rows are the contiguous dimension.
struct Buffer {
  std::string name;
  Role role = Role::workspace;
  DType dtype = DType::f32;
  RowCount rows;
  int64_t cols = 0;
  bool rows_inside = false;
  bool random = false;   // five 64-bit numbers; `dtype` is ignored
  Initial initial = {};  // of a parameter

  // Throws if the size exceeds the limit of a plan.
  [[nodiscard]] int64_t bytes(int64_t call_rows) const;
};

enum class Pass : uint8_t { forward, backward };

// How the passes use a buffer. A pass that adds to a buffer writes it.
struct BufferUse {
  std::array<bool, 2> reads = {}, writes = {};  // by Pass
  // The first and the last step of a pass that uses it; -1: none.
  std::array<int, 2> first = {-1, -1}, last = {-1, -1};
  // The saved buffer whose memory this one may have in the last backward pass: the step that first
  // writes this one is the last reader of that buffer, and works in place. -1: none.
  int in_place = -1;
  // The buffer whose memory this one has; -1: its own. A result that is x, dy or another gradient
  // is not written: the caller uses that buffer.
  int same_as = -1;
};

struct PlanRun {
  bool weights_changed = true;  // quantise the weights again
  // On cuda the first run of a class of products may time several algorithms. This takes memory for
  // one result and waits for the stream. TENON_TUNE=0 forbids it for all runs.
  bool tune = true;
  // The backward pass may overwrite saved buffers, so that it needs less workspace. A second
  // backward pass is then not possible.
  bool overwrite_saved = false;
  // All addresses are multiples of kCallAligned. The run then needs only the workspace for such
  // calls.
  bool aligned = false;
  // Workspace buffers have addresses of their own, like other buffers. The workspace then only has
  // the memory of kernels.
  bool separate = false;
  // Runs only the steps [first_step, end_step) of the pass. Between such runs the caller may
  // allocate buffers that later steps write, and free those that no later step uses.
  size_t first_step = 0, end_step = SIZE_MAX;
  void* stream = nullptr;
  // cuda: lends the memory for timing, as in Options.
  void* (*allocate)(void* user, size_t bytes) = nullptr;
  void* user = nullptr;
};
// Bytes: the alignment of an aligned run, and the largest alignment that a kernel distinguishes.
inline constexpr int64_t kCallAligned = 16, kAligned = 256;

// The peak speed of a device, if known. A step takes at least bytes ÷ gbps and FLOPs ÷ gflops.
// gflops is the rate of 16-bit operands. FP8 products count at twice that rate.
struct Speed {
  double gbps = 0, gflops = 0;
};

struct PlanData;

class Plan {
 public:
  // Throws if the chain is invalid.
  static Plan build(std::span<const Op> chain, const PlanRequest& request);
  // The same for a chain text. Texts with the same canonical form (print_chain) and equal requests
  // share one plan, unless they have opaque ops or collectives.
  static Plan build(std::string_view chain, const PlanRequest& request);

  // All memory of a run, by number. All workspace buffers are in one block, so the caller provides
  // no separate memory for them.
  [[nodiscard]] const std::vector<Buffer>& buffers() const;
  // How the passes use each buffer.
  [[nodiscard]] std::vector<BufferUse> uses() const;
  // The buffer whose memory the caller gives for this buffer: itself, unless it is `same_as` one.
  [[nodiscard]] size_t owner(size_t buffer) const;
  // The numbers of the buffers with this role, in chain order.
  [[nodiscard]] std::vector<size_t> with(Role role) const;
  // Enough for every pass, and for one pass that is run as `run` says. Throws for a pass that the
  // plan does not have.
  [[nodiscard]] int64_t workspace_bytes(int64_t rows) const;
  [[nodiscard]] int64_t workspace_bytes(int64_t rows, Pass pass, const PlanRun& run = {}) const;
  [[nodiscard]] int64_t saved_bytes(int64_t rows) const;
  // Throws if the chain cannot process this number of rows. All functions that take rows check
  // this.
  void check_rows(int64_t rows) const;

  // Writes the initial values of a parameter. They depend only on the seed and the name of the
  // buffer. Plans with equal names thus get equal values.
  void initialise(size_t buffer, uint64_t seed, void* memory) const;

  // memory[i] is the address of buffer i. Buffers that the pass does not use may be null. On cuda
  // the workspace must be aligned to 64 bytes. Throws if the plan has no backward pass and `pass`
  // is backward.
  void run(Pass pass, int64_t rows, std::span<void* const> memory, void* workspace,
           const PlanRun& run = {}) const;

  // Does the one-time work of later runs with this number of rows and with addresses at multiples
  // of kAligned: compiles kernels and times products. It runs each step once on scratch memory,
  // without opaque ops and collectives. Call it before a stream is captured in a CUDA graph.
  // `memory`: prepare_bytes(rows) bytes at a multiple of kAligned; null: memory of the device's
  // pool.
  void prepare(int64_t rows, void* memory = nullptr, void* stream = nullptr) const;
  [[nodiscard]] int64_t prepare_bytes(int64_t rows) const;

  // 32 hexadecimal digits for everything that decides the bits of the results: formulas, roundings,
  // formats, orders of sums, makers of products. Plans with equal fingerprints give equal bits for
  // equal inputs in strict precision. Products by a library: only on the same kind of device, with
  // TENON_TUNE=0.
  [[nodiscard]] std::string fingerprint() const;

  // The plan as text, as JSON, and as one self-contained HTML page. A known speed adds the minimum
  // time of each step.
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
