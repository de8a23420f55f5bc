// NVRTC: CUDA text to machine code in the process, the compiler opened on first use.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tenon::cuda {

// Why nothing can be compiled here, or nothing if it can.
std::optional<std::string> why_no_nvrtc();

std::string nvrtc_path();  // the file in use
std::string nvrtc_version();
// All but the text and the architecture that decides what compile() makes.
std::string compiler_identity();  // "13.0"

inline constexpr int kOldestArch = 80;  // bf16 instructions

struct Compiled {
  std::string image;
  bool is_ptx = false;  // text that the driver still compiles, else machine code
  std::string log;      // warnings
};

// A text with this line is compiled in less time, to slower code.
inline constexpr std::string_view kCompileFast = "// compile fast\n";

// For an architecture by name: "sm_80", "sm_90a". One that this NVRTC does not know yet gets the
// newest PTX that runs on it.
Compiled compile(const std::string& source, const std::string& arch);
// How many texts this process has had compiled.
size_t compilations();

}  // namespace tenon::cuda
