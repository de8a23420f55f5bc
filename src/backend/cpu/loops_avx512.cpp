// The executor's loops for avx512; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/loops_make.h"

namespace tenon::cpu {

const Loops& loops_avx512() {
  static const Loops kLoops = make_loops<3>("avx512", norms_avx512());
  return kLoops;
}

}  // namespace tenon::cpu
