// The registry of CPU makers.
#include "backend/cpu/makers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "backend/cpu/here.h"
#include "core/philox.h"

// One line per maker, best first.
#define TENON_MAKERS       \
  MAKER("gemm", make_gemm) \
  MAKER("norm", make_norm) \
  MAKER("jit", make_jit)   \
  MAKER("executor", make_executor)

namespace tenon::cpu {

#define MAKER(name, make) Attempt make(const Step& step, const Target& target);
TENON_MAKERS
#undef MAKER

namespace {

void draw(uint64_t* state, uint64_t* drawn, uint64_t count, void* /*stream*/) {
  std::copy_n(state, kRandomState, drawn);
  state[1] += count;
}

// Rarely used: the runtime gives CPU calls a workspace.
void* take(size_t bytes, void* /*stream*/) { return std::aligned_alloc(kWorkspaceLine, bytes); }
void give(void* memory, void* /*stream*/) { std::free(memory); }
void fill(void* memory, size_t bytes, void* /*stream*/) { std::memset(memory, 0, bytes); }

}  // namespace

const Backend& backend() {
#define MAKER(name, make) {name, make},
  static constexpr Maker kMakers[] = {TENON_MAKERS};
#undef MAKER
  static constexpr Backend kBackend{"cpu", Device::cpu, kMakers, here, take, give, fill, draw};
  return kBackend;
}

}  // namespace tenon::cpu
