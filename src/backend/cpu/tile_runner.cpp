// Chooses between the JIT and the interpreter.
#include "backend/cpu/tile_runner.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tenon/error.h"

#ifdef TENON_JIT
#include "backend/cpu/jit/runner.h"
#endif

namespace tenon::cpu {

namespace {

// TENON_RUNNER=interpreter switches the JIT off.
bool interpret_only() {
  static const bool kOnly = [] {
    const char* asked = std::getenv("TENON_RUNNER");
    const std::string_view name = asked ? asked : "jit";
    if (name != "jit" && name != "interpreter")
      std::fprintf(stderr, "tenon: TENON_RUNNER=%s is ignored; give jit or interpreter\n", asked);
    return name == "interpreter";
  }();
  return kOnly;
}

}  // namespace

std::string jit_refusal(const Step& step, const Isa& isa, bool here) {
  if (!isa.jit) return str("the JIT needs AVX2, and this is ", isa.name);
  const size_t views = step.loads.size() + step.stores.size() + step.encoders.size();
  if (views > kMostCompiledViews)
    return str("the JIT takes ", kMostCompiledViews,
               " loads, stores and encoders, and this step has ", views);
  if (!here) return "";
  if (interpret_only()) return "TENON_RUNNER=interpreter";
#ifndef TENON_JIT
  return "this build has no JIT, because asmjit was not found";
#endif
  return "";
}

std::unique_ptr<const TileRunner> compiled([[maybe_unused]] const Step& step,
                                           [[maybe_unused]] const Isa& isa) {
#ifdef TENON_JIT
  return jit::runner(step, isa);
#else
  return nullptr;
#endif
}

std::unique_ptr<const TileRunner> tile_runner(const Step& step, const Isa& isa) {
  return jit_refusal(step, isa, true).empty() ? compiled(step, isa) : interpreter(step, *isa.loops);
}

}  // namespace tenon::cpu
