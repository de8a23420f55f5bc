// The machine for which kernels are made, as data. A plan for any target can be made on any
// machine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tenon/format.h"
#include "tenon/options.h"

namespace tenon {

// Targets live as long as the process. Caches identify a target by its address.
struct Target {
  std::string name;
  Device device = Device::cpu;
  std::string_view isa = {};  // cpu: a row of backend/cpu/isa.cpp
  int sm = 0;                 // cuda: 90
  bool sm_features = false;   // cuda: architecture-specific features, as in sm_90a
  int processors = 1;         // threads (cpu) or multiprocessors (cuda)
  int64_t cache_bytes = 0;    // the last level that all processors share
  int64_t shared_bytes = 0;   // cuda: maximum per block
  int driver = 0;             // cuda: 13000 is CUDA 13.0
  int nvrtc = 0;              // 1300 is 13.0; 0: not available
  int cublaslt = 0;           // 130100 is 13.1.0; 0: not available
  double bytes_per_second = 0, flops_per_second = 0;  // bf16 peaks; 0: unknown
  // Whether a library multiplies FP8 codes, and whether both operands then need their inner
  // dimension contiguous.
  [[nodiscard]] bool fp8_products() const { return cublaslt > 0 && sm >= 89; }
  [[nodiscard]] bool fp8_inner_contiguous() const { return fp8_products() && sm / 10 != 10; }
  // Whether a library multiplies MXFP8 codes. Their scales are then in the order of the tensor
  // cores.
  [[nodiscard]] bool mxfp8_products() const {
    constexpr int kFirst = 120800;  // the first cuBLASLt with scales of 1x32
    return cublaslt >= kFirst && sm / 10 == 10;
  }
  // Why no library multiplies codes of `a` by codes of `b`. Empty: one does.
  [[nodiscard]] std::string codes_refusal(const Format& a, const Format& b) const;
  // Whether transposed codes are decoded as quickly as others.
  [[nodiscard]] bool reads_transposed_codes() const { return device != Device::cuda; }
  bool tunes = false;  // the library's algorithms are timed, so they differ between processes
  bool here = false;   // this process runs on it; kernels for others are only described
};

// A row of the table of targets. An unknown name is an error that lists all names.
const Target& named_target(std::string_view name);
// True if the table has the name.
bool is_target(std::string_view name);

}  // namespace tenon
