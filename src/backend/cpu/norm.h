// Fused loops over whole rows, for norms whose inputs and outputs have one dtype.
#pragma once

#include "step/backend.h"

namespace tenon::cpu {

Attempt make_norm(const Step& step, const Target& target);

}  // namespace tenon::cpu
