// The executor's loops for avx2; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/loops_make.h"

namespace tenon::cpu {

const Loops& loops_avx2() {
  static const Loops kLoops = make_loops<2>("avx2", norms_avx2());
  return kLoops;
}

}  // namespace tenon::cpu
