// The makers of the CPU backend, best first.
#include "backend/cpu/makers.h"

#include <algorithm>
#include <cstdlib>

#include "backend/cpu/executor.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/here.h"
#include "backend/cpu/norm.h"
#include "core/philox.h"

namespace tenon::cpu {

namespace {

void draw(uint64_t* state, uint64_t* drawn, uint64_t count, void* /*stream*/) {
  std::copy_n(state, kRandomState, drawn);
  state[1] += count;
}

// Calls on the CPU lend their workspace.
void* take(size_t bytes, void* /*stream*/) { return std::aligned_alloc(kWorkspaceLine, bytes); }
void give(void* memory, void* /*stream*/) { std::free(memory); }

}  // namespace

const Backend& backend() {
  static constexpr Maker kMakers[] = {
      {"gemm", make_gemm}, {"norm", make_norm}, {"executor", make_executor}};
  static constexpr Backend kBackend{"cpu", Device::cpu, kMakers, here, take, give, draw};
  return kBackend;
}

}  // namespace tenon::cpu
