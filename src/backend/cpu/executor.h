// The tile executor. It accepts every step without a product, on every CPU.
#pragma once

#include "step/backend.h"

namespace tenon::cpu {

Attempt make_executor(const Step& step, const Target& target);

}  // namespace tenon::cpu
