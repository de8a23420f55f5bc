// The machine that kernels are made for, as data: a plan for any can be made anywhere.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tenon/options.h"

namespace tenon {

// Each has all that those before it have.
enum class Isa : uint8_t { baseline, avx2, avx512, avx512bf16, amx };
inline constexpr std::array<std::string_view, 5> kIsas{"baseline", "avx2", "avx512", "avx512bf16",
                                                       "amx"};

// Targets live as long as the process, and their address is their identity in caches.
struct Target {
  std::string name;
  Device device = Device::cpu;
  Isa isa = Isa::baseline;   // cpu
  int sm = 0;                // cuda: 90
  bool sm_features = false;  // cuda: those of one architecture alone, as in sm_90a
  int processors = 1;        // threads, or multiprocessors
  int64_t cache_bytes = 0;   // the last level that all of them share
  int64_t shared_bytes = 0;  // cuda: the most that a block may have
  int driver = 0;            // cuda: 13000 is CUDA 13.0
  int nvrtc = 0;             // 1300 is 13.0; 0: there is none
  int cublaslt = 0;          // 130100 is 13.1.0; 0: there is none
  double bytes_per_second = 0, flops_per_second = 0;  // the peaks, bf16; 0: not known
  bool here = false;  // this process runs on it; kernels for others are only described
};

// A row of the table of targets; an unknown name is an error that lists them.
const Target& named_target(std::string_view name);
// Whether the table has it.
bool is_target(std::string_view name);

}  // namespace tenon
