// Compiled kernels by text, kept in memory for the life of the process and on disk.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/driver.h"
#include "backend/cuda/nvrtc.h"

namespace tenon::cuda {

// The code of a text for an architecture: from the disk cache, else from NVRTC.
Compiled compile_once(const std::string& text, const std::string& arch, const std::string& name);

// The skeleton part of a text, which several texts share.
std::string skeletons_of(const std::string& text);
// The group of each text. Texts of a group have the same skeletons; a group has at most `most`
// texts.
std::vector<size_t> groups_of(std::span<const std::string* const> texts, size_t most);
// Joins texts with equal skeletons, to compile many at once. The shared part appears once. The rest
// of each text has its own namespace, and the names of its kernels begin with the namespace.
std::string joined(std::span<const std::string> texts);
// Compiles the joined text for the current context. Source::load finds the result. Not kept on
// disk.
void load_joined(std::span<const std::string> texts);

struct LoadedKernel {
  Function function = nullptr;
  unsigned multiprocessors = 1;       // of the device that it is loaded on
  unsigned shared_bytes = 48 * 1024;  // largest dynamic shared memory of a launch
  bool asked = false;                 // the device maximum is set
};

// The text of one kernel, and its loaded function in each context.
class Source {
 public:
  // `name` is for error messages. `entry` is the name of the kernel in the text.
  Source(std::string name, std::string text, std::string entry)
      : name_(std::move(name)), text_(std::move(text)), entry_(std::move(entry)) {}
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // Compiles on first use in a context. Equal texts are compiled once. Dynamic shared memory above
  // the default limit must be enabled per function; the device may allow less.
  LoadedKernel load(const CurrentContext& context, unsigned shared_bytes = 0) const;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  [[nodiscard]] LoadedKernel compiled(const CurrentContext& context, uint64_t id,
                                      unsigned shared_bytes) const;

  // Avoids the look-up by text, and a lock at launch: entries of the list never change.
  struct Seen {
    uint64_t context;
    LoadedKernel loaded;
    const Seen* before;
  };

  std::string name_, text_, entry_;
  mutable std::atomic<const Seen*> seen_{nullptr};
};

}  // namespace tenon::cuda
