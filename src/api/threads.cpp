// Sets and reads the number of CPU threads.
#include "backend/cpu/pool.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

void set_threads(int count) {
  require(count >= 0 && count <= cpu::kMaxThreads, "set_threads: ", count, " threads; give 1 to ",
          cpu::kMaxThreads, ", or 0 for the default");
  cpu::set_threads(count);
}
int threads() { return cpu::threads(); }

void set_parallel_for(ParallelFor replacement) { cpu::set_parallel_for(std::move(replacement)); }

}  // namespace tenon
