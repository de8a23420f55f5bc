// NVRTC: compiles CUDA text in the process. The library is opened on first use.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tenon::cuda {

// Why compiling is impossible. Empty if it is possible.
std::optional<std::string> why_no_nvrtc();

std::string nvrtc_path();  // path of the library
std::string nvrtc_version();
// Identifies everything except text and architecture that affects the result of compile().
std::string compiler_identity();  // "13.0"

inline constexpr int kOldestArch = 80;  // first with bf16 instructions

struct Compiled {
  std::string image;
  bool is_ptx = false;  // PTX, which the driver compiles; else machine code
  std::string log;      // warnings
};

// A text with this line compiles faster, to slower code.
inline constexpr std::string_view kCompileFast = "// compile fast\n";

// Compiles for an architecture such as "sm_80" or "sm_90a". If this NVRTC does not know it, the
// result is the newest PTX that runs on it.
Compiled compile(const std::string& source, const std::string& arch);
// The number of compilations of this process.
size_t compilations();

}  // namespace tenon::cuda
