// The flat map on CUDA: element-wise steps with plain loads and tile stores.
#pragma once

#include <string>

#include "step/backend.h"

namespace tenon::cuda {

// The complete text of the kernel of a step. It does not depend on sizes.
std::string map_source(const Step& step);
inline constexpr const char* kMapKernel = "tenon_map_kernel";

Attempt make_map(const Step& step, const Target& target);

}  // namespace tenon::cuda
