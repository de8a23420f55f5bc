// Reads float tensors from .npy and .safetensors files, one tile at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/format.h"

namespace tenon::cli {

enum class Stored : uint8_t { f16, bf16, f32, f64 };

std::string_view name_of(Stored type);
int64_t bytes_of(Stored type);

// Rows [row, row + rows) and columns [col, col + cols) of a matrix.
struct Tile {
  int64_t row = 0, rows = 0, col = 0, cols = 0;
};

// The bytes of a file. They are read, not mapped: if the file shrinks, a mapping ends the process
// with SIGBUS, but a short read is an Error.
class Bytes {
 public:
  Bytes() = default;
  virtual ~Bytes() = default;
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  [[nodiscard]] virtual uint64_t size() const = 0;
  // Fills `to` with the bytes from offset `at` on.
  virtual void read(uint64_t at, std::span<std::byte> to) const = 0;
};

struct FileTensor {
  std::string name;
  Stored type = Stored::f32;
  std::vector<int64_t> shape;
  bool fortran = false;  // the first dimension is the fastest
  std::shared_ptr<const Bytes> bytes;
  uint64_t offset = 0;  // of its first element in `bytes`
  Shape matrix;         // leading dimensions are rows

  [[nodiscard]] int64_t elements() const { return matrix.rows * matrix.cols; }
  // Reads a tile to `buffer`: f16 and bf16 unchanged, all other types as f32.
  [[nodiscard]] View tile(const Tile& t, std::vector<float>& buffer) const;
};

struct TensorFile {
  std::vector<FileTensor> tensors;    // in the order of their data in the file
  std::vector<std::string> notes;     // what was skipped or converted
  bool is_npy = false;                // one array, named after the file
  std::vector<std::string> left_out;  // names of tensors with unsupported dtypes
};

// Every error is an Error that names the file, the value, the rule and the remedy.
TensorFile parse_tensor_file(const std::string& file, std::shared_ptr<const Bytes> bytes);
// The same for bytes in memory. The tensors point to them.
TensorFile parse_tensor_file(const std::string& file, std::span<const std::byte> bytes);

// A regular file. It stays open as long as one of its tensors exists.
std::shared_ptr<const Bytes> open_file(const std::string& path);

struct TensorToWrite {
  std::string name;
  Stored type = Stored::f32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};
// The bytes of a .safetensors file, with the tensors in the given order.
std::string safetensors_file(std::span<const TensorToWrite> tensors);

// Makes text from a file safe for terminals and XML. Invalid UTF-8 and characters that control a
// terminal become U+FFFD. Text longer than `most` characters ends in an ellipsis.
std::string clean(std::string_view text, size_t most = 80);

}  // namespace tenon::cli
