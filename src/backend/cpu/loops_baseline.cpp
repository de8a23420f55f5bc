// The executor's loops for baseline; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/loops_make.h"

namespace tenon::cpu {

const Loops& loops_baseline() {
  static constexpr Loops kLoops = make_loops<1>("baseline");
  return kLoops;
}

}  // namespace tenon::cpu
