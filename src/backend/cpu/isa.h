// The table of instruction sets: what each compiles, and which this processor has.
#pragma once

#include <span>
#include <string_view>

#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/loops.h"
#include "backend/cpu/norm_loops.h"
#include "step/backend.h"

namespace tenon::cpu {

// A row of another architecture has no tables. Its plans can be made but not run.
struct Isa {
  std::string_view name;
  bool fused_norms = false;  // true also where they are not compiled, for plans
  bool jit = false;          // bodies can be compiled at run time
  bool wide = false;         // vectors of 64 bytes and masks
  bool (*has)() = nullptr;   // called only if this processor has all earlier sets
  const Loops* loops = nullptr;
  const GemmKernel* fp32 = nullptr;  // all sets give the same bits
  const GemmKernel* bf16 = nullptr;  // uses bf16 instructions; null if there are none
  const NormTable* norms = nullptr;
};

// The set of a target.
const Isa& isa_of(const Target& target);

// The sets of this processor, smallest first. TENON_ISA names the last one to use.
std::span<const Isa> isas_here();
inline const Isa& isa_here() { return isas_here().back(); }

// A kernel for another processor. It can be described but not run.
std::shared_ptr<const Kernel> kernel_elsewhere(const Target& target);

}  // namespace tenon::cpu
