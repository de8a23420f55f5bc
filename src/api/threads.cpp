// The CPU's threads, as hosts set them.
#include "backend/cpu/pool.h"
#include "tenon/tenon.hpp"

namespace tenon {

void set_threads(int count) { cpu::set_threads(count); }
int threads() { return cpu::threads(); }

void set_parallel_for(ParallelFor replacement) { cpu::set_parallel_for(std::move(replacement)); }

}  // namespace tenon
