// The contract between planning and backends: makers that return a kernel or say why not.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "step/step.h"
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
};
using Attempt = std::variant<std::shared_ptr<const Kernel>, Refusal>;

struct Maker {
  std::string_view name;
  Attempt (*make)(const Step&);
};

// Best maker first; the last one takes everything the device can do at all.
struct Backend {
  std::string_view name;
  Device device;
  std::span<const Maker> makers;
  // Takes `count` numbers of a random stream: the state goes to `drawn`, and its offset forward.
  // All in the order of the stream of work.
  void (*draw)(uint64_t* state, uint64_t* drawn, uint64_t count, void* stream);
};

}  // namespace tenon
