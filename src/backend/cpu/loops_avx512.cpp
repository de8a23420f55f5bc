// The executor's loops for avx512; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/loops_make.h"

namespace tenon::cpu {

extern constexpr Loops kLoopsAvx512 = make_loops<struct Avx512>();

}  // namespace tenon::cpu
