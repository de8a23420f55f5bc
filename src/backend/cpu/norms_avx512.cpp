// The fused loops of norms for avx512; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/norm_make.h"

namespace tenon::cpu {

extern constexpr NormTable kNormsAvx512 = make_norms<struct Avx512>();

}  // namespace tenon::cpu
