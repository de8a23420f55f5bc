// The CPU's makers, best first.
#include "backend/cpu/makers.h"

#include "backend/cpu/executor.h"

namespace tenon::cpu {

const Backend& backend() {
  static constexpr Maker kMakers[] = {{"executor", make_executor}};
  static constexpr Backend kBackend{"cpu", Device::cpu, kMakers};
  return kBackend;
}

}  // namespace tenon::cpu
