// Detects the format of a file, reads it, and presents its tensors as matrices.
#include "cli/tensor_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "cli/tensor_formats.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

static_assert(std::endian::native == std::endian::little, "files are read as they lie");

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

class Memory final : public Bytes {
 public:
  explicit Memory(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t at, std::span<std::byte> to) const override {
    const auto from = bytes_.subspan(at, to.size());
    std::copy(from.begin(), from.end(), to.begin());
  }

 private:
  std::span<const std::byte> bytes_;
};

class File final : public Bytes {
 public:
  explicit File(const std::string& path) : name_(clean(path, 200)) {
    fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    require(fd_ >= 0, name_, " cannot be opened: ", std::strerror(errno),
            "; give a file that is there");
    struct stat status {};
    const bool regular = fstat(fd_, &status) == 0 && S_ISREG(status.st_mode);
    if (!regular) close(fd_);
    require(regular, name_, " is not a regular file; save it to one and give that");
    size_ = static_cast<uint64_t>(status.st_size);
  }
  ~File() override { close(fd_); }

  [[nodiscard]] uint64_t size() const override { return size_; }
  void read(uint64_t at, std::span<std::byte> to) const override {
    while (!to.empty()) {
      const ssize_t n = pread(fd_, to.data(), to.size(), static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(Code::runtime, name_, " cannot be read: ", std::strerror(errno));
      if (n == 0)
        fail(Code::runtime, name_, " shrank while it was read: it had ", size_,
             " bytes and ends at ", at, "; wait until it is written, then run this again");
      at += static_cast<uint64_t>(n);
      to = to.subspan(static_cast<size_t>(n));
    }
  }

 private:
  std::string name_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

// One UTF-8 character, or one byte if the encoding is invalid.
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

// Control characters and direction marks can change the state of a terminal. XML does not allow the
// last two code points of a plane.
bool fit_to_print(uint32_t c) {
  const bool control = c < 0x20 || (c >= 0x7f && c < 0xa0);
  const bool direction = (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return !control && !direction && c != 0x2028 && c != 0x2029 && (c & 0xfffeU) != 0xfffe;
}

}  // namespace

// The number of elements. Zeros are left out of the checked product, so that every partial product
// fits too.
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

namespace {

// Reads rows without conversion, or converts them from f64 in pieces.
void read_rows(const FileTensor& s, const Tile& t, std::vector<float>& buffer) {
  const int64_t size = bytes_of(s.type);
  const int64_t row = t.cols * size;
  const auto at = [&](int64_t r) {
    return s.offset + static_cast<uint64_t>(((t.row + r) * s.matrix.cols + t.col) * size);
  };
  if (s.type != Stored::f64) {
    buffer.resize(static_cast<size_t>((t.rows * row + 3) / 4));
    const auto to = std::as_writable_bytes(std::span(buffer));
    const bool whole = t.cols == s.matrix.cols;  // one contiguous range of the file
    const int64_t piece = whole ? t.rows * row : row;
    for (int64_t r = 0; r < (whole ? 1 : t.rows); ++r)
      s.bytes->read(at(r), to.subspan(static_cast<size_t>(r * row), static_cast<size_t>(piece)));
    return;
  }
  buffer.resize(static_cast<size_t>(t.rows * t.cols));
  std::vector<double> line(static_cast<size_t>(t.cols));
  for (int64_t r = 0; r < t.rows; ++r) {
    s.bytes->read(at(r), std::as_writable_bytes(std::span(line)));
    std::ranges::transform(line, buffer.begin() + r * t.cols,
                           [](double v) { return static_cast<float>(v); });
  }
}

// A column of the folded matrix is `step` contiguous elements in the file. Their order differs from
// the order of the rows. Elements that are close together are read in one call.
void read_fortran(const FileTensor& s, const Tile& t, std::vector<float>& buffer) {
  constexpr int64_t kNear = 4096;  // bytes; copying them costs about as much as a system call
  const int64_t size = bytes_of(s.type);
  const std::span leading = std::span(s.shape).first(s.shape.size() - 1);
  int64_t step = 1;
  for (const int64_t n : leading) step *= n;
  std::vector<std::pair<int64_t, int64_t>> places;  // position in the column, row of the tile
  for (int64_t r = 0; r < t.rows; ++r) {
    int64_t index = t.row + r;
    int64_t place = 0;
    int64_t stride = step;
    for (size_t d = leading.size(); d-- > 0; index /= leading[d]) {
      stride /= leading[d];
      place += index % leading[d] * stride;
    }
    places.emplace_back(place, r);
  }
  std::ranges::sort(places);
  buffer.resize(static_cast<size_t>(t.rows * t.cols));
  std::vector<std::byte> run;
  for (int64_t c = 0; c < t.cols; ++c)
    for (size_t i = 0, end = 0; i < places.size(); i = end) {
      for (end = i + 1; end < places.size(); ++end)
        if ((places[end].first - places[end - 1].first) * size > kNear) break;
      const int64_t first = places[i].first;
      run.resize(static_cast<size_t>((places[end - 1].first + 1 - first) * size));
      s.bytes->read(s.offset + static_cast<uint64_t>(((t.col + c) * step + first) * size), run);
      for (size_t k = i; k < end; ++k)
        buffer[static_cast<size_t>(places[k].second * t.cols + c)] =
            element(s.type, run.data() + (places[k].first - first) * size);
    }
}

}  // namespace

View FileTensor::tile(const Tile& t, std::vector<float>& buffer) const {
  if (fortran)
    read_fortran(*this, t, buffer);
  else
    read_rows(*this, t, buffer);
  const bool as_it_is = !fortran && (type == Stored::f16 || type == Stored::bf16);
  const DType dtype = !as_it_is ? DType::f32 : type == Stored::f16 ? DType::f16 : DType::bf16;
  return tenon::matrix(buffer.data(), dtype, t.rows, t.cols);
}

TensorFile parse_tensor_file(const std::string& path, std::shared_ptr<const Bytes> bytes) {
  const std::string file = clean(path, 200);
  const std::string text = read_text(*bytes, 0, std::min<uint64_t>(bytes->size(), 16));
  require(!text.empty(), file, " is empty; give an .npy or .safetensors file");
  if (text.starts_with("\x93NUMPY")) return parse_npy(file, std::move(bytes));
  require(!text.starts_with("PK\x03\x04"), file,
          " is a zip archive (.npz, .pt); give one .npy out of it, or save .safetensors");
  require(!file.ends_with(".npy"), file,
          " does not begin with \\x93NUMPY; it is not npy, save it with numpy.save");
  require(file.ends_with(".safetensors") || (text.size() > 8 && text[8] == '{'), file,
          " is neither .npy nor .safetensors; save it as one of the two");
  return parse_safetensors(file, std::move(bytes));
}

TensorFile parse_tensor_file(const std::string& path, std::span<const std::byte> bytes) {
  return parse_tensor_file(path, std::make_shared<Memory>(bytes));
}

std::shared_ptr<const Bytes> open_file(const std::string& path) {
  return std::make_shared<File>(path);
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
