// Shared code of all benchmarks: clocks, and memory with values of ordinary magnitude.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "bench/statistics.h"
#include "tenon/dtype.h"
#include "tenon/error.h"

namespace tenon::bench {

using Clock = std::chrono::steady_clock;

template <class F>
double seconds(const F& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Page-aligned host memory.
class Memory {
 public:
  explicit Memory(size_t bytes, std::string_view what = "tensors")
      : bytes_(bytes), all_(allocated(what, bytes)) {}
  [[nodiscard]] char* data() const {
    const auto address = reinterpret_cast<uintptr_t>(all_.get());
    return all_.get() + (kPage - address % kPage) % kPage;
  }
  [[nodiscard]] size_t size() const { return bytes_; }

 private:
  static constexpr size_t kPage = 4096;
  static char* allocated(std::string_view what, size_t bytes) {
    try {
      return new char[bytes + kPage];
    } catch (const std::bad_alloc&) {
      fail(Code::runtime, "bench: there is no memory for the ", what, ", ", bytes,
           " bytes; give fewer --rows or --cols");
    }
  }
  size_t bytes_;
  std::unique_ptr<char[]> all_;
};

// Encodes `elements` numbers from `next`. Zeros or constants would make branches too predictable.
template <class Next>
std::vector<char> codes_of(DType dtype, size_t elements, Next next) {
  const auto size = static_cast<size_t>(info(dtype).bytes);
  std::vector<char> codes(elements * size);
  for (size_t i = 0; i < elements; ++i) {
    const uint32_t code = encode(dtype, next());
    std::memcpy(codes.data() + i * size, &code, size);
  }
  return codes;
}

// N(0, 1) values, to be repeated. No shape divides the length of the piece.
inline std::vector<char> normal_piece(DType dtype, size_t most_elements) {
  constexpr size_t kElements = (1 << 20) + 4099;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  return codes_of(dtype, std::min(most_elements, kElements), [&] { return normal(random); });
}

inline std::vector<char> uniform_codes(DType dtype, int64_t elements, uint32_t seed,
                                       float most = 1) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-most, most);
  return codes_of(dtype, static_cast<size_t>(elements), [&] { return uniform(random); });
}

}  // namespace tenon::bench
