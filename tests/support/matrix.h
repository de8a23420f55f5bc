// A matrix with guard bytes, on the host and, for CUDA, on the device.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/cuda/driver.h"
#include "support/cases.h"
#include "tenon/view.h"

namespace tenon::support {

// Device memory and its host copy. Matrices reuse them, because allocation synchronises with the
// device.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : device(bytes), host(bytes) {}

  struct GiveBack {
    void operator()(DeviceMemory* m) const { free_of(m->device.size()).emplace_back(m); }
  };
  using Pointer = std::unique_ptr<DeviceMemory, GiveBack>;

  static Pointer take(size_t bytes) {
    auto& list = free_of(bytes);
    if (list.empty()) return Pointer(new DeviceMemory(bytes));
    Pointer taken(list.back().release());
    list.pop_back();
    return taken;
  }

  // The stream of the matrices and calls of a thread, so that threads do not wait for each other.
  static const cuda::OwnStream& stream() {
    thread_local const cuda::OwnStream own;
    return own;
  }

  cuda::DeviceBuffer device;
  cuda::PinnedBuffer host;

 private:
  static std::vector<std::unique_ptr<DeviceMemory>>& free_of(size_t bytes) {
    thread_local std::map<size_t, std::vector<std::unique_ptr<DeviceMemory>>> free;
    return free[bytes];
  }
};

class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t cols, const ShapeCase& shape, bool device) {
    const int64_t stride = cols + shape.pad;
    const size_t offset = 64 + static_cast<size_t>(shape.shift);
    const size_t size = offset + static_cast<size_t>(rows * stride * info(dtype).bytes) + 64;
    if (device) {
      const size_t all = std::bit_ceil(size);
      memory = DeviceMemory::take(all);
      bytes = {static_cast<uint8_t*>(memory->host.data()), all};
    } else {
      own.resize(size);
      bytes = own;
    }
    std::ranges::fill(bytes, kPoison);
    view = matrix(bytes.data() + offset, dtype, rows, cols, stride);
  }

  void set(int64_t r, int64_t c, float value) {
    const uint32_t code = encode(view.dtype, value);
    std::memcpy(element(view, r, c), &code, static_cast<size_t>(info(view.dtype).bytes));
  }

  // The view for the call.
  [[nodiscard]] View placed() const {
    View v = view;
    if (memory) v.data = static_cast<char*>(memory->device.data()) + offset();
    return v;
  }
  // Ordered by the stream of the thread.
  void upload() const {
    if (memory) memory->device.from_host(memory->host, DeviceMemory::stream());
  }
  void download() const {
    if (memory) memory->device.to_host(memory->host, DeviceMemory::stream());
  }

  // If `v` is inside of this matrix, the same place in `copy`.
  [[nodiscard]] std::optional<View> translated(const View& v, std::vector<uint8_t>& copy) const {
    const char* base = memory ? static_cast<const char*>(memory->device.data())
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

  // Whether the bytes around the elements are unchanged.
  [[nodiscard]] bool guards_hold() const {
    std::vector<uint8_t> copy(bytes.begin(), bytes.end());
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

  std::span<uint8_t> bytes;
  View view;

 private:
  std::vector<uint8_t> own;  // used without a device
  DeviceMemory::Pointer memory;
};

}  // namespace tenon::support
