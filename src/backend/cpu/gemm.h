// Matrix products: operands are packed as fp32 or bf16 panels, and the body runs on tiles in cache.
#pragma once

#include "backend/cpu/isa.h"
#include "step/backend.h"

namespace tenon::cpu {

Attempt make_gemm(const Step& step, const Target& target);

// Upper bound for packed a and for packed b, in floats (128 MB), plus one block and one chunk.
inline constexpr int64_t kGroupFloats = 1 << 25;

// The same with a given kernel. The kernel must support the matrices of the step.
std::shared_ptr<const Kernel> gemm_with(const Step& step, const GemmKernel& kernel,
                                        int64_t group_floats = kGroupFloats,
                                        const Isa& isa = isa_here());

}  // namespace tenon::cpu
