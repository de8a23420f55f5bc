// The backends of this build.
#pragma once

#include <span>

#include "step/backend.h"

namespace tenon {

std::span<const Backend* const> backends();
const Backend& backend_for(Device device);

}  // namespace tenon
