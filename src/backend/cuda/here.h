// The current device as a target.
#pragma once

#include "step/target.h"

namespace tenon::cuda {

// Without a GPU the target that plans assume.
const Target& here();

}  // namespace tenon::cuda
