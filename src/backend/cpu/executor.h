// The tile executor: takes every map step, on any CPU.
#pragma once

#include "step/backend.h"

namespace tenon::cpu {

Attempt make_executor(const Step& step, const Target& target);

}  // namespace tenon::cpu
