// The processor of this process as a target.
#pragma once

#include "step/target.h"

namespace tenon::cpu {

const Target& here();

}  // namespace tenon::cpu
