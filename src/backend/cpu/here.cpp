// Instruction set, processors and caches of this machine.
#include "backend/cpu/here.h"

#include <unistd.h>

#include <algorithm>

#include "backend/cpu/isa.h"
#include "backend/cpu/processors.h"

namespace tenon::cpu {

namespace {

Target make() {
  Target t;
  t.here = true;
  t.isa = isa_here().name;
  t.name = t.isa;
  t.processors = processors();
#if defined(_SC_LEVEL3_CACHE_SIZE)
  t.cache_bytes = std::max<int64_t>(0, sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
  return t;
}

}  // namespace

const Target& here() {
  static const Target& kHere = *new Target(make());
  return kHere;
}

}  // namespace tenon::cpu
