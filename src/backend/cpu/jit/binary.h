// Executable memory of one function. It is never writable and executable at once.
#pragma once

#include <asmjit/core.h>

#include <cstddef>
#include <cstdint>

namespace tenon::cpu::jit {

class Binary {
 public:
  // Copies the code to memory of its own.
  explicit Binary(asmjit::CodeHolder& code);
  ~Binary();
  Binary(const Binary&) = delete;
  Binary& operator=(const Binary&) = delete;

  // A list of words: rows, columns, then an address and a step for each input and output.
  using Function = void (*)(const int64_t* frame);
  [[nodiscard]] Function function() const { return reinterpret_cast<Function>(memory_); }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tenon::cpu::jit
