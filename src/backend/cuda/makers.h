// The CUDA backend, and the state of CUDA on this machine.
#pragma once

#include <string>
#include <vector>

#include "step/backend.h"

namespace tenon::cuda {

const Backend& backend();

// The kernel that advances the state of random numbers. It is separate from the kernels of a plan.
std::string draw_text();

// For `tenon doctor`. Texts of missing parts are empty.
struct Status {
  bool gpu = false;      // kernels can be compiled and run
  std::string device;    // "NVIDIA H200, sm_90a"
  std::string driver;    // the newest CUDA the driver knows: "13.0"
  std::string nvrtc;     // "13.0, /path/of/libnvrtc.so.13"
  std::string cublaslt;  // version, or why it is missing; products then run without it
  std::string why;       // what is missing
};
Status status();

// The status as lines of text.
std::vector<std::string> doctor_lines();

}  // namespace tenon::cuda
