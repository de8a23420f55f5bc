// The fused loops of norms for avx2; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/norm_make.h"

namespace tenon::cpu {

extern constexpr NormTable kNormsAvx2 = make_norms<struct Avx2>();

}  // namespace tenon::cpu
