// A step's text with what is launched for a call, and the kernel that runs it.
#pragma once

#include <algorithm>
#include <cassert>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/few.h"
#include "step/backend.h"

namespace tenon::cuda {

// One kernel of a text, ready to launch; its arguments are one struct. Made anew for every call, so
// without strings.
struct Launch {
  size_t entry = 0;               // its number among the program's
  unsigned blocks = 1, down = 1;  // of a row, and how many such rows
  unsigned threads = 1;
  Few<std::byte, 768> arguments;
  unsigned shared = 0;              // dynamic bytes; less where the device has less,
  unsigned least_shared = 0;        // but not less than these
  unsigned per_multiprocessor = 0;  // if any, the most blocks; these do the work of the others
};

// Texts and what fits them need no GPU.
class Program {
 public:
  virtual ~Program() = default;
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] const std::vector<std::string>& entries() const { return entries_; }
  // Whether it does a call: sizes and addresses may not suit it.
  [[nodiscard]] virtual bool fits(const RunArgs& /*args*/) const { return true; }
  [[nodiscard]] virtual bool fits_all() const { return false; }
  [[nodiscard]] virtual size_t workspace(int64_t /*rows*/) const { return 0; }
  // In order; `args.workspace` holds at least workspace(args.rows) bytes.
  [[nodiscard]] virtual std::vector<Launch> launches(const RunArgs& args) const = 0;

 protected:
  // The number of an entry.
  [[nodiscard]] size_t number(std::string_view entry) const {
    const auto at = std::ranges::find(entries_, entry);
    assert(at != entries_.end());
    return static_cast<size_t>(at - entries_.begin());
  }

  std::string text_;
  std::vector<std::string> entries_;
};

// A call runs the first of the programs that fits it. One that lends no workspace takes it in the
// order of its stream.
using Programs = std::vector<std::unique_ptr<Program>>;
std::shared_ptr<const Kernel> kernel_of(const std::string& name, Programs programs,
                                        int64_t least_rows = 0);
std::shared_ptr<const Kernel> kernel_of(const std::string& name, std::unique_ptr<Program> program);

}  // namespace tenon::cuda
