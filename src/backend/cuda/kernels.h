// Compiled kernels by their text, kept in memory for the life of the process and on disk.
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

// The code of a text for an architecture: from the disk, else by NVRTC and then to the disk.
Compiled compile_once(const std::string& text, const std::string& arch, const std::string& name);

// The part of a text that others have too.
std::string skeletons_of(const std::string& text);
// The number of each text's group: those of a group have the same skeletons and are at most `most`.
std::vector<size_t> groups_of(std::span<const std::string* const> texts, size_t most);
// Texts of the same skeletons as one, for those who compile many. What they share is there once;
// the rest of each is in a namespace of its own, whose name its kernels' names begin with.
std::string joined(std::span<const std::string> texts);
// Compiles them as one for the current context, where Source::load then finds them. Not kept on
// disk.
void load_joined(std::span<const std::string> texts);

struct LoadedKernel {
  Function function = nullptr;
  unsigned multiprocessors = 1;       // of the device it was loaded for
  unsigned shared_bytes = 48 * 1024;  // the most dynamic ones that a launch may ask for
  bool asked = false;                 // for all that the device has
};

// One kernel's text and what it became in each context that has run it.
class Source {
 public:
  // `name` says in messages what is compiled; `entry` is the kernel's name in the text.
  Source(std::string name, std::string text, std::string entry)
      : name_(std::move(name)), text_(std::move(text)), entry_(std::move(entry)) {}
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // Compiles on first use in a context; equal texts are compiled once. A function must be told
  // before it has more dynamic shared memory than every launch may have; it may get less.
  LoadedKernel load(const CurrentContext& context, unsigned shared_bytes = 0) const;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  [[nodiscard]] LoadedKernel compiled(const CurrentContext& context, uint64_t id,
                                      unsigned shared_bytes) const;

  // Spares the look-up by text, and launches a lock: what is in the list stays as it is.
  struct Seen {
    uint64_t context;
    LoadedKernel loaded;
    const Seen* before;
  };

  std::string name_, text_, entry_;
  mutable std::atomic<const Seen*> seen_{nullptr};
};

}  // namespace tenon::cuda
