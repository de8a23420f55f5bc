// The maker `decode`: products of encoded or mixed operands become products of plain ones.
#pragma once

#include "step/backend.h"

namespace tenon::cuda {

// Splits off a step that decodes one operand. All makers are then tried for the product.
Attempt make_decode(const Step& step, const Target& target);

}  // namespace tenon::cuda
