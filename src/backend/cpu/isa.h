// The table of instruction sets: what each compiles, and which this processor has.
#pragma once

#include <span>
#include <string_view>

#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/loops.h"
#include "backend/cpu/norm_loops.h"
#include "step/backend.h"

namespace tenon::cpu {

// Rows of another architecture have no tables. Plans for them can be made, not run.
struct Isa {
  std::string_view name;
  bool fused_norms = false;  // `norms` is set where the set is compiled
  bool (*has)() = nullptr;   // asked only if this processor has all sets before it
  const Loops* loops = nullptr;
  const GemmKernel* fp32 = nullptr;  // the same bits from each set
  const GemmKernel* bf16 = nullptr;  // its unit for bf16 values, if it has one
  const NormTable* norms = nullptr;
};

// The set of a target.
const Isa& isa_of(const Target& target);

// The sets of this processor, least first. TENON_ISA is the name of the last one to use.
std::span<const Isa> isas_here();
inline const Isa& isa_here() { return isas_here().back(); }

// A kernel for a processor that is not this one: it is described, and does not run.
std::shared_ptr<const Kernel> kernel_elsewhere(const Target& target);

}  // namespace tenon::cpu
