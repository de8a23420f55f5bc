// The null backend: accepts every step and runs nothing, for planning without hardware.
#pragma once

#include "step/backend.h"

namespace tenon::null {

const Backend& backend();

}  // namespace tenon::null
