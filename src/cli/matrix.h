// A matrix between guard bytes, on the host and, for CUDA, on the device.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "backend/cuda/driver.h"
#include "cli/cases.h"
#include "tenon/view.h"

namespace tenon::cli {

// Device memory that goes from one matrix to the next: allocating waits for the device.
class DeviceMemory {
 public:
  struct GiveBack {
    void operator()(cuda::DeviceBuffer* b) const { free_of(b->size()).emplace_back(b); }
  };
  using Pointer = std::unique_ptr<cuda::DeviceBuffer, GiveBack>;

  static Pointer take(size_t bytes) {
    auto& list = free_of(bytes);
    if (list.empty()) return Pointer(new cuda::DeviceBuffer(bytes));
    Pointer taken(list.back().release());
    list.pop_back();
    return taken;
  }

 private:
  static std::vector<std::unique_ptr<cuda::DeviceBuffer>>& free_of(size_t bytes) {
    thread_local std::map<size_t, std::vector<std::unique_ptr<cuda::DeviceBuffer>>> free;
    return free[bytes];
  }
};

class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t cols, const ShapeCase& shape, bool device) {
    const int64_t stride = cols + shape.pad;
    const size_t offset = 64 + static_cast<size_t>(shape.shift);
    const size_t size = offset + static_cast<size_t>(rows * stride * info(dtype).bytes) + 64;
    bytes.assign(device ? std::bit_ceil(size) : size, kPoison);
    view = matrix(bytes.data() + offset, dtype, rows, cols, stride);
    if (device) buffer = DeviceMemory::take(bytes.size());
  }

  void set(int64_t r, int64_t c, float value) {
    const uint32_t code = encode(view.dtype, value);
    std::memcpy(element(view, r, c), &code, static_cast<size_t>(info(view.dtype).bytes));
  }

  // The view that the call gets.
  [[nodiscard]] View placed() const {
    View v = view;
    if (buffer) v.data = static_cast<char*>(buffer->data()) + offset();
    return v;
  }
  void upload() const {
    if (buffer) buffer->from_host(bytes.data());
  }
  void download() {
    if (buffer) buffer->to_host(bytes.data());
  }

  // Whether `v` lies in this matrix; then the same place in `copy`.
  [[nodiscard]] std::optional<View> translated(const View& v, std::vector<uint8_t>& copy) const {
    const char* base = buffer ? static_cast<const char*>(buffer->data())
                              : reinterpret_cast<const char*>(bytes.data());
    const auto* data = static_cast<const char*>(v.data);
    if (data < base || data >= base + bytes.size()) return std::nullopt;
    View result = v;
    result.data = copy.data() + (data - base);
    return result;
  }

  static void* element(const View& v, int64_t r, int64_t c) {
    return static_cast<char*>(v.data) + (r * v.stride + c) * info(v.dtype).bytes;
  }
  [[nodiscard]] size_t offset() const {
    return static_cast<size_t>(static_cast<const uint8_t*>(view.data) - bytes.data());
  }

  // True if the bytes around the elements still hold what they held.
  [[nodiscard]] bool guards_hold() const {
    std::vector<uint8_t> copy = bytes;
    const View inner = [&] {
      View v = view;
      v.data = copy.data() + offset();
      return v;
    }();
    for (int64_t r = 0; r < view.rows; ++r)
      std::memset(element(inner, r, 0), kPoison,
                  static_cast<size_t>(view.cols * info(view.dtype).bytes));
    return std::ranges::all_of(copy, [](uint8_t b) { return b == kPoison; });
  }

  static constexpr uint8_t kPoison = 0xA5;

  std::vector<uint8_t> bytes;
  View view;
  DeviceMemory::Pointer buffer;
};

}  // namespace tenon::cli
