// Encodes panels block by block. A transposed copy is the rowwise encoding of the transposed panel.
#include "backend/cpu/encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/scaling.h"

namespace tenon::cpu {

namespace {

char* address(const View& v, int64_t offset) {
  return static_cast<char*>(v.data) + offset * info(v.dtype).bytes;
}

void write(const View& v, int64_t offset, uint32_t code) {
  std::memcpy(address(v, offset), &code, static_cast<size_t>(info(v.dtype).bytes));
}

// The multiplier of a tensor with a single scale.
Scale single_scale(const Encoder& e, const RunArgs& args) {
  if (e.format.scaling == Scaling::none) return {};
  float value = 0;
  std::memcpy(&value, args.in[e.scale].data, sizeof value);
  if (info(e.format.scaling).scale_given) return scale_given(value);
  return scale_of(__builtin_bit_cast(uint32_t, value) & kMagnitude, e.format);
}

void transpose(const Panel& p, float* to) {
  constexpr int64_t kBlock = 16;  // 16 x 16 values: 16 cache lines to read, 16 to write
  for (int64_t r0 = 0; r0 < p.rows; r0 += kBlock)
    for (int64_t c0 = 0; c0 < p.cols; c0 += kBlock)
      for (int64_t c = c0; c < std::min(c0 + kBlock, p.cols); ++c)
        for (int64_t r = r0; r < std::min(r0 + kBlock, p.rows); ++r)
          to[c * p.rows + r] = p.data[r * p.cols + c];
}

class PanelEncoder {
 public:
  PanelEncoder(const Loops& loops, const Encoder& e, const RunArgs& args, Health* health)
      : loops_(loops), e_(e), args_(args), health_(health) {}

  // Encodes the blocks of the panel. Data rows are panel rows. Scales go to orientation `o`. In a
  // transposed panel, element (i, j) of the tensor is (j, i).
  void rows(const Panel& p, Orientation o, bool transposed) const {
    const View& data = args_.out[e_.data(o)];
    Blocks blocks = e_.format.blocks(o);
    if (transposed) std::swap(blocks.rows, blocks.cols);
    if (blocks.single()) {
      const float multiplier = single_scale(e_, args_).multiplier;
      for (int64_t r = 0; r < p.rows; ++r) row(p, data, r, 0, p.cols, multiplier);
      return;
    }
    for (int64_t r = 0; r < p.rows; r += blocks.rows)
      for (int64_t c = 0; c < p.cols; c += blocks.cols) {
        const int64_t end = std::min(r + blocks.rows, p.rows);
        const int64_t n = std::min(blocks.cols, p.cols - c);
        uint32_t most = 0;
        for (int64_t k = r; k < end; ++k)
          most = std::max(most, loops_.max_bits(at(p, k, c), static_cast<size_t>(n)));
        const Scale scale = scale_of(most, e_.format);
        const int64_t i = (p.row + r) / blocks.rows;
        const int64_t j = (p.col + c) / blocks.cols;
        write_scale(o, transposed ? j : i, transposed ? i : j, scale);
        for (int64_t k = r; k < end; ++k) row(p, data, k, c, n, scale.multiplier);
      }
  }

  // Blocks of one column, data not transposed: one multiplier per column.
  void columns(const Panel& p, float* scratch) const {
    constexpr Orientation kColumnwise = Orientation::columnwise;
    const View& data = args_.out[e_.data(kColumnwise)];
    const int64_t height = e_.format.blocks(kColumnwise).rows;
    const auto n = static_cast<size_t>(p.cols);
    auto* most = reinterpret_cast<uint32_t*>(scratch + n);
    for (int64_t r = 0; r < p.rows; r += height) {
      const int64_t end = std::min(r + height, p.rows);
      std::fill_n(most, n, 0U);
      for (int64_t k = r; k < end; ++k) loops_.max_bits_into(most, at(p, k, 0), n);
      for (int64_t c = 0; c < p.cols; ++c) {
        const Scale scale = scale_of(most[c], e_.format);
        write_scale(kColumnwise, (p.row + r) / height, p.col + c, scale);
        scratch[c] = scale.multiplier;
      }
      for (int64_t k = r; k < end; ++k) {
        loops_.store_scales[index(e_.format.dtype)](
            address(data, (p.row + k) * data.stride + p.col), at(p, k, 0), n, scratch);
        if (health_) count(at(p, k, 0), n, scratch, 1);
      }
    }
  }

 private:
  static const float* at(const Panel& p, int64_t r, int64_t c) { return p.data + r * p.cols + c; }

  void row(const Panel& p, const View& data, int64_t r, int64_t c, int64_t n,
           float multiplier) const {
    loops_.store_scaled[index(e_.format.dtype)](
        address(data, (p.row + r) * data.stride + p.col + c), at(p, r, c), static_cast<size_t>(n),
        multiplier);
    if (health_) count(at(p, r, c), static_cast<size_t>(n), &multiplier, 0);
  }

  void write_scale(Orientation o, int64_t i, int64_t j, const Scale& scale) const {
    const View& v = args_.out[e_.scale_inv(o)];
    write(v, scale_offset(e_.format, o, i, j, {v.rows, v.cols}, v.stride), scale.inverse);
  }

  // `step` 0: one multiplier for all values.
  void count(const float* v, size_t n, const float* multiplier, size_t step) const {
    const uint32_t dtype_max = __builtin_bit_cast(uint32_t, saturation_threshold(e_.format.dtype));
    // Half of the smallest code. At or below it the code is 0.
    const DTypeInfo& f = info(e_.format.dtype);
    const uint32_t least = __builtin_bit_cast(uint32_t, power_of_two(-f.bias - f.mantissa_bits));
    uint32_t saturated = 0;
    uint32_t flushed = 0;
    uint32_t nonfinite = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, v[i]) & kMagnitude;
      const uint32_t scaled =
          __builtin_bit_cast(uint32_t, v[i] * multiplier[i * step]) & kMagnitude;
      const bool finite = bits < kInfinity;
      nonfinite += finite ? 0 : 1;
      saturated += finite && scaled > dtype_max && scaled <= kInfinity ? 1 : 0;
      flushed += finite && bits != 0 && scaled <= least ? 1 : 0;
    }
    *health_ += {saturated, flushed, nonfinite};
  }

  const Loops& loops_;
  const Encoder& e_;
  const RunArgs& args_;
  Health* health_;
};

}  // namespace

Health& Health::operator+=(const Health& h) {
  saturated += h.saturated;
  flushed += h.flushed;
  nonfinite += h.nonfinite;
  return *this;
}

float single_multiplier(const Encoder& e, const RunArgs& args) {
  return single_scale(e, args).multiplier;
}

size_t encode_floats(int64_t rows, int64_t cols) {
  return static_cast<size_t>(std::max<int64_t>(rows, 2) * cols);
}

void encode(const Loops& loops, const Encoder& e, const RunArgs& args, const Panel& panel,
            float* scratch, Health& health) {
  // Counts once: in the rowwise encoding if there is one.
  Health* const counted = e.counts ? &health : nullptr;
  if (e.rowwise) PanelEncoder(loops, e, args, counted).rows(panel, Orientation::rowwise, false);
  if (!e.columnwise) return;
  const PanelEncoder columnwise(loops, e, args, e.rowwise ? nullptr : counted);
  if (!info(e.format.scaling).transposes) return columnwise.columns(panel, scratch);
  transpose(panel, scratch);
  columnwise.rows({panel.col, panel.cols, panel.row, panel.rows, scratch}, Orientation::columnwise,
                  true);
}

void finish_encoder(const Encoder& e, const RunArgs& args, const Health& health) {
  for (const Orientation o : kOrientations) {
    const View& v = args.out[e.scale_inv(o)];
    const Blocks blocks = e.format.blocks(o);
    if (v.rows == 0 || v.cols == 0) continue;
    if (blocks.single()) {  // shared by both encodings, so either may hold it
      write(v, 0, single_scale(e, args).inverse);
      continue;
    }
    if (!e.has(o)) continue;
    const Shape used = blocks.count(args.rows, e.cols);
    const Shape all = blocks.transposed ? Shape{v.cols, v.rows} : Shape{v.rows, v.cols};
    for (int64_t i = 0; i < all.rows; ++i)
      for (int64_t j = i < used.rows ? used.cols : 0; j < all.cols; ++j)
        write(v, scale_offset(e.format, o, i, j, {v.rows, v.cols}, v.stride), 0);
  }
  if (!e.counts) return;
  const View& v = args.out[e.out + Encoder::health];
  const float counts[3] = {static_cast<float>(health.saturated), static_cast<float>(health.flushed),
                           static_cast<float>(health.nonfinite)};
  std::memcpy(v.data, counts, sizeof counts);
}

}  // namespace tenon::cpu
