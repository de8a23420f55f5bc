// Chooses the kernels of products for this processor.
#include "backend/cpu/gemm_kernels.h"

#include <vector>

#include "backend/cpu/loops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace tenon::cpu {

namespace {

#if defined(__x86_64__)
// Older compilers do not know the feature names. avx512bf16: leaf 7.1, eax bit 5.
bool has_avx512bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return loops().isa == "avx512" && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1U) != 0;
}

// amx-tile and amx-bf16 (leaf 7, edx bits 24 and 22). The system must also permit the tile state.
bool has_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;
  constexpr int kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1U) != 0 &&
         (d >> 22 & 1U) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<const GemmKernel*> supported() {
  std::vector<const GemmKernel*> list{&gemm_baseline()};
#if defined(__x86_64__)
  if (loops().isa != "baseline") list.push_back(&gemm_avx2());
  if (loops().isa == "avx512") list.push_back(&gemm_avx512());
  if (has_avx512bf16()) list.push_back(&gemm_avx512bf16());
  if (has_amx()) list.push_back(&gemm_amx());
#endif
  return list;
}

}  // namespace

std::span<const GemmKernel* const> gemm_kernels() {
  static const auto& list = *new std::vector<const GemmKernel*>(supported());
  return list;
}

}  // namespace tenon::cpu
