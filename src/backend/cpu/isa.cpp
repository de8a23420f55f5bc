// One line a set and kind.
#include "backend/cpu/isa.h"

#include <algorithm>
#include <cstdlib>

namespace tenon::cpu {

namespace {

const GemmKernel* bf16_of([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::amx) return &gemm_amx();
  if (isa >= Isa::avx512bf16) return &gemm_avx512bf16();
#endif
  return nullptr;
}

// Code of a set that this processor lacks must not even be entered to make its tables. Kernels for
// another machine are described and never run, so the nearest set serves.
[[maybe_unused]] Isa here_at_most(Isa isa) { return std::min(isa, isa_here()); }

}  // namespace

const Loops& loops_for([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (here_at_most(isa) >= Isa::avx512) return loops_avx512();
  if (here_at_most(isa) >= Isa::avx2) return loops_avx2();
#endif
  return loops_baseline();
}

const GemmKernel& gemm_fp32([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (here_at_most(isa) >= Isa::avx512) return gemm_avx512();
  if (here_at_most(isa) >= Isa::avx2) return gemm_avx2();
#endif
  return gemm_baseline();
}

const GemmKernel* gemm_bf16(Isa isa) { return bf16_of(here_at_most(isa)); }

Isa isa_here() {
  const auto has = [](Isa isa) {
    return std::ranges::find(gemm_kernels(), bf16_of(isa)) != gemm_kernels().end();
  };
  if (!std::getenv("TENON_ISA"))
    for (const Isa isa : {Isa::amx, Isa::avx512bf16})
      if (has(isa)) return isa;
  return static_cast<Isa>(std::ranges::find(kIsas, loops().isa) - kIsas.begin());
}

}  // namespace tenon::cpu
