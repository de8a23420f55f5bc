// The CUDA text of a step, the launches of a call, and the kernel that runs them.
#pragma once

#include <algorithm>
#include <cassert>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/cuda/device/arguments.h"
#include "core/few.h"
#include "step/backend.h"

namespace tenon::cuda {

// One kernel launch. Its argument is one struct. Created for every call, so it has no strings.
struct Launch {
  size_t entry = 0;               // index in the entries of the program
  unsigned blocks = 1, down = 1;  // blocks per row of the grid, and rows
  unsigned threads = 1;
  Few<std::byte, 768> arguments;
  unsigned shared = 0;              // dynamic bytes; reduced if the device has less
  unsigned least_shared = 0;        // lower limit of that
  unsigned per_multiprocessor = 0;  // if not 0, the most blocks; they loop over the work
};

// A launch whose argument is TenonArguments with this head.
template <class Head>
Launch launch_of(size_t entry, int64_t blocks, unsigned threads, const Head& head,
                 std::span<const TenonAccess> at, std::span<const TenonPlace> places) {
  static constexpr TenonAccess kNoAccess;
  static constexpr TenonPlace kNoPlace;
  Launch l;
  l.entry = entry;
  l.blocks = static_cast<unsigned>(blocks);
  l.threads = threads;
  l.arguments.append(std::as_bytes(std::span(&head, 1)));
  l.arguments.append(std::as_bytes(at.empty() ? std::span(&kNoAccess, 1) : at));
  l.arguments.append(std::as_bytes(places.empty() ? std::span(&kNoPlace, 1) : places));
  return l;
}

// Creating a text and checking a call need no GPU. The functions are those of Kernel.
class Program {
 public:
  virtual ~Program() = default;
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] const std::vector<std::string>& entries() const { return entries_; }
  // Whether it can run a call. Sizes or addresses may be unsuitable.
  [[nodiscard]] virtual bool fits(const RunArgs& /*args*/) const { return true; }
  [[nodiscard]] virtual bool fits_all() const { return false; }
  [[nodiscard]] virtual int64_t least_rows() const { return 0; }
  // Whether a call has no work. Such a call needs no device.
  [[nodiscard]] virtual bool idle(const RunArgs& /*args*/) const { return false; }
  [[nodiscard]] virtual size_t workspace(int64_t /*rows*/) const { return 0; }
  // What is in the workspace is written and read once.
  [[nodiscard]] virtual int64_t extra_bytes(int64_t rows) const {
    return 2 * static_cast<int64_t>(workspace(rows));
  }
  [[nodiscard]] virtual bool repeats_body() const { return false; }
  // In order. `args.workspace` holds at least workspace(args.rows) bytes.
  [[nodiscard]] virtual std::vector<Launch> launches(const RunArgs& args) const = 0;

 protected:
  // The index of an entry.
  [[nodiscard]] size_t number(std::string_view entry) const {
    const auto at = std::ranges::find(entries_, entry);
    assert(at != entries_.end());
    return static_cast<size_t>(at - entries_.begin());
  }

  std::string text_;
  std::vector<std::string> entries_;
};

// The kernel that runs a program. A call without a workspace takes one in the order of its stream.
std::shared_ptr<const Kernel> kernel_of(const std::string& name, std::unique_ptr<Program> program);

}  // namespace tenon::cuda
