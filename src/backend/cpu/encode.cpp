// Encodes panels row by row. Transposed encodings transpose the codes, not the values.
#include "backend/cpu/encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/scaling.h"

namespace tenon::cpu {

namespace {

char* address(const View& v, int64_t offset) {
  return static_cast<char*>(v.data) + offset * info(v.dtype).bytes;
}

void write(const View& v, int64_t offset, uint32_t code) {
  char* to = address(v, offset);
  if (info(v.dtype).bytes == 1)
    *to = static_cast<char>(code);
  else
    std::memcpy(to, &code, sizeof code);
}

// The multiplier of a tensor with a single scale.
Scale single_scale(const Encoder& e, const RunArgs& args) {
  if (e.format.scaling == Scaling::none) return {};
  float value = 0;
  std::memcpy(&value, args.in[e.scale].data, sizeof value);
  if (info(e.format.scaling).scale_given) return scale_given(value);
  return scale_of(__builtin_bit_cast(uint32_t, value) & kMagnitude, e.format);
}

// Scratch of one panel: its codes and rounded values, then maxima, multipliers and inverses of
// blocks.
struct Room {
  char* codes;
  uint16_t* rounded;
  uint32_t* most;
  float* multipliers;
  uint32_t* inverses;
  uint16_t* offsets;

  Room(float* scratch, const Panel& p) {
    const int64_t line = rup(p.cols, 16);
    codes = reinterpret_cast<char*>(scratch);
    rounded = reinterpret_cast<uint16_t*>(codes + rup(p.rows * p.cols, 2));
    scratch += rup(p.rows * p.cols, 16);
    most = reinterpret_cast<uint32_t*>(scratch);
    multipliers = scratch + line;
    inverses = reinterpret_cast<uint32_t*>(scratch + 2 * line);
    offsets = reinterpret_cast<uint16_t*>(scratch + 3 * line);
  }
};

// Rows of codes in memory.
struct Lines {
  char* first;
  int64_t pitch;
  bool stream;

  [[nodiscard]] char* operator()(int64_t r) const { return first + r * pitch; }
  // Whether codes can be encoded in place: they may bypass the cache only in whole lines.
  [[nodiscard]] bool direct() const {
    constexpr int64_t kLine = 64;
    return !stream || (reinterpret_cast<intptr_t>(first) % kLine == 0 && pitch % kLine == 0);
  }
};

// Encodes a panel of values into tensors or into the room, and writes codes of the room to tensors.
class PanelEncoder {
 public:
  PanelEncoder(const Loops& loops, const Encoder& e, const RunArgs& args, const Panel& p,
               float* scratch, const Upcoming& upcoming, bool stream)
      : loops_(loops),
        e_(e),
        args_(args),
        p_(p),
        room_(scratch, p),
        upcoming_(upcoming),
        stream_(stream),
        bytes_(info(e.format.dtype).bytes) {
    // Two encodings with powers of two share the rounding.
    const bool powers = info(e.format.scaling).scale == DType::e8m0;
    if (powers && e.rowwise && e.columnwise && !same_blocks(Orientation::columnwise))
      rounded_ = loops.rounded[type()];
  }

  // The codes of a panel of codes.
  [[nodiscard]] Lines given() const {
    return {static_cast<char*>(const_cast<void*>(p_.data)), p_.cols * bytes_, false};
  }
  [[nodiscard]] Lines room() const { return {room_.codes, p_.cols * bytes_, false}; }
  // The panel's part of a tensor whose codes are not transposed.
  [[nodiscard]] Lines tensor(Orientation o) const {
    const View& v = args_.out[e_.data(o)];
    // One row may have any stride.
    return {address(v, p_.row * v.stride + p_.col), p_.rows > 1 ? v.stride * bytes_ : 0, stream_};
  }
  [[nodiscard]] bool transposes(Orientation o) const {
    return o == Orientation::columnwise && info(e_.format.scaling).transposes;
  }

  // The blocks of the rowwise encoding, which the columnwise encoding may share.
  void rows(const Lines& codes, Health* health) const {
    const Blocks blocks = e_.format.blocks(Orientation::rowwise);
    const auto n = static_cast<size_t>(p_.cols);
    if (blocks.single()) {
      const float multiplier = single_scale(e_, args_).multiplier;
      for (int64_t r = 0; r < p_.rows; ++r) {
        loops_.store_scaled[type()](codes(r), at(r), n, multiplier, codes.stream);
        if (health) count(*health, at(r), n, [&](size_t) { return multiplier; });
      }
      return;
    }
    const auto width = static_cast<size_t>(blocks.cols);
    const int64_t in_row = cdiv(p_.cols, blocks.cols);
    for (int64_t r = 0; r < p_.rows; r += blocks.rows) {
      const int64_t end = std::min(r + blocks.rows, p_.rows);
      const float* values = at(r);
      if (blocks.rows > 1) {
        column_maxima(r, end);
        values = reinterpret_cast<const float*>(room_.most);
      }
      loops_.block_max(room_.inverses, values, n, width);
      std::memcpy(room_.most, room_.inverses, static_cast<size_t>(in_row) * sizeof(uint32_t));
      find_scales(in_row);
      for (const Orientation o : kOrientations)
        if (e_.has(o) && same_blocks(o))
          write_scales(o, (p_.row + r) / blocks.rows, p_.col / blocks.cols, in_row);
      const bool quick = find_offsets(in_row, width);
      for (int64_t k = r; k < end; ++k) {
        if (rounded_.round) rounded_.round(rounded(k), at(k), n);
        if (quick)
          rounded_.store(codes(k), rounded(k), room_.offsets, at(k), room_.multipliers, n, width,
                         codes.stream);
        else
          loops_.store_blocks[type()](codes(k), at(k), n, width, room_.multipliers, codes.stream);
        upcoming_.prefetch(k);
        if (health)
          count(*health, at(k), n, [&](size_t i) { return room_.multipliers[i / width]; });
      }
    }
  }

  // Blocks of one column: one multiplier per column. After rows(), which rounds the values if both
  // encodings use them.
  void columns(const Lines& codes, Health* health) const {
    const int64_t height = e_.format.blocks(Orientation::columnwise).rows;
    const auto n = static_cast<size_t>(p_.cols);
    for (int64_t r = 0; r < p_.rows; r += height) {
      const int64_t end = std::min(r + height, p_.rows);
      column_maxima(r, end);
      find_scales(p_.cols);
      write_scales(Orientation::columnwise, (p_.row + r) / height, p_.col, p_.cols);
      const bool quick = find_offsets(p_.cols, 1);
      for (int64_t k = r; k < end; ++k) {
        if (quick)
          rounded_.store(codes(k), rounded(k), room_.offsets, at(k), room_.multipliers, n, 1,
                         codes.stream);
        else
          loops_.store_scales[type()](codes(k), at(k), n, room_.multipliers, codes.stream);
        if (!e_.rowwise) upcoming_.prefetch(k);
        if (health) count(*health, at(k), n, [&](size_t i) { return room_.multipliers[i]; });
      }
    }
  }

  // Whether the rowwise codes are also those of this orientation.
  [[nodiscard]] bool same_blocks(Orientation o) const {
    const Blocks a = e_.format.blocks(Orientation::rowwise), b = e_.format.blocks(o);
    return a.rows == b.rows && a.cols == b.cols;
  }

  void put(Orientation o, const Lines& codes) const {
    if (transposes(o)) return put_columns(args_.out[e_.data(o)], codes);
    const Lines to = tensor(o);
    const auto n = static_cast<size_t>(p_.cols * bytes_);
    for (int64_t r = 0; r < p_.rows; ++r)
      stream_ ? loops_.stream_bytes(to(r), codes(r), n) : (void)std::memcpy(to(r), codes(r), n);
  }

 private:
  [[nodiscard]] size_t type() const { return index(e_.format.dtype); }
  [[nodiscard]] const float* at(int64_t r) const {
    return static_cast<const float*>(p_.data) + r * p_.cols;
  }

  [[nodiscard]] uint16_t* rounded(int64_t r) const { return room_.rounded + r * p_.cols; }
  // Whether the loops of rounded values encode these blocks.
  [[nodiscard]] bool find_offsets(int64_t n, size_t width) const {
    return rounded_.offsets && rounded_.offsets(room_.offsets, room_.inverses, room_.most,
                                                static_cast<size_t>(n), width);
  }

  void put_columns(const View& data, const Lines& codes) const {
    char* to = address(data, p_.col * data.stride + p_.row);
    if (bytes_ == 1)
      return loops_.transpose_bytes(reinterpret_cast<uint8_t*>(to), data.stride,
                                    reinterpret_cast<const uint8_t*>(codes.first), codes.pitch,
                                    p_.rows, p_.cols, stream_);
    for (int64_t c = 0; c < p_.cols; ++c)
      for (int64_t r = 0; r < p_.rows; ++r)
        std::memcpy(to + (c * data.stride + r) * bytes_, codes(r) + c * bytes_,
                    static_cast<size_t>(bytes_));
  }

  void column_maxima(int64_t begin, int64_t end) const {
    const auto n = static_cast<size_t>(p_.cols);
    std::fill_n(room_.most, n, 0U);
    for (int64_t k = begin; k < end; ++k) loops_.max_bits_into(room_.most, at(k), n);
  }

  void find_scales(int64_t n) const {
    loops_.scales(e_.format, room_.most, static_cast<size_t>(n), room_.multipliers, room_.inverses);
  }

  // Writes `n` inverses to scales (i, j), (i, j + 1), …
  void write_scales(Orientation o, int64_t i, int64_t j, int64_t n) const {
    const View& v = args_.out[e_.scale_inv(o)];
    const auto offset = [&](int64_t k) {
      return scale_offset(e_.format, o, i, j + k, {v.rows, v.cols}, v.stride);
    };
    const int64_t first = offset(0);
    const int64_t step = n > 1 ? offset(1) - first : 0;  // one row may have any stride
    if (e_.format.swizzled || info(v.dtype).bytes != 1) {
      for (int64_t k = 0; k < n; ++k)
        write(v, e_.format.swizzled ? offset(k) : first + k * step, room_.inverses[k]);
      return;
    }
    char* const to = address(v, first);
    if (step == 1)
      for (int64_t k = 0; k < n; ++k) to[k] = static_cast<char>(room_.inverses[k]);
    else
      for (int64_t k = 0; k < n; ++k) to[k * step] = static_cast<char>(room_.inverses[k]);
  }

  template <class Multiplier>
  void count(Health& health, const float* v, size_t n, Multiplier multiplier) const {
    const uint32_t dtype_max = __builtin_bit_cast(uint32_t, saturation_threshold(e_.format.dtype));
    // Half of the smallest code. At or below it the code is 0.
    const DTypeInfo& f = info(e_.format.dtype);
    const uint32_t least = __builtin_bit_cast(uint32_t, power_of_two(-f.bias - f.mantissa_bits));
    uint32_t saturated = 0;
    uint32_t flushed = 0;
    uint32_t nonfinite = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, v[i]) & kMagnitude;
      const uint32_t scaled = __builtin_bit_cast(uint32_t, v[i] * multiplier(i)) & kMagnitude;
      const bool finite = bits < kInfinity;
      nonfinite += finite ? 0 : 1;
      saturated += finite && scaled > dtype_max && scaled <= kInfinity ? 1 : 0;
      flushed += finite && bits != 0 && scaled <= least ? 1 : 0;
    }
    health += {saturated, flushed, nonfinite};
  }

  const Loops& loops_;
  const Encoder& e_;
  const RunArgs& args_;
  Panel p_;
  Room room_;
  const Upcoming& upcoming_;
  bool stream_;
  int64_t bytes_;
  RoundedLoops rounded_ = {};
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
  return static_cast<size_t>(rup(rows * cols, 16) + 4 * rup(cols, 16));
}

void encode(const Loops& loops, const Encoder& e, const RunArgs& args, const Panel& panel,
            float* scratch, Health& health, const Upcoming& upcoming, bool stream) {
  const PanelEncoder encoder(loops, e, args, panel, scratch, upcoming, stream);
  constexpr Orientation row = Orientation::rowwise, column = Orientation::columnwise;
  // Counts once: in the rowwise encoding if there is one.
  Health* counted = e.counts ? &health : nullptr;
  const bool shared = e.columnwise && encoder.same_blocks(column);
  if (e.rowwise && !shared) {
    const bool direct = encoder.tensor(row).direct();
    encoder.rows(direct ? encoder.tensor(row) : encoder.room(), std::exchange(counted, nullptr));
    if (!direct) encoder.put(row, encoder.room());
  }
  if (shared) {
    encoder.rows(encoder.room(), counted);
    if (e.rowwise) encoder.put(row, encoder.room());
    return encoder.put(column, encoder.room());
  }
  if (!e.columnwise) return;
  const bool direct = !encoder.transposes(column) && encoder.tensor(column).direct();
  encoder.columns(direct ? encoder.tensor(column) : encoder.room(), counted);
  if (!direct) encoder.put(column, encoder.room());
}

void put_codes(const Loops& loops, const Encoder& e, const RunArgs& args, const Panel& panel,
               float* scratch, bool stream) {
  const Upcoming nothing;
  const PanelEncoder encoder(loops, e, args, panel, scratch, nothing, stream);
  for (const Orientation o : kOrientations)
    if (e.has(o)) encoder.put(o, encoder.given());
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
