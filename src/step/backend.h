// The interface between planning and backends: a maker returns a kernel, two steps, or a refusal.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "step/step.h"
#include "step/target.h"
#include "tenon/options.h"
#include "tenon/view.h"

namespace tenon {

// Required and preferred alignment of RunArgs::workspace, in bytes. The preferred value is one GPU
// cache line: kernels discard partial sums from the cache only by whole lines.
inline constexpr int64_t kWorkspaceAlignment = 64, kWorkspaceLine = 128;

// Everything that differs between calls.
struct RunArgs {
  int64_t rows = 0;
  std::span<const View> in, out;
  std::span<const float> parameters;
  const uint64_t* random = nullptr;  // the state of random loads: five numbers
  void* workspace = nullptr;         // at least workspace(rows) bytes
  void* stream = nullptr;
  bool tune = true;      // the first call of a class of products may time algorithms
  bool scratch = false;  // results are scratch memory: the timing may overwrite them
  // The options of the call. `allocate` lends memory. Null: memory of the device's pool.
  const Options* options = nullptr;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // True if the kernel accepts the addresses and sizes of a call. Checked before every run.
  [[nodiscard]] virtual bool fits(const RunArgs& /*call*/) const { return true; }
  // True if the kernel accepts every call, so that no other kernel is needed.
  [[nodiscard]] virtual bool fits_all() const { return true; }
  // From this number of rows on, the kernel is faster than the next kernel in the list.
  [[nodiscard]] virtual int64_t least_rows() const { return 0; }
  [[nodiscard]] virtual size_t workspace(int64_t /*rows*/) const { return 0; }
  // Memory traffic beyond each input and output once: partial sums, and inputs that are read again.
  [[nodiscard]] virtual int64_t extra_bytes(int64_t /*rows*/) const { return 0; }
  // Whether it computes the body again for each result. Two steps with some of the results each are
  // then as fast.
  [[nodiscard]] virtual bool repeats_body() const { return false; }
  // The step as the kernel computes it, if native precision allows it more roundings. Null: the
  // step itself.
  [[nodiscard]] virtual const Step* computes() const { return nullptr; }
  virtual void prepare() const {}  // does the one-time work of the first run, e.g. compilation
  // The same for the kernels that this call needs.
  virtual void prepare_for(const RunArgs& /*call*/) const { prepare(); }
  // The inputs of the device's compiler, for compilation ahead of time and for inspection.
  [[nodiscard]] virtual std::vector<std::string> texts() const { return {}; }
  // The subset of texts() that a call runs.
  [[nodiscard]] virtual std::vector<std::string> texts_for(const RunArgs& /*call*/) const {
    return texts();
  }
  // Runs in IEEE arithmetic: round to nearest, no traps, no flush to zero.
  virtual void run(const RunArgs& args) const = 0;
};

struct Refusal {
  std::string why;
  // The maker handles only other heads, or leaves the step to the next maker of its name. Such a
  // refusal carries no information.
  bool silent = false;
};

// Two steps in place of one, before or after the head. Both have the views of the original step.
// Between them are `count` matrices of `stride` columns: outputs of the first step from `out` on,
// and inputs of the second step from `in` on. They have the rows of the first step's body. A map
// runs over these rows. A step with another head gets the rows of the original call.
struct Split {
  Step first, second;
  std::string_view what;    // the value between them, for messages
  std::string_view suffix;  // of the first step's name. Steps that differ in name share a Split
  uint32_t out = 0, in = 0, count = 1;
  int64_t stride = 0;
  DType dtype = DType::f32;
  bool decodes = false;  // the first step decodes or casts an operand of the second one
};
using Attempt = std::variant<std::shared_ptr<const Kernel>, Refusal, Split>;

// A maker knows the machine only through the target.
struct Maker {
  std::string_view name;
  Attempt (*make)(const Step&, const Target&);
};

// Makers in order of preference. The last ones accept every step that the device can run.
struct Backend {
  std::string_view name;
  Device device;
  std::span<const Maker> makers;
  // The target on which calls of this thread run. If there is no such device, the target that plans
  // assume.
  const Target& (*here)();
  // Stream-ordered device memory, for a call that passes no workspace.
  void* (*take)(size_t bytes, void* stream);
  void (*give)(void* memory, void* stream);
  // Sets all bytes to one value that is a small number in every dtype, in stream order. Throws an
  // Error if the stream is being captured in a graph.
  void (*fill)(void* memory, size_t bytes, void* stream);
  // Reserves `count` numbers of a random stream, in stream order: copies the state to `drawn` and
  // advances the offset of `state`.
  void (*draw)(uint64_t* state, uint64_t* drawn, uint64_t count, void* stream);
};

}  // namespace tenon
