// Checks encoded tensors. A scale is correct if an amax within its bound produces it. A code is
// correct if a value within its bound, times the stored scale, rounds to it.
#include "support/verify_encoded.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/scaling.h"
#include "expr/evaluate.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// All possible values of an amax.
struct Interval {
  double low = 0, high = 0;
  bool nan = false, unknown = false;

  void add(const Bounded& x) {
    nan = nan || std::isnan(x.v);
    unknown = unknown || std::isinf(x.e);
    low = std::max(low, std::fabs(x.v) - x.e);
    high = std::max(high, std::fabs(x.v) + x.e);
  }
};

uint32_t bits_of(double v) {
  return __builtin_bit_cast(uint32_t, static_cast<float>(std::max(v, 0.0)));
}

class EncodedVerifier {
 public:
  EncodedVerifier(const Encoder& e, const RunArgs& args, const std::vector<Bounded>& values)
      : e_(e), f_(e.format), args_(args), values_(values), m_(args.rows), k_(e.cols) {}

  std::optional<std::string> run() {
    for (const Orientation o : kOrientations) {
      if (!e_.has(o)) continue;
      side_ = o;
      const Blocks blocks = f_.blocks(o);
      if (f_.scaling == Scaling::none)
        block({0, m_, 0, k_}, {1, 0}, true);
      else if (blocks.single())
        whole_tensor();
      else
        all_blocks(blocks);
      if (e_.counts && o == (e_.rowwise ? Orientation::rowwise : Orientation::columnwise))
        check_counts();
      if (wrong_) return wrong_;
    }
    return wrong_;
  }

 private:
  struct Area {
    int64_t r0, r1, c0, c1;
  };
  [[nodiscard]] const Bounded& at(int64_t r, int64_t c) const {
    return values_[static_cast<size_t>(r * k_ + c)];
  }
  [[nodiscard]] const View& scales() const { return args_.out[e_.scale_inv(side_)]; }
  [[nodiscard]] std::string where() const {
    return str(info(f_.dtype).name, " ", info(f_.scaling).name,
               side_ == Orientation::rowwise ? " rowwise" : " columnwise");
  }
  template <class... Parts>
  void report(const Parts&... parts) {
    if (!wrong_) wrong_ = str(where(), ": ", parts...);
  }

  // Delayed and current: the scale is an input, so it is exact.
  void whole_tensor() {
    float given = 0;
    std::memcpy(&given, args_.in[e_.scale].data, sizeof given);
    const Scale scale = info(f_.scaling).scale_given
                            ? scale_given(given)
                            : scale_of(__builtin_bit_cast(uint32_t, given) & kMagnitude, f_);
    if (scales().given() && code_at(scales(), 0) != scale.inverse)
      report("scale_inv is ", decode<DType::f32>(code_at(scales(), 0)), ", must be ",
             decode<DType::f32>(scale.inverse));
    block({0, m_, 0, k_}, scale, true);
  }

  void all_blocks(const Blocks& blocks) {
    const View& v = scales();
    const Shape used = blocks.count(m_, k_);
    const Shape all = blocks.transposed ? Shape{v.cols, v.rows} : Shape{v.rows, v.cols};
    for (int64_t i = 0; i < all.rows; ++i)
      for (int64_t j = 0; j < all.cols; ++j) {
        const uint32_t code = code_at(v, scale_offset(f_, side_, i, j, {v.rows, v.cols}, v.stride));
        if (i >= used.rows || j >= used.cols) {
          if (code != 0) report("padding of the scales (", i, ", ", j, ") is ", code);
          continue;
        }
        one_block(i, j, code,
                  {i * blocks.rows, std::min((i + 1) * blocks.rows, m_), j * blocks.cols,
                   std::min((j + 1) * blocks.cols, k_)});
      }
  }

  void one_block(int64_t i, int64_t j, uint32_t code, const Area& a) {
    Interval amax;
    for (int64_t r = a.r0; r < a.r1; ++r)
      for (int64_t c = a.c0; c < a.c1; ++c) amax.add(at(r, c));
    if (!scale_fits(code, amax))
      report("scale (", i, ", ", j, ") is ", decode(info(f_.scaling).scale, code),
             ", amax lies in [", amax.low, ", ", amax.high, "]");
    if (info(f_.scaling).scale == DType::e8m0) {
      // The multiplier for the scale code.
      const double m = code == 255 ? std::nan("") : std::ldexp(1.0, 127 - static_cast<int>(code));
      return block(a, {static_cast<float>(m), code}, true);
    }
    const float inverse = decode<DType::f32>(code);
    block(a, {static_cast<float>(1.0 / inverse), code}, f_.powers());
  }

  [[nodiscard]] bool scale_fits(uint32_t code, const Interval& amax) const {
    if (amax.unknown) return true;
    const auto inverse = [&](uint32_t bits) { return scale_of(bits, f_).inverse; };
    if (amax.nan) return code == inverse(0x7fc00000U);
    if (amax.low <= 0 && code == inverse(0)) return true;
    if (amax.high >= kOverflow32 && code == inverse(kInfinity)) return true;
    // scale_inv increases with the amax. One fp32 step covers the rounding of the bounds.
    const uint32_t low = std::max(bits_of(amax.low), 2U) - 1;
    const uint32_t high = std::min(bits_of(amax.high) + 1, kInfinity - 1);
    return inverse(low) <= code && code <= inverse(std::max(low, high));
  }

  // Checks the codes of an area whose multiplier is known, exactly or within 2 ulp.
  void block(const Area& a, const Scale& scale, bool exact) {
    const View& data = args_.out[e_.data(side_)];
    const bool transposed = side_ == Orientation::columnwise && info(f_.scaling).transposes;
    const double m = scale.multiplier;
    for (int64_t r = a.r0; r < a.r1; ++r)
      for (int64_t c = a.c0; c < a.c1; ++c) {
        const Bounded& x = at(r, c);
        Bounded q = x;
        if (f_.scaling != Scaling::none) {
          q.v = x.v * m;
          q.e = x.e * std::fabs(m);
          if (std::isfinite(q.v)) q.e += 0.5 * ulp32(q.v) + (exact ? 0 : 0x1p-22 * std::fabs(q.v));
          if (std::isinf(x.e)) q.e = kInf;
        }
        const int64_t offset = transposed ? c * data.stride + r : r * data.stride + c;
        const float got = decode(f_.dtype, code_at(data, offset));
        // A value that overflows fp32 is infinite before scaling.
        const bool overflowed = f_.scaling != Scaling::none && std::isfinite(x.v) &&
                                std::fabs(x.v) + x.e >= kOverflow32 &&
                                got == std::copysign(info(f_.dtype).max, static_cast<float>(x.v));
        if (!overflowed && !within(got, f_.dtype, q.v, q.e))
          report("element (", r, ", ", c, ") is ", got, ", exact ", q.v, " with bound ", q.e);
        if (e_.counts) classify(x, q);
      }
  }

  // The smallest and largest valid increment of a count.
  struct Range {
    uint64_t least = 0, most = 0;
    void add(bool must, bool may) {
      least += must ? 1 : 0;
      most += may || must ? 1 : 0;
    }
  };
  void classify(const Bounded& x, const Bounded& q) {
    const bool unknown = std::isinf(x.e);
    const double size = std::fabs(q.v);
    const double slack = 1.01 * q.e;
    const bool finite = std::isfinite(x.v);
    const double max = saturation_threshold(f_.dtype);
    // Half of the smallest value is a tie and rounds to zero.
    const double least = std::ldexp(1.0, -info(f_.dtype).bias - info(f_.dtype).mantissa_bits);
    const bool overflows = finite && std::fabs(x.v) + x.e >= kOverflow32;
    counts_[2].add(!finite && !unknown, unknown || overflows);
    counts_[0].add(finite && !overflows && size - slack > max,
                   unknown || (finite && size + slack > max));
    counts_[1].add(finite && std::fabs(x.v) > x.e && size + slack <= least,
                   unknown || (finite && std::fabs(x.v) + x.e > 0 && size - slack <= least));
  }
  void check_counts() {
    static constexpr std::array<std::string_view, 3> kNames{"saturated", "flushed", "non-finite"};
    const View& v = args_.out[e_.out + Encoder::health];
    for (size_t i = 0; i < counts_.size(); ++i) {
      const float got = decode<DType::f32>(code_at(v, static_cast<int64_t>(i)));
      if (got < static_cast<float>(counts_[i].least) || got > static_cast<float>(counts_[i].most))
        report(kNames[i], " count is ", got, ", must be ", counts_[i].least, " to ",
               counts_[i].most);
    }
    counts_ = {};
  }

  const Encoder& e_;
  const Format& f_;
  const RunArgs& args_;
  const std::vector<Bounded>& values_;
  int64_t m_, k_;
  Orientation side_ = Orientation::rowwise;
  std::array<Range, 3> counts_;
  std::optional<std::string> wrong_;
};

}  // namespace

uint32_t code_at(const View& v, int64_t offset) {
  uint32_t code = 0;
  const auto bytes = static_cast<size_t>(info(v.dtype).bytes);
  std::memcpy(&code, static_cast<const char*>(v.data) + offset * static_cast<int64_t>(bytes),
              bytes);
  return code;
}

std::optional<std::string> verify_encoded(const Encoder& encoder, const RunArgs& args,
                                          const std::vector<Bounded>& values) {
  return EncodedVerifier(encoder, args, values).run();
}

}  // namespace tenon
