// Tests of tensors with more than 2^32 elements on a GPU. Rows repeat, so every result is compared
// with the CPU results of a few rows, and the host needs no large memory.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/driver.h"
#include "runtime/execute.h"
#include "support/support.h"

namespace tenon::test {

// The number of rows that repeat. It is 3 times 128: blocks of scales end with them, and rows at a
// distance of a power of two always differ. So an index that lost its upper bits reads other
// values.
inline constexpr int64_t kBandRows = 384, kBandCols = 4096;
inline constexpr int64_t kManyRows = 2740 * kBandRows;
static_assert(kManyRows * kBandCols > int64_t{1} << 32);

// Tensors on a device, filled with one byte value until they are written.
class Tensors {
 public:
  explicit Tensors(Device device) : device_(device) {}

  // `repeats`: the tensor repeats for more rows of the call.
  View make(DType dtype, Shape shape, bool repeats = true) {
    const auto bytes = static_cast<size_t>(shape.rows * shape.cols * info(dtype).bytes);
    const View v = matrix(memory(bytes), dtype, shape.rows, shape.cols);
    if (repeats) repeating_.push_back(v);
    return v;
  }
  [[nodiscard]] const std::vector<View>& repeating() const { return repeating_; }

  static constexpr uint8_t kByte = 0x3f;

 private:
  void* memory(size_t bytes) {
    if (device_ == Device::cpu) return host_.emplace_back(bytes, kByte).data();
    const cuda::CurrentContext context;
    buffers_.push_back(std::make_unique<cuda::DeviceBuffer>(bytes));
    cuda::check(cuda::driver().memset_bytes(buffers_.back()->data(), kByte, bytes), "filling");
    return buffers_.back()->data();
  }

  Device device_;
  std::vector<std::vector<uint8_t>> host_;
  std::vector<std::unique_ptr<cuda::DeviceBuffer>> buffers_;
  std::vector<View> repeating_;
};

inline size_t row_bytes(const View& v) { return static_cast<size_t>(v.cols * info(v.dtype).bytes); }

// Fills `large` with repeated copies of the rows of `band`.
inline void repeat(const View& band, const View& large) {
  const size_t bytes = row_bytes(band) * static_cast<size_t>(band.rows);
  const cuda::CurrentContext context;
  const cuda::PinnedBuffer host(bytes);
  std::memcpy(host.data(), band.data, bytes);
  auto* to = static_cast<uint8_t*>(large.data);
  for (int64_t r = 0; r < large.rows; r += band.rows, to += bytes)
    cuda::check(cuda::driver().memcpy_to_device(to, host.data(), bytes), "copying a band");
}

// Checks that `large`, on the device, repeats `small` down or to the right.
inline void expect_repeats(const View& large, const View& small, const std::string& what) {
  constexpr size_t kAtOnce = size_t{16} << 20;
  const size_t row = row_bytes(large), piece = row_bytes(small);
  ASSERT_TRUE(row % piece == 0 && large.rows % small.rows == 0) << what;
  const auto rows = std::min(static_cast<int64_t>(kAtOnce / row) + 1, large.rows);
  const cuda::CurrentContext context;
  const cuda::PinnedBuffer host(static_cast<size_t>(rows) * row);
  for (int64_t first = 0; first < large.rows; first += rows) {
    const auto count = static_cast<size_t>(std::min(rows, large.rows - first));
    const auto* from = static_cast<uint8_t*>(large.data) + static_cast<size_t>(first) * row;
    cuda::check(cuda::driver().memcpy_to_host(host.data(), const_cast<uint8_t*>(from), count * row),
                "copying rows");
    for (size_t r = 0; r < count; ++r) {
      const int64_t at = first + static_cast<int64_t>(r);
      const auto* got = static_cast<uint8_t*>(host.data()) + r * row;
      const auto* expected =
          static_cast<uint8_t*>(small.data) + static_cast<size_t>(at % small.rows) * piece;
      for (size_t c = 0; c < row; c += piece)
        if (std::memcmp(got + c, expected, piece) != 0) {
          ADD_FAILURE() << what << ": row " << at << " of " << large.rows << " differs in the "
                        << piece << " bytes from " << c;
          return;
        }
    }
  }
}

// Reads x and allocates its results on the device of the options.
using BandCall = std::function<void(Tensors& results, const View& x, const Options& options)>;

// Compares a strict call on many bands with the same call on one band on the CPU. `entry` is a
// kernel that must run.
inline void expect_bands(const std::string& entry, const View& many, const View& band,
                         const BandCall& call, Tensors& large, Tensors& small) {
  std::string texts;
  const struct Unobserved {
    ~Unobserved() { set_observer({}); }
  } after;
  set_observer([&](const Step& step, const RunArgs& args, const Options& o, const auto& go) {
    for (const std::string& text : kernel_for(step, o.device).kernel->texts_for(args))
      texts += text;
    go();
  });
  const cuda::CurrentContext context;
  call(large, many, {.precision = Precision::strict, .device = Device::cuda});
  EXPECT_NE(texts.find(entry), std::string::npos);
  cuda::check(cuda::driver().context_synchronize(), "waiting");
  call(small, band, {.precision = Precision::strict});
  for (size_t i = 0; i < large.repeating().size(); ++i)
    expect_repeats(large.repeating()[i], small.repeating()[i], str(entry, ", result ", i));
}

}  // namespace tenon::test
