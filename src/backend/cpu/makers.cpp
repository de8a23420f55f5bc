// The CPU's makers, best first.
#include "backend/cpu/makers.h"

#include "backend/cpu/executor.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/norm.h"

namespace tenon::cpu {

const Backend& backend() {
  static constexpr Maker kMakers[] = {
      {"gemm", make_gemm}, {"norm", make_norm}, {"executor", make_executor}};
  static constexpr Backend kBackend{"cpu", Device::cpu, kMakers};
  return kBackend;
}

}  // namespace tenon::cpu
