// What the two file formats share; both are parsed from bytes in memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "cli/tensor_file.h"

namespace tenon::cli {

inline constexpr int64_t kMostBytes = int64_t{1} << 60;

TensorFile parse_npy(const std::string& file, std::string_view bytes);
TensorFile parse_safetensors(const std::string& file, std::string_view bytes);

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
