// Memory for the duration of a call. Calls never use it at the same time. Some is kept for later
// calls.
#pragma once

#include <cstddef>

namespace tenon {

// The most bytes that a thread keeps.
inline constexpr size_t kMostKeptScratch = size_t{16} << 20;
// The largest block that all threads share. The system may take back the memory of shared blocks
// between calls.
inline constexpr size_t kMostSharedScratch = size_t{256} << 20;

class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // 128-byte aligned, uninitialised. Null if 0 bytes were requested.
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

// Bytes that this thread keeps now.
size_t kept_scratch();

}  // namespace tenon
