// Products of encoded or mixed operands as products of decoded ones.
#pragma once

#include "step/backend.h"

namespace tenon::cuda {

// Decodes one operand in a step of its own. The product is then a step for the makers before.
Attempt make_decode(const Step& step, const Target& target);

}  // namespace tenon::cuda
