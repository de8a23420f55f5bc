// What the two file formats share, and every limit on their headers.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "cli/tensor_file.h"

namespace tenon::cli {

inline constexpr int64_t kMostBytes = int64_t{1} << 60;        // of one tensor
inline constexpr size_t kMostDimensions = 64;                  // numpy's own limit
inline constexpr uint64_t kMostNpyHeader = uint64_t{1} << 20;  // bytes
inline constexpr uint64_t kMostHeader = 100'000'000;           // bytes; safetensors' own limit
inline constexpr size_t kMostTensors = size_t{1} << 20;        // of one file
inline constexpr size_t kMostDepth = 16;                       // of a header's JSON; 3 are needed

TensorFile parse_npy(const std::string& file, std::shared_ptr<const Bytes> bytes);
TensorFile parse_safetensors(const std::string& file, std::shared_ptr<const Bytes> bytes);

inline std::string read_text(const Bytes& bytes, uint64_t at, uint64_t size) {
  std::string text(size, '\0');
  bytes.read(at, std::as_writable_bytes(std::span(text)));
  return text;
}

// How many elements a shape holds; refuses what no file could hold.
int64_t count_elements(const std::string& where, std::span<const int64_t> shape, int64_t size);

// Leading dimensions as rows.
Shape fold(std::span<const int64_t> shape);

inline uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

}  // namespace tenon::cli
