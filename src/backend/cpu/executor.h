// The tile executor. It accepts every step without a product, on every CPU.
#pragma once

#include "step/backend.h"

namespace tenon::cpu {

// The same with bodies that are compiled at run time, where the target has that.
Attempt make_jit(const Step& step, const Target& target);
Attempt make_executor(const Step& step, const Target& target);

}  // namespace tenon::cpu
