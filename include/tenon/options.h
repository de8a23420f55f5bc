// Options of a call: precision, device, and the layout of gated tensors.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

namespace tenon {

enum class Precision : uint8_t { native, strict };
enum class Rounding : uint8_t { once, eager };
enum class Device : uint8_t { cpu, cuda, null };

inline constexpr std::array<std::string_view, 2> kPrecisions{"native", "strict"};
inline constexpr std::array<std::string_view, 2> kRoundings{"once", "eager"};
inline constexpr std::array<std::string_view, 3> kDevices{"cpu", "cuda", "null"};

struct Options {
  Precision precision = Precision::native;
  Rounding rounding = Rounding::once;
  Device device = Device::cpu;
  void* stream = nullptr;  // a CUstream on cuda; views hold device pointers then
  // cuda: lends `bytes` bytes to a call, 64-byte aligned, for work in stream order. Null: the
  // memory comes from the memory pool of the device.
  void* (*allocate)(void* user, size_t bytes) = nullptr;
  void* user = nullptr;
};

// The positions of the activated half a and the linear half b in the 2H columns of a gated tensor.
struct Layout {
  enum class Kind : uint8_t { stacked, swapped, interleaved };
  Kind kind = Kind::stacked;
  int64_t k = 1;  // interleaved: k columns of a, then k of b, …

  static constexpr Layout stacked() { return {}; }
  static constexpr Layout swapped() { return {Kind::swapped, 1}; }
  static constexpr Layout interleaved(int64_t k) { return {Kind::interleaved, k}; }
  friend bool operator==(const Layout&, const Layout&) = default;
};

// Parses stacked, swapped or interleaved(k).
constexpr std::optional<Layout> layout_named(std::string_view name) {
  if (name == "stacked") return Layout::stacked();
  if (name == "swapped") return Layout::swapped();
  constexpr std::string_view kInterleaved = "interleaved(";
  if (!name.starts_with(kInterleaved) || !name.ends_with(")")) return std::nullopt;
  name.remove_prefix(kInterleaved.size());
  name.remove_suffix(1);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t k = 0;
  for (const char c : name) {
    if (c < '0' || c > '9' || k > (kMost - (c - '0')) / 10) return std::nullopt;
    k = k * 10 + (c - '0');
  }
  if (k < 1) return std::nullopt;
  return Layout::interleaved(k);
}

}  // namespace tenon

#endif
