// Shared code of the two file formats, and all limits on their headers.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "cli/tensor_file.h"

namespace tenon::cli {

inline constexpr int64_t kMostBytes = int64_t{1} << 60;        // of one tensor
inline constexpr size_t kMostDimensions = 64;                  // the limit of numpy
inline constexpr uint64_t kMostNpyHeader = uint64_t{1} << 20;  // bytes
inline constexpr uint64_t kMostHeader = 100'000'000;           // bytes; the limit of safetensors
inline constexpr size_t kMostTensors = size_t{1} << 20;        // in one file
inline constexpr size_t kMostDepth = 16;                       // of a header's JSON; 3 are needed

TensorFile parse_npy(const std::string& file, std::shared_ptr<const Bytes> bytes);
TensorFile parse_safetensors(const std::string& file, std::shared_ptr<const Bytes> bytes);

inline std::string read_text(const Bytes& bytes, uint64_t at, uint64_t size) {
  std::string text(size, '\0');
  bytes.read(at, std::as_writable_bytes(std::span(text)));
  return text;
}

// The number of elements of a shape. Throws if no file could hold them.
int64_t count_elements(const std::string& where, std::span<const int64_t> shape, int64_t size);

// Folds the leading dimensions to rows.
Shape fold(std::span<const int64_t> shape);

inline uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

}  // namespace tenon::cli
