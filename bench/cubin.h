// Reads the resources of a compiled kernel from its machine code. Needs no device.
#pragma once

#include <map>
#include <string>

namespace tenon::bench {

struct KernelUse {
  int registers = 0;
  int local_bytes = 0;  // stack per thread: spills and arrays
};

// By kernel name. Empty if the image is not machine code.
std::map<std::string, KernelUse> kernel_uses(const std::string& image);

}  // namespace tenon::bench
