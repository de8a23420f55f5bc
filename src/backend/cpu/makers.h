// The CPU backend.
#pragma once

#include "step/backend.h"

namespace tenon::cpu {

const Backend& backend();

}  // namespace tenon::cpu
