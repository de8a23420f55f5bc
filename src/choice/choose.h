// The kernel of a step: the first maker of the device's backend that does not refuse.
#pragma once

#include <memory>
#include <string_view>

#include "step/backend.h"

namespace tenon {

struct Chosen {
  std::shared_ptr<const Kernel> kernel;
  std::string_view maker;
};

// Throws with every maker's reason if all refuse. Kernels are cached by the step's key.
Chosen kernel_for(const Step& step, Device device);

}  // namespace tenon
