// The executor's loops for avx2; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/loops_make.h"
#include "backend/cpu/norm_make.h"

namespace tenon::cpu {

const Loops& loops_avx2() {
  static constexpr Loops kLoops = make_loops<2>("avx2", make_norms<2>());
  return kLoops;
}

}  // namespace tenon::cpu
