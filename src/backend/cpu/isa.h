// The loops and the kernels of products of an instruction set. To ask for those of a set that this
// processor lacks may already execute its instructions.
#pragma once

#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/loops.h"
#include "step/backend.h"

namespace tenon::cpu {

const Loops& loops_for(Isa isa);
// The same bits from each.
const GemmKernel& gemm_fp32(Isa isa);
// Its unit for bf16 numbers, if it has one.
const GemmKernel* gemm_bf16(Isa isa);

// A kernel for a processor that is not this one: it is described, and does not run.
std::shared_ptr<const Kernel> kernel_elsewhere(const Target& target);

// The set of this processor, or a lesser one that TENON_ISA asks for.
Isa isa_here();

}  // namespace tenon::cpu
