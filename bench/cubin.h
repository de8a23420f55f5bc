// What a compiled kernel takes, read from its machine code: no device is needed.
#pragma once

#include <map>
#include <string>

namespace tenon::bench {

struct KernelUse {
  int registers = 0;
  int local_bytes = 0;  // the stack of a thread: spills and arrays
};

// By the names of the kernels; empty where the image is no machine code.
std::map<std::string, KernelUse> kernel_uses(const std::string& image);

}  // namespace tenon::bench
