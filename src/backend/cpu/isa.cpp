// One line a set and kind.
#include "backend/cpu/isa.h"

#include <algorithm>
#include <cstdlib>

#include "tenon/error.h"

namespace tenon::cpu {

const Loops& loops_for([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return loops_avx512();
  if (isa >= Isa::avx2) return loops_avx2();
#endif
  return loops_baseline();
}

const GemmKernel& gemm_fp32([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return gemm_avx512();
  if (isa >= Isa::avx2) return gemm_avx2();
#endif
  return gemm_baseline();
}

const GemmKernel* gemm_bf16([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::amx) return &gemm_amx();
  if (isa >= Isa::avx512bf16) return &gemm_avx512bf16();
#endif
  return nullptr;
}

namespace {

class Elsewhere final : public Kernel {
 public:
  explicit Elsewhere(const Target& target) : target_(target) {}
  void run(const RunArgs& /*args*/) const override {
    fail(Code::unsupported, "cpu: a kernel for ", target_.name, " does not run on this processor");
  }

 private:
  const Target& target_;
};

}  // namespace

std::shared_ptr<const Kernel> kernel_elsewhere(const Target& target) {
  return std::make_shared<const Elsewhere>(target);
}

Isa isa_here() {
  const auto found = static_cast<Isa>(std::ranges::find(kIsas, loops().isa) - kIsas.begin());
  // The tables of bf16 units are AVX-512 code.
  if (std::getenv("TENON_ISA") || found < Isa::avx512) return found;
  for (const Isa isa : {Isa::amx, Isa::avx512bf16})
    if (std::ranges::find(gemm_kernels(), gemm_bf16(isa)) != gemm_kernels().end()) return isa;
  return found;
}

}  // namespace tenon::cpu
