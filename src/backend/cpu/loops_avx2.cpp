// The executor's loops for avx2; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/loops_make.h"

namespace tenon::cpu {

extern constexpr Loops kLoopsAvx2 = make_loops<struct Avx2>();

}  // namespace tenon::cpu
