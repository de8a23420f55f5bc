// An independent reference of quantised tensors, written from the specification. It uses scalar
// loops, float64 and integers, and no scale rules, conversions, shapes or offsets of the library.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/modes.h"
#include "support/support.h"

namespace tenon::test {

// Every mode except `none`.
inline constexpr auto kModes = [] {
  std::array<Scaling, std::size(kSpecified) - 1> list{};
  for (size_t i = 0; i < list.size(); ++i) list[i] = static_cast<Scaling>(i + 1);
  return list;
}();
inline constexpr DType kFp8[] = {DType::e4m3, DType::e5m2};

// The format to write, and its options.
struct Spec {
  DType dtype = DType::e4m3;
  Scaling mode = Scaling::delayed;
  bool row = true, column = false;
  float eps = 0;
  std::optional<bool> pow2 = {};
  bool swizzled = false;
  float scale = 1;                    // delayed
  std::optional<uint32_t> amax = {};  // current: given amax bits
  [[nodiscard]] std::string text() const {
    return str(info(dtype).name, " ", info(mode).name, row ? " row" : "", column ? " col" : "",
               eps != 0 ? str(" eps=", eps) : "", pow2 ? *pow2 ? " pow2" : " exact" : "",
               swizzled ? " swizzled" : "");
  }
};

namespace ref {

inline double fp8_max(DType d) { return d == DType::e4m3 ? 448 : 57344; }
inline int fp8_codes(DType d) { return d == DType::e4m3 ? 0x7f : 0x7c; }  // finite, not negative

// Decodes sign, exponent and mantissa. e4m3 has bias 7 and no infinity, e5m2 has bias 15.
inline double fp8_value(DType d, uint8_t code) {
  const int bits = d == DType::e4m3 ? 3 : 2;
  const int bias = d == DType::e4m3 ? 7 : 15;
  const int magnitude = code & 0x7f;
  const int exponent = magnitude >> bits;
  const int fraction = magnitude & ((1 << bits) - 1);
  double v = 0;
  if (d == DType::e4m3 && magnitude == 0x7f)
    v = NAN;
  else if (d == DType::e5m2 && exponent == 31)
    v = fraction ? NAN : INFINITY;
  else if (exponent == 0)
    v = std::ldexp(fraction, 1 - bias - bits);
  else
    v = std::ldexp((1 << bits) + fraction, exponent - bias - bits);
  return code & 0x80 ? -v : v;
}
// Entry c is the smallest fp32 value that rounds to code c + 1. It is the midpoint if c + 1 is
// even, else the next value above it. Entries after the last code are NaN, so no value reaches
// them.
using Steps = std::array<float, 128>;
inline const Steps& fp8_steps(DType d) {
  static const auto kMake = [](DType t) {
    Steps steps;
    steps.fill(kNan);
    for (int c = 0; c + 1 < fp8_codes(t); ++c) {
      const double low = fp8_value(t, static_cast<uint8_t>(c));
      const double high = fp8_value(t, static_cast<uint8_t>(c + 1));
      const auto middle = static_cast<float>((low + high) / 2);
      steps[static_cast<size_t>(c)] = c % 2 ? middle : std::nextafter(middle, kInf);
    }
    return steps;
  };
  static const Steps kE4m3 = kMake(DType::e4m3), kE5m2 = kMake(DType::e5m2);
  return d == DType::e4m3 ? kE4m3 : kE5m2;
}

// Round to nearest even: counts the steps <= |x| by binary search.
inline uint8_t fp8_code(const Steps& steps, float x) {
  if (std::isnan(x)) return 0x7f;
  const float a = std::fabs(x);
  size_t code = 0;
  for (size_t half = 64; half > 0; half /= 2) code += steps[code + half - 1] <= a ? half : 0;
  return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80U : 0U));
}

// The product with one rounding. It is exact in float64: 24 by 24 bits.
inline float product(float a, float b) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
}
// Float64 has more than twice the bits of fp32, so double rounding equals single rounding.
inline float quotient(double a, float b) { return static_cast<float>(a / static_cast<double>(b)); }

// The multiplier of `current` and `block` scaling.
inline float multiplier(uint32_t amax_bits, DType d, float eps, bool pow2) {
  float amax = from_bits(amax_bits);
  if (amax < eps) amax = eps;
  if (amax == 0 || std::isinf(amax) || std::isnan(amax)) return 1;
  float scale = quotient(fp8_max(d), amax);
  if (std::isinf(scale)) scale = 0x1.fffffep127F;
  if (!pow2) return scale;
  int e = 0;
  std::frexp(scale, &e);
  return static_cast<float>(std::ldexp(1.0, e - 1));  // scale >= 448/FLT_MAX is normal
}

// amax·fl32(1/max) rounded to fp32 with integers: R·2^lsb. 448 is 7·2^6, 57344 is 7·2^13, and
// fl32(1/7) is 9586981·2^-26.
struct Rounded {
  uint64_t r;
  int lsb;
};
inline Rounded times_inverse(uint32_t amax_bits, DType d) {
  const auto exponent = static_cast<int>(amax_bits >> 23);
  const uint64_t mantissa = (amax_bits & 0x7fffffU) | (exponent ? 0x800000U : 0U);
  const uint64_t exact = mantissa * 9586981U;
  const int unit = std::max(exponent, 1) - 150 - 26 - (d == DType::e4m3 ? 6 : 13);
  const int lsb = std::max(static_cast<int>(std::bit_width(exact)) - 24 + unit, -149);
  const int drop = lsb - unit;
  const uint64_t half = uint64_t{1} << (drop - 1);
  const uint64_t rest = exact & (2 * half - 1);
  uint64_t r = exact >> drop;
  if (rest > half || (rest == half && r % 2)) ++r;
  return {r, lsb};
}
// The smallest e in 0 … 254 with 2^(e−127) >= the value.
inline uint8_t e8m0(uint32_t amax_bits, DType d) {
  if (amax_bits > 0x7f800000U) return 255;
  if (amax_bits == 0x7f800000U) return 254;
  const auto [r, lsb] = times_inverse(amax_bits, d);
  if (r == 0) return 0;
  const int e = static_cast<int>(std::bit_width(r - 1)) + lsb + 127;
  return static_cast<uint8_t>(std::clamp(e, 0, 254));
}
inline float e8m0_multiplier(uint8_t e) {
  return e == 255 ? kNan : static_cast<float>(std::ldexp(1.0, 127 - e));
}
inline float e8m0_value(uint8_t e) {
  return e == 255 ? kNan : static_cast<float>(std::ldexp(1.0, e - 127));
}

inline const Mode& mode_of(Scaling s) { return kSpecified[static_cast<size_t>(s)]; }
inline bool single(Scaling s) { return mode_of(s).single; }
inline Size data_size(Scaling s, int64_t m, int64_t k, bool column) {
  return data_size(mode_of(s), m, k, column);
}
inline Size scale_size(Scaling s, int64_t m, int64_t k, bool column) {
  return mode_of(s).scales(m, k, column);
}
inline Size block_size(Scaling s, bool column) { return mode_of(s).block[column]; }
// The index of the scale of block (i, j) in its dense tensor.
inline int64_t scale_place(const Spec& s, bool column, int64_t i, int64_t j, Size all) {
  if (s.swizzled) {
    const int64_t line = column ? j : i;
    const int64_t block = column ? i : j;
    const int64_t nt = (column ? all.rows : all.cols) / 4;
    return ((line / 128) * nt + block / 4) * 512 + (line % 32) * 16 + ((line % 128) / 32) * 4 +
           block % 4;
  }
  return mode_of(s.mode).turned[column] ? j * all.cols + i : i * all.cols + j;
}

// f(i) for all i < n. Uses two threads for large tensors.
template <class F>
void parallel(int64_t n, bool worth, F f) {
  const int64_t parts = worth ? std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 8) : 1;
  std::vector<std::thread> others;
  const auto part = [&](int64_t p) {
    for (int64_t i = n * p / parts; i < n * (p + 1) / parts; ++i) f(i);
  };
  for (int64_t p = 1; p < parts; ++p) others.emplace_back(part, p);
  part(0);
  for (std::thread& t : others) t.join();
}

}  // namespace ref

struct SideBytes {
  std::vector<uint8_t> data, scales;  // dense, in the shapes of the table
};
struct Quantised {
  SideBytes row, column;
  uint32_t amax = 0;
  uint64_t saturated = 0, flushed = 0, nonfinite = 0;
};

namespace ref {

inline uint32_t amax_of(const float* v, int64_t m, int64_t k) {
  uint32_t most = 0;
  for (int64_t i = 0; i < m * k; ++i) most = std::max(most, bits(v[i]) & 0x7fffffffU);
  return most;
}

inline void side(const Spec& s, const float* v, int64_t m, int64_t k, bool column, bool count,
                 Quantised& out) {
  SideBytes& to = column ? out.column : out.row;
  const Size all = scale_size(s.mode, m, k, column);
  const Size block = block_size(s.mode, column);
  const Mode& mode = mode_of(s.mode);
  const int64_t bytes = mode.e8m0 ? 1 : 4;
  to.data.assign(static_cast<size_t>(m * k), 0);
  to.scales.assign(static_cast<size_t>(all.rows * all.cols * bytes), 0);  // padding is zero
  // The multiplier for an amax. The stored scale is written to `place`.
  const auto scale_of = [&](uint32_t amax, int64_t place) {
    if (mode.e8m0) {
      const uint8_t e = e8m0(amax, s.dtype);
      to.scales[static_cast<size_t>(place)] = e;
      return e8m0_multiplier(e);
    }
    const bool pow2 = s.pow2.value_or(mode.pow2);
    const float scale = mode.given ? s.scale : multiplier(amax, s.dtype, s.eps, pow2);
    const float inverse = quotient(1, scale);
    std::memcpy(to.scales.data() + 4 * place, &inverse, sizeof inverse);
    return scale;
  };
  const bool one = mode.single;
  const float whole = one ? scale_of(s.amax.value_or(out.amax), 0) : 0;
  const bool turned = column && mode.turns;
  const Steps& steps = fp8_steps(s.dtype);
  // Half a step above the largest value. Values below it round to the largest value, not saturate.
  const float most = s.dtype == DType::e4m3 ? 464 : 61440;
  const auto one_block = [&](int64_t i, int64_t j, uint64_t* counts) {
    const int64_t r1 = std::min((i + 1) * block.rows, m);
    const int64_t c1 = std::min((j + 1) * block.cols, k);
    uint32_t amax = 0;
    for (int64_t r = i * block.rows; !one && r < r1; ++r)
      for (int64_t c = j * block.cols; c < c1; ++c)
        amax = std::max(amax, bits(v[r * k + c]) & 0x7fffffffU);
    const float scale = one ? whole : scale_of(amax, scale_place(s, column, i, j, all));
    for (int64_t r = i * block.rows; r < r1; ++r)
      for (int64_t c = j * block.cols; c < c1; ++c) {
        const float x = v[r * k + c];
        const float scaled = product(x, scale);
        const uint8_t code = fp8_code(steps, scaled);
        to.data[static_cast<size_t>(turned ? c * m + r : r * k + c)] = code;
        if (!std::isfinite(x))
          ++counts[2];
        else if (std::fabs(scaled) > most)
          ++counts[0];
        else if (x != 0 && (code & 0x7f) == 0)
          ++counts[1];
      }
  };
  const int64_t across = up(k, block.cols);
  const int64_t down = up(m, block.rows);
  std::vector<std::array<uint64_t, 3>> counts(static_cast<size_t>(down));
  parallel(down, m * k > 1 << 16, [&](int64_t i) {
    for (int64_t j = 0; j < across; ++j) one_block(i, j, counts[static_cast<size_t>(i)].data());
  });
  for (const auto& c : counts)
    if (count) out.saturated += c[0], out.flushed += c[1], out.nonfinite += c[2];
}

}  // namespace ref

// v is M x K, dense. Losses are counted in the rowwise encoding if it exists.
inline Quantised quantise_ref(const Spec& s, const float* v, int64_t m, int64_t k) {
  Quantised out;
  out.amax = ref::amax_of(v, m, k);
  if (s.row) ref::side(s, v, m, k, false, true, out);
  if (s.column) ref::side(s, v, m, k, true, !s.row, out);
  return out;
}
inline Quantised quantise_ref(const Spec& s, const std::vector<float>& v, int64_t m, int64_t k) {
  return quantise_ref(s, v.data(), m, k);
}

// The decoded values of one encoding: code·scale_inv, one fp32 product.
inline std::vector<float> dequantise_ref(const Spec& s, const Quantised& q, int64_t m, int64_t k,
                                         bool column) {
  const SideBytes& from = column ? q.column : q.row;
  const ref::Size all = ref::scale_size(s.mode, m, k, column);
  const ref::Size block = ref::block_size(s.mode, column);
  std::vector<float> out(static_cast<size_t>(m * k));
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < k; ++c) {
      const int64_t place = ref::single(s.mode)
                                ? 0
                                : ref::scale_place(s, column, r / block.rows, c / block.cols, all);
      float inverse = 0;
      if (ref::mode_of(s.mode).e8m0)
        inverse = ref::e8m0_value(from.scales[static_cast<size_t>(place)]);
      else
        std::memcpy(&inverse, from.scales.data() + 4 * place, sizeof inverse);
      const bool turned = column && ref::mode_of(s.mode).turns;
      const uint8_t code = from.data[static_cast<size_t>(turned ? c * m + r : r * k + c)];
      out[static_cast<size_t>(r * k + c)] =
          ref::product(static_cast<float>(ref::fp8_value(s.dtype, code)), inverse);
    }
  return out;
}

// Elements of any dtype with guard bytes, padded rows and any address. Poisoned until written.
class Memory {
 public:
  static constexpr uint8_t kPoison = 0xA5;

  Memory() = default;
  Memory(DType dtype, int64_t rows, int64_t cols, int64_t pad = 0, size_t shift = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), stride_(cols + pad), offset_(64 + shift) {
    size_ = dtype == DType::f32 ? 4 : dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1;
    bytes_.assign(offset_ + static_cast<size_t>(rows * stride_) * size_ + 64, kPoison);
  }

  [[nodiscard]] View view() const {
    return matrix(bytes_.data() + offset_, dtype_, rows_, cols_, stride_);
  }
  // Copies dense bytes row by row.
  void put(const void* dense) {
    const auto* from = static_cast<const uint8_t*>(dense);
    for (int64_t r = 0; r < rows_ && cols_ > 0; ++r)
      std::memcpy(line(r), from + static_cast<size_t>(r * cols_) * size_,
                  static_cast<size_t>(cols_) * size_);
  }
  [[nodiscard]] std::vector<uint8_t> dense() const {
    std::vector<uint8_t> out(static_cast<size_t>(rows_ * cols_) * size_);
    for (int64_t r = 0; r < rows_ && cols_ > 0; ++r)
      std::memcpy(out.data() + static_cast<size_t>(r * cols_) * size_, line(r),
                  static_cast<size_t>(cols_) * size_);
    return out;
  }
  [[nodiscard]] float number(int64_t i = 0) const {
    float v = 0;
    std::memcpy(&v, bytes_.data() + offset_ + static_cast<size_t>(i) * 4, sizeof v);
    return v;
  }

  // Empty if equal. Otherwise the place of a difference from dense bytes, or of an overwritten
  // guard byte.
  [[nodiscard]] std::string differs(const std::vector<uint8_t>& expected,
                                    std::string_view what) const {
    if (expected.size() != static_cast<size_t>(rows_ * cols_) * size_)
      return str(what, ": ", expected.size(), " bytes expected in ", rows_, "x", cols_);
    const std::vector<uint8_t> got = dense();
    for (size_t i = 0; i < got.size(); ++i)
      if (got[i] != expected[i]) {
        const size_t at = i / size_;
        const auto code = [&](const std::vector<uint8_t>& from) {
          uint32_t c = 0;
          std::memcpy(&c, from.data() + at * size_, size_);
          return c;
        };
        const auto width = static_cast<size_t>(cols_);
        return str(what, " (", at / width, ", ", at % width, "): got code ", code(got),
                   ", expected ", code(expected));
      }
    return guards_hold() ? "" : str(what, ": a byte outside of the elements was written");
  }
  [[nodiscard]] bool guards_hold() const {
    std::vector<uint8_t> copy = bytes_;
    for (int64_t r = 0; r < rows_ && cols_ > 0; ++r)
      std::memset(copy.data() + (line(r) - bytes_.data()), kPoison,
                  static_cast<size_t>(cols_) * size_);
    return std::ranges::all_of(copy, [](uint8_t b) { return b == kPoison; });
  }
  [[nodiscard]] bool same_bytes(const Memory& o) const { return bytes_ == o.bytes_; }

 private:
  [[nodiscard]] uint8_t* line(int64_t r) {
    return bytes_.data() + offset_ + static_cast<size_t>(r * stride_) * size_;
  }
  [[nodiscard]] const uint8_t* line(int64_t r) const {
    return bytes_.data() + offset_ + static_cast<size_t>(r * stride_) * size_;
  }

  std::vector<uint8_t> bytes_;
  DType dtype_ = DType::f32;
  int64_t rows_ = 0, cols_ = 0, stride_ = 0;
  size_t offset_ = 0, size_ = 4;
};

// A tensor of a Spec in memory.
class Encoded {
 public:
  // With `odd`, rows are padded and addresses are odd.
  Encoded(const Spec& s, int64_t m, int64_t k, bool odd = false, bool health = true)
      : spec_(s), m_(m), k_(k), counted_(health) {
    const DType scale = ref::mode_of(s.mode).e8m0 ? DType::e8m0 : DType::f32;
    const int64_t pad = odd ? 3 : 0;
    for (const bool column : {false, true}) {
      if (!(column ? s.column : s.row)) continue;
      const ref::Size d = ref::data_size(s.mode, m, k, column);
      const ref::Size n = ref::scale_size(s.mode, m, k, column);
      data_[column] = Memory(s.dtype, d.rows, d.cols, pad, odd ? 1 : 0);
      scales_[column] = Memory(scale, n.rows, n.cols, s.swizzled ? 0 : pad, odd ? 3 : 0);
    }
    const size_t shift = odd ? 1 : 0;
    multiplier_ = Memory(DType::f32, 1, 1, 0, shift);
    multiplier_.put(&s.scale);
    amax_ = Memory(DType::f32, 1, 1, 0, shift);
    const uint32_t slot = s.amax.value_or(0);  // a new slot of a history is 0
    if (s.amax || ref::mode_of(s.mode).given) amax_.put(&slot);
    health_ = Memory(DType::f32, 1, 3, 0, shift);
  }

  [[nodiscard]] Tensor tensor() const {
    Tensor t;
    t.format = {.dtype = spec_.dtype,
                .scaling = spec_.mode,
                .eps = spec_.eps,
                .power_of_two = spec_.pow2,
                .swizzled = spec_.swizzled};
    if (spec_.row) t.rowwise = {data_[0].view(), scales_[0].view()};
    if (spec_.column) t.columnwise = {data_[1].view(), scales_[1].view()};
    if (ref::mode_of(spec_.mode).given) t.scale = multiplier_.view();
    if (ref::single(spec_.mode)) t.amax = amax_.view();
    t.amax_given =
        ref::single(spec_.mode) && !ref::mode_of(spec_.mode).given && spec_.amax.has_value();
    if (counted_) t.health = health_.view();
    return t;
  }
  // The tensor as an input, with the fields that are read.
  [[nodiscard]] Tensor input() const {
    Tensor t = tensor();
    t.scale = t.amax = t.health = {};
    t.amax_given = false;
    return t;
  }
  void put(const Quantised& q) {
    for (const bool column : {false, true}) {
      if (!(column ? spec_.column : spec_.row)) continue;
      const SideBytes& from = column ? q.column : q.row;
      data_[column].put(from.data.data());
      scales_[column].put(from.scales.data());
    }
  }
  // Sets the amax that delayed scaling updates.
  void hold_amax(float v) { amax_.put(&v); }
  [[nodiscard]] float amax() const { return amax_.number(); }
  [[nodiscard]] const Memory& data(bool column) const { return data_[column]; }
  [[nodiscard]] const Memory& scales(bool column) const { return scales_[column]; }
  [[nodiscard]] const Memory& health() const { return health_; }

  [[nodiscard]] bool same_bytes(const Encoded& o) const {
    for (const int i : {0, 1})
      if (!data_[i].same_bytes(o.data_[i]) || !scales_[i].same_bytes(o.scales_[i])) return false;
    return amax_.same_bytes(o.amax_) && health_.same_bytes(o.health_);
  }

  // Empty if equal to the reference, else the first difference. `held` is the previous amax.
  [[nodiscard]] std::string differs(const Quantised& q, float held = 0) const {
    std::string wrong;
    for (const bool column : {false, true}) {
      if (!(column ? spec_.column : spec_.row)) continue;
      const SideBytes& from = column ? q.column : q.row;
      const std::string_view side = column ? "columnwise" : "rowwise";
      if (wrong.empty()) wrong = scales_[column].differs(from.scales, str(side, " scales"));
      if (wrong.empty()) wrong = data_[column].differs(from.data, str(side, " data"));
    }
    if (!wrong.empty()) return wrong;
    if (!amax_.guards_hold() || !health_.guards_hold() || !multiplier_.guards_hold())
      return "a byte beside amax, health or scale was written";
    if (ref::single(spec_.mode)) {
      const uint32_t before = ref::mode_of(spec_.mode).given ? bits(held) & 0x7fffffffU : 0;
      const uint32_t want = spec_.amax.value_or(std::max(q.amax, before));
      if (!equal(amax(), from_bits(want)))
        return str("amax is ", amax(), ", expected ", from_bits(want));
    }
    const uint64_t counts[3] = {q.saturated, q.flushed, q.nonfinite};
    for (int64_t i = 0; counted_ && i < 3; ++i)
      if (health_.number(i) != static_cast<float>(counts[i]))
        return str("health ", i, " is ", health_.number(i), ", expected ", counts[i]);
    return "";
  }

 private:
  Spec spec_;
  int64_t m_, k_;
  bool counted_;
  Memory data_[2], scales_[2], multiplier_, amax_, health_;
};

// The elements of a plain matrix.
inline std::vector<float> numbers(const Mat& x) {
  std::vector<float> v;
  v.reserve(static_cast<size_t>(x.rows() * x.cols()));
  for (int64_t r = 0; r < x.rows(); ++r)
    for (int64_t c = 0; c < x.cols(); ++c) v.push_back(x.at(r, c));
  return v;
}

// Rowwise, columnwise, both.
inline std::vector<Spec> sides(Spec s) {
  std::vector<Spec> list;
  for (const auto& [row, column] : {std::pair{true, false}, {false, true}, {true, true}}) {
    s.row = row, s.column = column;
    list.push_back(s);
  }
  return list;
}
// Every mode, dtype and orientation.
inline std::vector<Spec> all_specs(bool swizzled_too = false) {
  std::vector<Spec> list;
  for (const Scaling mode : kModes)
    for (const DType d : kFp8)
      for (const bool swizzled : {false, true}) {
        if (swizzled && (!ref::mode_of(mode).e8m0 || !swizzled_too)) continue;
        for (const Spec& s :
             sides({.dtype = d, .mode = mode, .swizzled = swizzled, .scale = 24.5F}))
          list.push_back(s);
      }
  return list;
}

}  // namespace tenon::test
