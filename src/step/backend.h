// The contract between planning and backends: makers that return a kernel, two steps in its place,
// or say why not.
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

// Bytes that RunArgs::workspace begins at a multiple of, and those that it should where it can: a
// line of a GPU's cache, since only whole lines of partial sums are discarded.
inline constexpr int64_t kWorkspaceAlignment = 64, kWorkspaceLine = 128;

// All that differs from call to call.
struct RunArgs {
  int64_t rows = 0;
  std::span<const View> in, out;
  std::span<const float> parameters;
  const uint64_t* random = nullptr;  // the state of random loads: five numbers
  void* workspace = nullptr;         // at least workspace(rows) bytes
  void* stream = nullptr;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Whether it takes a call: addresses and sizes may not suit it. Asked before every run.
  [[nodiscard]] virtual bool fits(const RunArgs& /*call*/) const { return true; }
  // Whether it takes every call, so that no other kernel is needed.
  [[nodiscard]] virtual bool fits_all() const { return true; }
  // From how many rows of a call it is the better choice than what follows it in the list.
  [[nodiscard]] virtual int64_t least_rows() const { return 0; }
  [[nodiscard]] virtual size_t workspace(int64_t /*rows*/) const { return 0; }
  virtual void prepare() const {}  // does ahead what the first run would do, e.g. compile
  virtual void prepare_for(const RunArgs& /*call*/) const { prepare(); }  // what this one would
  // What a device's own compiler is given, for those who compile ahead or want to read it.
  [[nodiscard]] virtual std::vector<std::string> texts() const { return {}; }
  // Those of them that a call runs.
  [[nodiscard]] virtual std::vector<std::string> texts_for(const RunArgs& /*call*/) const {
    return texts();
  }
  // Called in IEEE arithmetic: nearest rounding, no traps, no flush to zero.
  virtual void run(const RunArgs& args) const = 0;
};

struct Refusal {
  std::string why;
  bool other_head = false;  // the maker is for steps of another head, which says nothing
};

// Two steps in place of one. Both have the views of the step; `count` matrices of `stride` columns
// are between them, outputs of the first from `out` on and inputs of the second from `in` on. The
// second has the rows of the step's body.
struct Split {
  Step first, second;
  std::string_view what;    // is between them
  std::string_view suffix;  // of the first step's name; equal steps of other names share a Split
  uint32_t out = 0, in = 0, count = 1;
  int64_t stride = 0;
  DType dtype = DType::f32;
};
using Attempt = std::variant<std::shared_ptr<const Kernel>, Refusal, Split>;

// All that a maker knows of the machine is the target.
struct Maker {
  std::string_view name;
  Attempt (*make)(const Step&, const Target&);
};

// Best maker first; the last one takes everything the device can do at all.
struct Backend {
  std::string_view name;
  Device device;
  std::span<const Maker> makers;
  // The target that calls of this thread run on; without such a device, the one that plans assume.
  const Target& (*here)();
  // Memory of the device in the order of a stream, for a call that lends none.
  void* (*take)(size_t bytes, void* stream);
  void (*give)(void* memory, void* stream);
  // Takes `count` numbers of a random stream: the state goes to `drawn`, and its offset forward.
  // All in the order of the stream of work.
  void (*draw)(uint64_t* state, uint64_t* drawn, uint64_t count, void* stream);
};

}  // namespace tenon
