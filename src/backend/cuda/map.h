// The flat map on CUDA: element-wise steps with plain loads and tile stores.
#pragma once

#include <string>

#include "step/backend.h"

namespace tenon::cuda {

// The complete text of a step's kernel, which does not depend on any size.
std::string map_source(const Step& step);
inline constexpr const char* kMapKernel = "tenon_map_kernel";

Attempt make_map(const Step& step, const Target& target);

}  // namespace tenon::cuda
