// Which table of loops this processor gets.
#include "backend/cpu/loops.h"

#include <cstdlib>

namespace tenon::cpu {

namespace {

const Loops& choose() {
#if defined(__x86_64__)
  const char* asked = std::getenv("TENON_ISA");
  const std::string_view most = asked ? asked : "avx512";
  // The names of the psABI levels are what the files were compiled for.
  if (most == "avx512" && __builtin_cpu_supports("x86-64-v4")) return loops_avx512();
  if ((most == "avx512" || most == "avx2") && __builtin_cpu_supports("x86-64-v3"))
    return loops_avx2();
#endif
  return loops_baseline();
}

}  // namespace

const Loops& loops() {
  static const Loops& kChosen = choose();
  return kChosen;
}

}  // namespace tenon::cpu
