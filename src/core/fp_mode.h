// IEEE arithmetic for a scope: round to nearest, no flush to zero, whatever mode the host has set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tenon {

class FpMode {
 public:
#if defined(__x86_64__)
  // Reads the mode first: writing it takes longer than the checks of many calls, even if it is
  // unchanged.
  FpMode() : saved_(_mm_getcsr()) {
    if ((saved_ | kFlags) != (kDefault | kFlags)) _mm_setcsr(kDefault);
  }
  ~FpMode() {
    if (_mm_getcsr() != saved_) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kDefault = 0x1f80, kFlags = 0x3f;  // all masked; sticky flags
  unsigned saved_;
#elif defined(__aarch64__)
  FpMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FpMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_ = 0;
#else
  FpMode() = default;
#endif

 public:
  FpMode(const FpMode&) = delete;
  FpMode& operator=(const FpMode&) = delete;
};

}  // namespace tenon
