// The fused loops of norms for avx2; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/norm_make.h"

namespace tenon::cpu {

const NormTable& norms_avx2() {
  static constexpr NormTable kNorms = make_norms<2>();
  return kNorms;
}

}  // namespace tenon::cpu
