// Which format a file has, its memory, and its tensors as matrices.
#include "cli/tensor_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "cli/tensor_formats.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

static_assert(std::endian::native == std::endian::little, "files are read as they lie");

constexpr size_t kMostDimensions = 64;  // numpy's own limit

template <class T>
T read(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

float element(Stored type, const std::byte* p) {
  switch (type) {
    case Stored::f16:
      return decode<DType::f16>(read<uint16_t>(p));
    case Stored::bf16:
      return decode<DType::bf16>(read<uint16_t>(p));
    case Stored::f32:
      return read<float>(p);
    case Stored::f64:
      return static_cast<float>(read<double>(p));
  }
  return 0;
}

// One character of UTF-8, or its first byte where it is not well formed.
struct Character {
  size_t bytes = 1;
  uint32_t code = 0xfffd;
};
Character character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {1, first};
  const size_t n = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < n) return {};
  uint32_t code = first & (0xffU >> (n + 1));
  for (size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (code < kLeast[n] || code > 0x10ffff || surrogate) return {};
  return {n, code};
}

// Controls and marks of direction steer a terminal; XML has no place for the last two of a plane.
bool fit_to_print(uint32_t c) {
  const bool control = c < 0x20 || (c >= 0x7f && c < 0xa0);
  const bool direction = (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return !control && !direction && c != 0x2028 && c != 0x2029 && (c & 0xfffeU) != 0xfffe;
}

}  // namespace

// What the sizes hold. Zeros are left out of the product that is checked, so that every partial
// product fits too.
int64_t count_elements(const std::string& where, std::span<const int64_t> shape, int64_t size) {
  require(shape.size() <= kMostDimensions, where, " has ", shape.size(), " dimensions; at most ",
          kMostDimensions, " are read, reshape it");
  int64_t product = 1;
  bool empty = false;
  for (const int64_t n : shape) {
    empty = empty || n == 0;
    require(n == 0 || n <= kMostBytes / size / product, where,
            " has a shape of more than 2^60 bytes; no file holds that, the header is damaged");
    product *= std::max<int64_t>(n, 1);
  }
  return empty ? 0 : product;
}

Shape fold(std::span<const int64_t> shape) {
  if (shape.empty()) return {1, 1};
  Shape m{1, shape.back()};
  for (const int64_t n : shape.first(shape.size() - 1)) m.rows *= n;
  return m;
}

std::string_view name_of(Stored type) {
  constexpr std::string_view kNames[] = {"f16", "bf16", "f32", "f64"};
  return kNames[static_cast<size_t>(type)];
}
int64_t bytes_of(Stored type) { return type == Stored::f64 ? 8 : type == Stored::f32 ? 4 : 2; }

View StoredTensor::tile(const Tile& t, std::vector<float>& buffer) const {
  const int64_t size = bytes_of(type);
  if (!fortran && type != Stored::f64) {
    constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32};
    return tenon::matrix(data + (t.row * matrix.cols + t.col) * size,
                         kTypes[static_cast<size_t>(type)], t.rows, t.cols, matrix.cols);
  }
  // Where a row begins, and how far its neighbours lie.
  std::vector<int64_t> start(static_cast<size_t>(t.rows));
  int64_t step = 1;
  if (fortran)
    for (const int64_t n : std::span(shape).first(shape.size() - 1)) step *= n;
  for (int64_t r = 0; r < t.rows; ++r) {
    int64_t index = t.row + r;
    start[static_cast<size_t>(r)] = index * matrix.cols;
    if (!fortran) continue;
    int64_t offset = 0;
    int64_t stride = step;
    for (size_t d = shape.size() - 1; d-- > 0; index /= shape[d]) {
      stride /= shape[d];
      offset += index % shape[d] * stride;
    }
    start[static_cast<size_t>(r)] = offset;
  }
  buffer.resize(static_cast<size_t>(t.rows * t.cols));
  constexpr int64_t kBlock = 16;  // columns of a Fortran matrix lie far apart
  for (int64_t c0 = 0; c0 < t.cols; c0 += kBlock)
    for (int64_t r = 0; r < t.rows; ++r)
      for (int64_t c = c0; c < std::min(c0 + kBlock, t.cols); ++c)
        buffer[static_cast<size_t>(r * t.cols + c)] =
            element(type, data + (start[static_cast<size_t>(r)] + (t.col + c) * step) * size);
  return tenon::matrix(buffer.data(), DType::f32, t.rows, t.cols);
}

TensorFile parse_tensor_file(const std::string& path, std::span<const std::byte> bytes) {
  const std::string file = clean(path, 200);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  require(!text.empty(), file, " is empty; give an .npy or .safetensors file");
  if (text.starts_with("\x93NUMPY")) return parse_npy(file, text);
  require(!text.starts_with("PK\x03\x04"), file,
          " is a zip archive (.npz, .pt); give one .npy out of it, or save .safetensors");
  require(!file.ends_with(".npy"), file,
          " does not begin with \\x93NUMPY; it is not npy, save it with numpy.save");
  require(file.ends_with(".safetensors") || (text.size() > 8 && text[8] == '{'), file,
          " is neither .npy nor .safetensors; save it as one of the two");
  return parse_safetensors(file, text);
}

MappedFile::MappedFile(const std::string& path) {
  const std::string file = clean(path, 200);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(fd >= 0, file, " cannot be opened: ", std::strerror(errno),
          "; give a file that is there");
  struct stat status {};
  const bool regular = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  size_ = regular ? static_cast<size_t>(status.st_size) : 0;
  void* memory = size_ > 0 ? mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0) : nullptr;
  const int error = errno;
  close(fd);
  require(regular, file, " is not a regular file; save it to one and give that");
  if (memory == MAP_FAILED) {
    size_ = 0;
    fail(Code::runtime, file, " cannot be mapped: ", std::strerror(error));
  }
  data_ = static_cast<const std::byte*>(memory);
}

MappedFile::~MappedFile() {
  if (size_ > 0) munmap(const_cast<std::byte*>(data_), size_);
}

std::string clean(std::string_view text, size_t most) {
  std::string result;
  for (size_t count = 0; !text.empty(); ++count) {
    if (count == most) return result + "…";
    const Character c = character(text);
    if (c.code != 0xfffd && fit_to_print(c.code))
      result += text.substr(0, c.bytes);
    else
      result += "\xef\xbf\xbd";
    text.remove_prefix(c.bytes);
  }
  return result;
}

}  // namespace tenon::cli
