// Chooses the table of loops for this processor.
#include "backend/cpu/loops.h"

#include <cstdio>
#include <cstdlib>

namespace tenon::cpu {

namespace {

#if defined(__x86_64__)
// The features of -march=x86-64-v3 and -v4. clang 14 does not know these levels by name.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("popcnt");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

const Loops& choose() {
#if defined(__x86_64__)
  const char* asked = std::getenv("TENON_ISA");
  const std::string_view most = asked ? asked : "avx512";
  if (most == "baseline") return loops_baseline();
  if (most == "avx2" && has_avx2()) return loops_avx2();
  if (most != "avx2" && most != "avx512")
    std::fprintf(stderr, "tenon: TENON_ISA=%s is ignored; give baseline, avx2 or avx512\n", asked);
  if (has_avx512()) return loops_avx512();
  if (has_avx2()) return loops_avx2();
#endif
  return loops_baseline();
}

}  // namespace

const Loops& loops() {
  static const Loops& chosen = choose();
  return chosen;
}

}  // namespace tenon::cpu
