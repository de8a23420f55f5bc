// Computes Σ a·b and Σ |a·b| in float64. The latter bounds the fp32 error.
#include "support/verify_product.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tenon {

namespace {

constexpr double kUnit = 0x1p-24;
constexpr double kSmallest = 0x1p-126;  // bf16 matrix units flush smaller values to 0
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One operand, decoded. Values with block scales include the scale. A per-tensor scale is separate.
struct Side {
  std::vector<double> values;  // row by row, with k contiguous
  double scale = 1;
};

Side decode_side(const Matrix& m, const RunArgs& args, int64_t lanes, int64_t inner, bool k_first) {
  const View& data = args.in[m.arg];
  const Blocks blocks = m.format.blocks(m.orientation);
  const bool turned = m.orientation == Orientation::columnwise && info(m.format.scaling).transposes;
  const View scales = m.format.scaling == Scaling::none ? View{} : args.in[m.arg + 1];
  const auto scale_at = [&](int64_t offset) {
    return decode(scales.dtype, code_at(scales, offset));
  };
  Side side;
  if (m.format.scaling != Scaling::none && blocks.single()) side.scale = scale_at(0);
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t k = 0; k < inner; ++k) {
      const int64_t r = k_first ? k : lane;
      const int64_t c = k_first ? lane : k;
      const int64_t place = turned ? c * data.stride + r : r * data.stride + c;
      float v = decode(m.format.dtype, code_at(data, place));
      if (!blocks.single())
        v *= scale_at(scale_offset(m.format, m.orientation, r / blocks.rows, c / blocks.cols,
                                   {scales.rows, scales.cols}, scales.stride));
      side.values.push_back(v);
    }
  return side;
}

}  // namespace

std::vector<Bounded> products(const Step& step, const RunArgs& args, double lost) {
  const Gemm& g = *step.gemm();
  const int64_t rows = step.body_rows(args.rows);
  const int64_t inner = g.inner_for(args.rows);
  const Side a = decode_side(g.a, args, rows, inner, g.a.transposed);
  const Side b = decode_side(g.b, args, g.cols, inner, !g.b.transposed);
  // One rounding per addition, two for the scales. Subnormal values have an absolute error.
  const double n = static_cast<double>(inner) + 2;
  const double relative = n * kUnit / (1 - n * kUnit) + lost;
  const bool strict = step.precision == Precision::strict;
  const double absolute = n * (strict ? 0x1p-149 : 2 * kSmallest);
  std::vector<Bounded> all;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < g.cols; ++c) {
      const double* x = a.values.data() + r * inner;
      const double* y = b.values.data() + c * inner;
      double sum = 0;
      double magnitude = 0;  // sum of finite |terms|
      double flushed = 0;
      for (int64_t k = 0; k < inner; ++k) {
        const double term = x[k] * y[k];
        sum += term;
        if (!std::isfinite(term)) continue;
        magnitude += std::fabs(term);
        if (!strict && (std::fabs(x[k]) < kSmallest || std::fabs(y[k]) < kSmallest))
          flushed += std::fabs(term);
      }
      const double first = sum * a.scale;
      Bounded v{first * b.scale, relative * magnitude + absolute + flushed};
      v.e = (v.e * std::fabs(a.scale) + 0x1p-149) * std::fabs(b.scale) + 0x1p-149;
      const double kept = static_cast<float>(v.v);
      if (std::isfinite(kept)) v.e += std::fabs(kept - v.v);
      // If a partial sum may have overflowed, the result may be inf - inf.
      double most = magnitude;
      for (const double v64 : {first, v.v})
        if (std::isfinite(v64)) most = std::max(most, std::fabs(v64));
      if (most * (1 + relative) >= kOverflow32 || std::isnan(v.e)) v.e = kInfinity;
      all.push_back({kept, v.e});
    }
  return all;
}

}  // namespace tenon
