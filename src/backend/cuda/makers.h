// The CUDA backend, and what it found on this machine.
#pragma once

#include <string>
#include <vector>

#include "step/backend.h"

namespace tenon::cuda {

const Backend& backend();

// The kernel that moves the state of random numbers on, beside a plan's own.
std::string draw_text();

// For `tenon doctor`; empty texts for what is not there.
struct Status {
  bool gpu = false;      // kernels can be compiled and run
  std::string device;    // "NVIDIA H200, sm_90a"
  std::string driver;    // the newest CUDA the driver knows: "13.0"
  std::string nvrtc;     // "13.0, /path/of/libnvrtc.so.13"
  std::string cublaslt;  // likewise, or why there is none: products then run without it
  std::string why;       // what is missing
};
Status status();

// The same as lines of text.
std::vector<std::string> doctor_lines();

}  // namespace tenon::cuda
