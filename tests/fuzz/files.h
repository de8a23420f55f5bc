// Common code of the fuzzers of tensor files: reads a file tile by tile, or gets an Error.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/tensor_file.h"
#include "tenon/error.h"

namespace tenon::test {

inline void check_file(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz of a file: %s\n", what);
  std::abort();
}

// The elements of a tensor as codes of its own width. f64 is rounded to f32.
inline std::string read_tiles(const cli::FileTensor& t, int64_t tile_rows, int64_t tile_cols) {
  std::string all;
  std::vector<float> buffer;
  const auto [rows, cols] = t.matrix;
  for (int64_t r = 0; r < rows; r += tile_rows)
    for (int64_t c = 0; c < cols; c += tile_cols) {
      const cli::Tile tile{r, std::min(tile_rows, rows - r), c, std::min(tile_cols, cols - c)};
      const View v = t.tile(tile, buffer);
      check_file(v.rows == tile.rows && v.cols == tile.cols, "a tile of another size");
      const int64_t size = info(v.dtype).bytes;
      all.resize(static_cast<size_t>(rows * cols * size));
      for (int64_t i = 0; i < v.rows; ++i)
        std::memcpy(all.data() + ((r + i) * cols + c) * size,
                    static_cast<const char*>(v.data) + i * v.stride * size,
                    static_cast<size_t>(v.cols * size));
    }
  return all;
}

// The contents of the file, or nothing if it is rejected. Only tenon::Error may leave the reader.
inline std::optional<cli::TensorFile> read_file(const std::string& name, std::string_view bytes) {
  try {
    return cli::parse_tensor_file(name, std::as_bytes(std::span(bytes)));
  } catch (const Error& e) {
    check_file(e.code() == Code::invalid_argument, "another code than invalid_argument");
    const std::string_view message = e.what();
    check_file(message.starts_with(name), "a message without the file's name");
    check_file(message.size() < 1000, "a message of 1000 bytes");
    return std::nullopt;
  }
}

inline bool is_small(const cli::FileTensor& t) { return t.elements() <= 4096 && t.matrix.cols > 0; }

// Reads all tensors with two tile sizes and compares the results.
inline bool through_file(const std::string& name, std::string_view bytes) {
  const std::optional<cli::TensorFile> file = read_file(name, bytes);
  if (!file) return false;
  for (const cli::FileTensor& t : file->tensors) {
    int64_t elements = 1;
    for (const int64_t n : t.shape) elements = n == 0 ? 0 : elements * n;
    check_file(t.elements() == elements, "a shape of other elements than its matrix");
    if (!is_small(t)) continue;
    check_file(read_tiles(t, 3, 5) == read_tiles(t, t.matrix.rows, t.matrix.cols),
               "tiles that differ");
  }
  return true;
}

}  // namespace tenon::test
