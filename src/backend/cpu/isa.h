// The loops and the kernels of products that an instruction set has, be it here or not.
#pragma once

#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/loops.h"
#include "step/target.h"

namespace tenon::cpu {

const Loops& loops_for(Isa isa);
// The same bits from each.
const GemmKernel& gemm_fp32(Isa isa);
// Its unit for bf16 numbers, if it has one.
const GemmKernel* gemm_bf16(Isa isa);

// The set of this processor, or a lesser one that TENON_ISA asks for.
Isa isa_here();

}  // namespace tenon::cpu
