// The executor's loops for baseline; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/loops_make.h"

namespace tenon::cpu {

extern constexpr Loops kLoopsBaseline = make_loops<struct Baseline>();

}  // namespace tenon::cpu
