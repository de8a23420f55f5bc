// Float tensors in .npy and .safetensors files, read a tile at a time.
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

// Rows [row, row + rows) by columns [col, col + cols) of a matrix.
struct Tile {
  int64_t row = 0, rows = 0, col = 0, cols = 0;
};

// The bytes of a file. A mapping would end the process by SIGBUS where the file shrinks; a read
// that falls short is an Error.
class Bytes {
 public:
  Bytes() = default;
  virtual ~Bytes() = default;
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  [[nodiscard]] virtual uint64_t size() const = 0;
  // All of `to`, from byte `at` on.
  virtual void read(uint64_t at, std::span<std::byte> to) const = 0;
};

struct StoredTensor {
  std::string name;
  Stored type = Stored::f32;
  std::vector<int64_t> shape;
  bool fortran = false;  // the first dimension is the fastest
  std::shared_ptr<const Bytes> bytes;
  uint64_t offset = 0;  // of its first element in `bytes`
  Shape matrix;         // leading dimensions are rows

  [[nodiscard]] int64_t elements() const { return matrix.rows * matrix.cols; }
  // A part of the matrix in `buffer`: f16 and bf16 as they are, all else as f32.
  [[nodiscard]] View tile(const Tile& t, std::vector<float>& buffer) const;
};

struct TensorFile {
  std::vector<StoredTensor> tensors;  // in the file's order of data
  std::vector<std::string> notes;     // what was left out or converted
  bool is_npy = false;                // one array, named after the file
  std::vector<std::string> left_out;  // names of tensors whose dtype is none of ours
};

// Any fault is an Error that names the file, the value, the rule and the remedy.
TensorFile parse_tensor_file(const std::string& file, std::shared_ptr<const Bytes> bytes);
// The same of bytes in memory, which the tensors point to.
TensorFile parse_tensor_file(const std::string& file, std::span<const std::byte> bytes);

// A regular file, open for as long as a tensor of it is there.
std::shared_ptr<const Bytes> open_file(const std::string& path);

struct NamedTensor {
  std::string name;
  Stored type = Stored::f32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};
// A .safetensors file, in the order given.
std::string safetensors_file(std::span<const NamedTensor> tensors);

// Text from a file made fit for terminals and XML: what is not UTF-8, or steers a terminal,
// becomes U+FFFD; what is longer than `most` characters ends in an ellipsis.
std::string clean(std::string_view text, size_t most = 80);

}  // namespace tenon::cli
