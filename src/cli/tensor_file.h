// Float tensors in .npy and .safetensors files, looked at where they lie in the mapped file.
#pragma once

#include <cstddef>
#include <cstdint>
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

struct StoredTensor {
  std::string name;
  Stored type = Stored::f32;
  std::vector<int64_t> shape;
  bool fortran = false;             // the first dimension is the fastest
  const std::byte* data = nullptr;  // at any address
  Shape matrix;                     // leading dimensions are rows

  [[nodiscard]] int64_t elements() const { return matrix.rows * matrix.cols; }
  // A part of the matrix, in the file where it lies in rows there, else converted into `buffer`.
  [[nodiscard]] View tile(const Tile& t, std::vector<float>& buffer) const;
};

struct TensorFile {
  std::vector<StoredTensor> tensors;  // in the file's order of data
  std::vector<std::string> notes;     // what was left out or converted
  std::vector<std::string> left_out;  // names of tensors whose dtype is none of ours
};

// Any fault is an Error that names the file, the value, the rule and the remedy. The tensors point
// into `bytes`.
TensorFile parse_tensor_file(const std::string& file, std::span<const std::byte> bytes);

// A .safetensors file of tensors that lie in rows, in the order given.
std::string safetensors_file(std::span<const StoredTensor> tensors);

// A file in memory for as long as this lives. It must not shrink meanwhile.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Text from a file made fit for terminals and XML: what is not UTF-8, or steers a terminal,
// becomes U+FFFD; what is longer than `most` characters ends in an ellipsis.
std::string clean(std::string_view text, size_t most = 80);

}  // namespace tenon::cli
