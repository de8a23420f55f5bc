// IEEE arithmetic for the time of a scope: round to nearest, no flush to zero, whatever the host
// set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tenon {

class FpMode {
 public:
#if defined(__x86_64__)
  FpMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // the power-on state: all masked
  ~FpMode() { _mm_setcsr(saved_); }

 private:
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
