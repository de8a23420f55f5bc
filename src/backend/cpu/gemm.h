// Products: panels decoded to fp32 or bf16, tiles in registers, the body on what is still in cache.
#pragma once

#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/loops.h"
#include "step/backend.h"

namespace tenon::cpu {

Attempt make_gemm(const Step& step, const Target& target);

// Floats of packed a, and of packed b, at most (but for one block and one chunk): 128 MB.
inline constexpr int64_t kGroupFloats = 1 << 25;

// The same with a kernel of one's choice, which must be able to take the step's matrices.
std::shared_ptr<const Kernel> gemm_with(const Step& step, const GemmKernel& kernel,
                                        int64_t group_floats = kGroupFloats,
                                        const Loops& table = loops());

}  // namespace tenon::cpu
