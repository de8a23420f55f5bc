// Norms whose streams share a dtype, in fused loops over whole rows.
#pragma once

#include "step/backend.h"

namespace tenon::cpu {

Attempt make_norm(const Step& step, const Target& target);

}  // namespace tenon::cpu
