// One row per instruction set. The flags of its files are in CMakeLists.txt.
#include "backend/cpu/isa.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstdio>
#include <cstdlib>

#include "tenon/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define TENON_X86(...) __VA_ARGS__
#else
#define TENON_X86(...)
#endif

namespace tenon::cpu {

extern const Loops kLoopsBaseline, kLoopsAvx2, kLoopsAvx512;
extern const NormTable kNormsAvx2, kNormsAvx512;
extern const GemmKernel kGemmBaseline, kGemmAvx2, kGemmAvx512, kGemmAvx512Bf16, kGemmAmx;

namespace {

#if defined(__x86_64__)
// The features of -march=x86-64-v3 and -v4. clang 14 does not know these levels by name.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("popcnt");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
// Older compilers do not know the feature names. avx512bf16: leaf 7.1, eax bit 5.
bool has_avx512bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1U) != 0;
}
// amx-tile and amx-bf16 (leaf 7, edx bits 24 and 22). The system must also permit the tile state.
bool has_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;
  constexpr int kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1U) != 0 && (d >> 22 & 1U) != 0 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Each set includes all sets before it.
constexpr std::array kIsas{
    Isa{"baseline", false, false, false, [] { return true; }, &kLoopsBaseline, &kGemmBaseline},
    Isa{"avx2", true, true, false,
        TENON_X86(has_avx2, &kLoopsAvx2, &kGemmAvx2, nullptr, &kNormsAvx2)},
    Isa{"avx512", true, true, true,
        TENON_X86(has_avx512, &kLoopsAvx512, &kGemmAvx512, nullptr, &kNormsAvx512)},
    Isa{"avx512bf16", true, true, true,
        TENON_X86(has_avx512bf16, &kLoopsAvx512, &kGemmAvx512, &kGemmAvx512Bf16, &kNormsAvx512)},
    Isa{"amx", true, true, true,
        TENON_X86(has_amx, &kLoopsAvx512, &kGemmAvx512, &kGemmAmx, &kNormsAvx512)},
};

size_t limit() {
  const char* asked = std::getenv("TENON_ISA");
  if (!asked) return kIsas.size();
  const auto at = std::ranges::find(kIsas, asked, &Isa::name);
  if (at != kIsas.end()) return static_cast<size_t>(at - kIsas.begin()) + 1;
  std::string names;
  for (const Isa& i : kIsas) names += str(names.empty() ? "" : ", ", i.name);
  std::fprintf(stderr, "tenon: TENON_ISA=%s is ignored; give one of %s\n", asked, names.c_str());
  return kIsas.size();
}

size_t count() {
  size_t n = 1;
  for (const size_t most = limit(); n < most && kIsas[n].has && kIsas[n].has();) ++n;
  return n;
}

class Elsewhere final : public Kernel {
 public:
  explicit Elsewhere(const Target& target) : target_(target) {}
  void run(const RunArgs& /*args*/) const override {
    fail(Code::unsupported, "cpu: a kernel for ", target_.name, " does not run on this processor");
  }

 private:
  const Target& target_;
};

}  // namespace

const Isa& isa_of(const Target& target) {
  const auto at = std::ranges::find(kIsas, target.isa, &Isa::name);
  assert(at != kIsas.end());
  return *at;
}

std::span<const Isa> isas_here() {
  static const size_t kCount = count();
  return std::span(kIsas).first(kCount);
}

std::shared_ptr<const Kernel> kernel_elsewhere(const Target& target) {
  return std::make_shared<const Elsewhere>(target);
}

}  // namespace tenon::cpu
