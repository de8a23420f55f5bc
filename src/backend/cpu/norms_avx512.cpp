// The fused loops of norms for avx512; see the flags of this file in CMakeLists.txt.
#include "backend/cpu/norm_make.h"

namespace tenon::cpu {

const NormTable& norms_avx512() {
  static constexpr NormTable kNorms = make_norms<3>();
  return kNorms;
}

}  // namespace tenon::cpu
