// Measures a tensor tile by tile. Memory use stays small, and counts stay exact in fp32. Tiles
// start at multiples of every block size, so they give the same results as the whole tensor.
#include "cli/measure.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

namespace {

constexpr int64_t kTileCols = 1 << 14, kTileElements = 1 << 22;

template <class F>
void for_tiles(Shape m, F f) {
  if (m.rows == 0 || m.cols == 0) return;
  const int64_t cols = std::min(m.cols, kTileCols);
  const int64_t rows = std::max<int64_t>(128, kTileElements / cols / 128 * 128);
  for (int64_t r = 0; r < m.rows; r += rows)
    for (int64_t c = 0; c < m.cols; c += cols)
      f(Tile{r, std::min(rows, m.rows - r), c, std::min(cols, m.cols - c)});
}

// Calls f(value, index) for every element of a plain matrix.
template <class F>
void for_elements(const View& x, F f) {
  const auto run = [&]<DType d>() {
    const auto* base = static_cast<const std::byte*>(x.data);
    for (int64_t r = 0, i = 0; r < x.rows; ++r)
      for (int64_t c = 0; c < x.cols; ++c, ++i) {
        Storage<d> code;
        std::memcpy(&code, base + (r * x.stride + c) * info(d).bytes, sizeof code);
        f(decode<d>(code), static_cast<size_t>(i));
      }
  };
  if (x.dtype == DType::f32) return run.template operator()<DType::f32>();
  if (x.dtype == DType::f16) return run.template operator()<DType::f16>();
  run.template operator()<DType::bf16>();
}

// v must be finite and nonzero.
size_t bin_of(float v) {
  const uint32_t magnitude = __builtin_bit_cast(uint32_t, v) & 0x7fffffffU;
  const auto field = static_cast<int>(magnitude >> 23);
  const int exponent = field > 0 ? field - 127 : std::bit_width(magnitude) - 150;
  return static_cast<size_t>(exponent - kLeastExponent);
}

View single(float& value) { return matrix(&value, DType::f32, 1, 1); }

// The delayed-scaling multiplier for a history whose maximum is the amax of this tensor.
float warm_scale(const Census& census, DType dtype) {
  float history = census.finite_amax;  // a history ignores non-finite values
  float scale = 1;
  update({.history = single(history), .scale = single(scale), .dtype = dtype});
  return scale;
}

class Meter {
 public:
  Meter(const Trial& trial, const FileTensor& t, const Census& census) : tensor_(t) {
    out_.trial = trial;
    amax_ = census.amax;
    const bool delayed = trial.format.scaling == Scaling::delayed;
    if (delayed && trial.scale == 0) out_.trial.scale = warm_scale(census, trial.format.dtype);
  }

  Outcome run() {
    for_tiles(tensor_.matrix, [&](const Tile& t) { measure(t); });
    finish();
    return std::move(out_);
  }

 private:
  void measure(const Tile& t) {
    const Format& f = out_.trial.format;
    const Orientation o = out_.trial.orientation;
    const View x = tensor_.tile(t, converted_);
    const Shape data = f.data_shape(t.rows, t.cols, o);
    const Shape scales = f.scale_shape(t.rows, t.cols, o);
    const DType scale_dtype = info(f.scaling).scale;
    codes_.resize(static_cast<size_t>(data.rows * data.cols));
    scales_.resize(static_cast<size_t>(scales.rows * scales.cols * info(scale_dtype).bytes));
    back_.resize(codes_.size());
    const Encoding e{matrix(codes_.data(), f.dtype, data.rows, data.cols),
                     matrix(scales_.data(), scale_dtype, scales.rows, scales.cols)};
    const Tensor coded = o == Orientation::rowwise ? Tensor(f, e) : Tensor(f, {}, e);
    Tensor written = coded;
    std::array<float, 3> health{};
    written.health = matrix(health.data(), DType::f32, 1, 3);
    if (f.scaling == Scaling::delayed) written.scale = single(out_.trial.scale);
    if (f.scaling == Scaling::current) written.amax = single(amax_), written.amax_given = true;
    quantize(x, written);
    dequantize(coded, matrix(back_.data(), DType::f32, t.rows, t.cols));
    out_.saturated += static_cast<int64_t>(health[0]);
    out_.flushed += static_cast<int64_t>(health[1]);
    out_.nonfinite += static_cast<int64_t>(health[2]);
    compare(x);
    collect(t, e.scale_inv);
  }

  void compare(const View& x) {
    for_elements(x, [&](float v, size_t i) {
      const float q = back_[i];
      if (!std::isfinite(v)) return;
      if (!std::isfinite(q)) {
        ++out_.spoiled;
        return;
      }
      const double error = std::fabs(static_cast<double>(v) - static_cast<double>(q));
      out_.max_error = std::max(out_.max_error, error);
      if (v == 0) return;
      const double value = std::fabs(static_cast<double>(v));
      Bin& bin = out_.bins[bin_of(v)];
      ++bin.count;
      bin.flushed += q == 0 ? 1 : 0;
      bin.squares += value * value;
      bin.errors += error * error;
      if (q != 0) out_.worst_relative = std::max(out_.worst_relative, error / value);
    });
  }

  // True if any element of a block of the tile is nonzero.
  [[nodiscard]] bool holds_something(const Tile& t, const Blocks& blocks, int64_t i,
                                     int64_t j) const {
    if (blocks.single()) return true;
    const bool transposed = out_.trial.orientation == Orientation::columnwise &&
                            info(out_.trial.format.scaling).transposes;
    const int64_t row_end = std::min((i + 1) * blocks.rows, t.rows);
    const int64_t col_end = std::min((j + 1) * blocks.cols, t.cols);
    for (int64_t r = i * blocks.rows; r < row_end; ++r)
      for (int64_t c = j * blocks.cols; c < col_end; ++c)
        if (codes_[static_cast<size_t>(transposed ? c * t.rows + r : r * t.cols + c)] & 0x7fU)
          return true;
    return false;
  }

  void collect(const Tile& t, const View& scales) {
    const Format& f = out_.trial.format;
    const Orientation o = out_.trial.orientation;
    const Blocks blocks = f.blocks(o);
    const Shape count = blocks.count(t.rows, t.cols);
    const int bytes = info(scales.dtype).bytes;
    for (int64_t i = 0; i < count.rows; ++i)
      for (int64_t j = 0; j < count.cols; ++j) {
        const int64_t at = scale_offset(f, o, i, j, {scales.rows, scales.cols}, scales.stride);
        uint32_t code = 0;
        std::memcpy(&code, scales_.data() + at * bytes, static_cast<size_t>(bytes));
        seen_.push_back(code);
        const double s = decode(scales.dtype, code);
        if (!std::isfinite(s) || !holds_something(t, blocks, i, j)) continue;
        out_.most_scale = std::max(out_.most_scale, s);
        out_.least_scale = out_.least_scale == 0 ? s : std::min(out_.least_scale, s);
      }
    if (seen_.size() > crowd_) keep_distinct();
  }

  void keep_distinct() {
    std::ranges::sort(seen_);
    seen_.erase(std::unique(seen_.begin(), seen_.end()), seen_.end());
    crowd_ = std::max(crowd_, 2 * seen_.size());
  }

  void finish() {
    const auto [rows, cols] = tensor_.matrix;
    const Format& f = out_.trial.format;
    const Orientation o = out_.trial.orientation;
    double squares = 0;
    double errors = 0;
    for (const Bin& b : out_.bins) squares += b.squares, errors += b.errors;
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    out_.relative_rms = errors > 0 ? std::sqrt(errors / squares) : 0;
    out_.snr_db = errors > 0 ? 10 * std::log10(squares / errors) : kInfinite;
    const DType scale_dtype = info(f.scaling).scale;
    const Shape scales = f.scale_shape(rows, cols, o);
    const Shape used = f.blocks(o).count(rows, cols);
    out_.bytes_before = tensor_.elements() * bytes_of(tensor_.type);
    out_.bytes_after = tensor_.elements() * info(f.dtype).bytes +
                       scales.rows * scales.cols * info(scale_dtype).bytes;
    out_.scales = used.rows * used.cols;
    keep_distinct();
    out_.distinct_scales = static_cast<int64_t>(seen_.size());
  }

  const FileTensor& tensor_;
  Outcome out_;
  float amax_ = 0;
  std::vector<float> converted_, back_;
  std::vector<uint8_t> codes_;
  std::vector<std::byte> scales_;
  // Codes of scales. Duplicates are removed when there are crowd_ of them.
  std::vector<uint32_t> seen_;
  size_t crowd_ = size_t{1} << 20;
};

std::string listed_modes() {
  std::string text;
  for (const ScalingInfo& s : kScalings)
    if (s.name != "none") text += str(s.name, ", ");
  return text + "all";
}

}  // namespace

std::vector<Trial> parse_trials(const std::string& text, const TrialOptions& options) {
  constexpr std::string_view kOp = "quantize --recipe";
  std::vector<Trial> result;
  bool uses_scale = false;
  bool uses_rule = false;
  const auto add = [&](DType dtype, Scaling scaling) {
    Trial r;
    r.name = str(info(dtype).name, ":", info(scaling).name);
    if (std::ranges::any_of(result, [&](const Trial& o) { return o.name == r.name; })) return;
    r.format = {.dtype = dtype, .scaling = scaling};
    if (options.columnwise) r.orientation = Orientation::columnwise;
    if (scaling == Scaling::delayed) {
      r.scale = options.scale;
      uses_scale = true;
    } else if (scaling != Scaling::mxfp8) {
      r.format.eps = options.eps;
      if (options.exact_scales) r.format.power_of_two = false;
      uses_rule = true;
    }
    result.push_back(std::move(r));
  };
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, end - at);
    at = end + 1;
    const size_t colon = item.find(':');
    const std::string type = colon == std::string::npos ? "" : item.substr(0, colon);
    const std::string mode = colon == std::string::npos ? item : item.substr(colon + 1);
    const auto dtype = colon == std::string::npos ? DType::e4m3 : dtype_named(type);
    require(dtype == DType::e4m3 || dtype == DType::e5m2, kOp, " ", clean(item, 40), ": '",
            clean(type, 16), "' is no format to quantise to; give e4m3 or e5m2");
    const auto scaling = scaling_named(mode);
    if (mode == "all") {
      for (const DType d : {DType::e4m3, DType::e5m2})
        for (size_t s = 1; s < kScalings.size(); ++s)
          if (colon == std::string::npos || d == *dtype) add(d, static_cast<Scaling>(s));
      continue;
    }
    require(scaling && *scaling != Scaling::none, kOp, " ", clean(item, 40), ": '", clean(mode, 24),
            "' is no scaling mode; give one of ", listed_modes());
    add(*dtype, *scaling);
  }
  require(uses_scale || options.scale == 0, "quantize --scale ", options.scale,
          ": only delayed scaling is given its scale; leave it out or add the recipe delayed");
  require(
      uses_rule || (options.eps == 0 && !options.exact_scales),
      "quantize: --eps and --exact-scales belong to current, block1x128 and block128x128; leave ",
      "them out or add one of these recipes");
  return result;
}

Census take_census(const FileTensor& t) {
  Census census;
  census.elements = t.elements();
  std::vector<float> converted;
  for_tiles(t.matrix, [&](const Tile& tile) {
    const View x = t.tile(tile, converted);
    float amax = 0;
    quantize(Quantize{.x = x, .amax = single(amax)});
    // Compares bits, so that NaN is the largest value.
    const auto bits = [](float v) { return __builtin_bit_cast(uint32_t, v); };
    if (bits(amax) > bits(census.amax)) census.amax = amax;
    for_elements(x, [&](float v, size_t) {
      if (v == 0) {
        ++census.zeros;
      } else if (!std::isfinite(v)) {
        ++census.nonfinite;
      } else {
        ++census.bins[bin_of(v)].count;
        census.finite_amax = std::max(census.finite_amax, std::fabs(v));
      }
    });
  });
  return census;
}

Outcome apply(const Trial& trial, const FileTensor& t, const Census& census) {
  return Meter(trial, t, census).run();
}

int Outcome::least_exponent() const { return least_scale > 0 ? std::ilogb(least_scale) : 0; }
int Outcome::most_exponent() const { return most_scale > 0 ? std::ilogb(most_scale) : 0; }

}  // namespace tenon::cli
