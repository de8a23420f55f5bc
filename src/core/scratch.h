// Memory for the time of a call, never shared with another one. A thread keeps some for its next.
#pragma once

#include <cstddef>

namespace tenon {

// What a thread keeps at most, in bytes: a large call must not hold memory after it has ended.
inline constexpr size_t kMostKeptScratch = size_t{16} << 20;

class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // 128-byte aligned, uninitialised; null if no bytes were asked for.
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

// What this thread keeps now.
size_t kept_scratch();

}  // namespace tenon
