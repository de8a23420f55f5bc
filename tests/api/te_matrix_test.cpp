// The C++ test matrix of Transformer Engine for casts and activations as a table, and additional
// cases. Strict results must equal the scalar reference bit by bit. Shapes with more than 2^20
// elements need --large or TENON_LARGE=1.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <set>

#include "support/quantize_reference.h"

namespace tenon::test {
namespace {

bool large = false;

enum class Fill : uint8_t { uniform, zeros, subnormals, near_max, infinities, all };

// Folds leading dimensions into rows: "5x4x3x160" is 60 x 160.
Shape parse(std::string_view text) {
  Shape s{1, 0};
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size()) break;
    if (text[i] == 'x') {
      s.rows *= s.cols;
      s.cols = 0;
    } else {
      s.cols = 10 * s.cols + (text[i] - '0');
    }
  }
  return s;
}

float sample(Fill fill, DType d, uint64_t i) {
  uint64_t h = (i + 1) * 0x9e3779b97f4a7c15U;
  h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9U;
  h ^= h >> 29;
  const auto u = static_cast<float>(h & 0xffffff) * 0x1p-24F;
  const float uniform = u * 3 - 2;  // Transformer Engine's [-2, 1]
  const float sign = h >> 63 ? -1.0F : 1.0F;
  const float max = d == DType::f16 ? 65504.0F : d == DType::bf16 ? 0x1.fep127F : 0x1.fffffep127F;
  switch (fill) {
    case Fill::zeros:
      return h & 1 ? 0.0F : -0.0F;
    case Fill::subnormals:
      return sign * u * (d == DType::f16 ? 0x1p-14F : 0x1p-126F);
    case Fill::near_max:
      return sign * max * (1 - u / 8);
    case Fill::infinities:
      return h % 97 == 0 ? sign * kInf : h % 101 == 0 ? kNan : uniform;
    default:
      return uniform;
  }
}

// A matrix with the data of the table, and its values.
struct Input {
  Memory memory;
  DType dtype;
  int64_t rows, cols;
  std::vector<float> values;

  Input(DType d, int64_t m, int64_t k, Fill fill, uint64_t seed, bool odd)
      : memory(d, m, k, odd ? 3 : 0, odd ? 1 : 0),
        dtype(d),
        rows(m),
        cols(k),
        values(static_cast<size_t>(m * k)) {
    const size_t size = d == DType::f32 ? 4 : 2;
    std::vector<uint8_t> dense(values.size() * size);
    ref::parallel(m, m * k > 1 << 16, [&](int64_t r) {
      for (int64_t c = 0; c < k; ++c) {
        const auto i = static_cast<size_t>(r * k + c);
        const uint32_t code = encode_ref(d, sample(fill, d, i + (seed << 32)));
        std::memcpy(dense.data() + i * size, &code, size);
        values[i] = decode_ref(d, code);
      }
    });
    memory.put(dense.data());
  }
  [[nodiscard]] View view() const { return memory.view(); }
};

// One operation on one input. The table defines the outputs.
struct Op {
  std::string act = {};  // empty: a cast
  bool back = false, dbias = false;
  int64_t interleave = 0;
  bool scaled = false;
  DType scale_dtype = DType::f32;

  [[nodiscard]] std::string text() const {
    return str(act.empty() ? "cast" : act, back ? " backward" : "", dbias ? " dbias" : "",
               interleave ? str(" interleaved ", interleave) : "", scaled ? " scaled" : "");
  }
};

const Hand* hand(const std::string& act) {
  for (const Row& r : rows())
    if (act == r.act) return &r.f;
  return nullptr;
}

// One operation: its inputs, its plain strict results, and comparisons with any format.
class Trial {
 public:
  Trial(const Op& op, DType in, int64_t m, int64_t h, Fill fill = Fill::uniform, bool odd = false)
      : op_(op),
        f_(op.act.empty() ? Activation{} : activation(op.act)),
        gated_(!op.act.empty() && f_.inputs == 2),
        m_(m),
        h_(h),
        x_(in, m, gated_ ? 2 * h : h, fill, 1, odd),
        grad_(in, op.back ? m : 0, h, fill == Fill::near_max ? Fill::uniform : fill, 2, odd),
        s_(op.scale_dtype, m, 1, Fill::uniform, 3, odd),
        fill_(fill),
        odd_(odd) {
    if (op.scaled) f_ = tenon::scaled(f_);
    cols_ = op.back ? x_.cols : h;
    if (op.act.empty()) {
      values_ = x_.values;
    } else {
      values_.resize(static_cast<size_t>(m * cols_));
      go(matrix(values_.data(), DType::f32, m, cols_), {}, {}, {});
      near_hand();
    }
    if (op.dbias) sums_ = column_sums();
  }

  // Plain output: one rounding of the strict value.
  void plain(DType out) const {
    const Memory y(out, m_, cols_, odd_ ? 3 : 0, odd_ ? 1 : 0), amax(DType::f32, 1, 1),
        sums(x_.dtype, 1, x_.cols);
    go(y.view(), sums.view(), amax.view(), {});
    const size_t size = out == DType::f32 ? 4 : 2;
    const std::vector<uint8_t> got = y.dense();
    for (size_t i = 0; i < values_.size(); ++i) {
      uint32_t code = 0;
      std::memcpy(&code, got.data() + i * size, size);
      if (!equal(decode_ref(out, code), rounded_ref(out, values_[i])))
        return fail(info(out).name,
                    str("element ", i, " is ", decode_ref(out, code), " of ", values_[i]));
    }
    if (!y.guards_hold()) fail(info(out).name, "a byte outside was written");
    check_beside(info(out).name, amax, sums);
  }

  void quantised(const Spec& s, const Options& options = kStrict) const {
    const Encoded y(s, m_, cols_, odd_);
    const Memory amax(DType::f32, 1, 1), sums(x_.dtype, 1, x_.cols);
    go(y.tensor(), sums.view(), amax.view(), {}, options);
    const std::string wrong = y.differs(quantise_ref(s, values_, m_, cols_));
    if (!wrong.empty()) return fail(s.text(), wrong);
    check_beside(s.text(), amax, sums);
  }

  // Row sums of grad·f(x), summed with a tree.
  void scale_gradient(DType out) const {
    const Memory ds(out, m_, 1);
    std::vector<float> dx(values_.size()), unscaled(static_cast<size_t>(m_ * h_));
    go(matrix(dx.data(), DType::f32, m_, cols_), {}, {}, ds.view());
    forward(activation(op_.act),
            {.x = x_.view(), .y = matrix(unscaled.data(), DType::f32, m_, h_), .layout = layout()},
            kStrict);
    const std::vector<uint8_t> bytes = ds.dense();
    for (int64_t r = 0; r < m_; ++r) {
      std::vector<float> row;
      for (int64_t c = 0; c < h_; ++c) {
        const auto i = static_cast<size_t>(r * h_ + c);
        row.push_back(grad_.values[i] * unscaled[i]);
      }
      const float want = rounded_ref(out, tree(row));
      uint32_t code = 0;
      const size_t size = out == DType::f32 ? 4 : 2;
      std::memcpy(&code, bytes.data() + static_cast<size_t>(r) * size, size);
      if (!equal(decode_ref(out, code), want)) return fail("dscale", str("row ", r));
    }
  }

  [[nodiscard]] int64_t cols() const { return cols_; }

 private:
  [[nodiscard]] Layout layout() const {
    return op_.interleave ? Layout::interleaved(op_.interleave) : Layout{};
  }
  void go(const Tensor& y, const View& sums, const View& amax, const View& ds,
          const Options& options = kStrict) const {
    const View dbias = op_.dbias ? sums : View{};
    const View scale = op_.scaled ? s_.view() : View{};
    if (op_.act.empty())
      quantize({.x = x_.view(), .y = y, .dbias = dbias, .amax = amax}, options);
    else if (!op_.back)
      forward(f_, {.x = x_.view(), .scale = scale, .y = y, .amax = amax, .layout = layout()},
              options);
    else
      backward(f_,
               {.grad = grad_.view(),
                .x = x_.view(),
                .scale = scale,
                .dx = y,
                .dbias = dbias,
                .dscale = ds,
                .amax = amax,
                .layout = layout()},
               options);
  }

  void fail(std::string_view to, const std::string& wrong) const {
    ADD_FAILURE() << op_.text() << " " << info(x_.dtype).name << " " << m_ << "x" << h_ << " fill "
                  << static_cast<int>(fill_) << (odd_ ? " odd" : "") << " to " << to << ": "
                  << wrong;
  }

  // Compares some strict fp32 values with hand-written formulas, within the fp32 tolerance of the
  // matrix.
  void near_hand() const {
    const Hand* f = hand(op_.act);
    if (!f || fill_ != Fill::uniform || m_ * h_ == 0) return;
    const int64_t n = m_ * h_;
    for (int64_t at = 0; at < n; at += std::max<int64_t>(1, n / 257)) {
      const int64_t r = at / h_, c = at % h_;
      const int64_t k = op_.interleave;
      const auto column = [&](int half) {
        return !gated_ ? c : k ? c / k * 2 * k + half * k + c % k : half * h_ + c;
      };
      const auto value = [&](int half) {
        return Real(x_.values[static_cast<size_t>(r * x_.cols + column(half))]);
      };
      const Real a = value(0), b = gated_ ? value(1) : 0;
      const Real s = op_.scaled ? s_.values[static_cast<size_t>(r)] : 1;
      for (int half = 0; half < (op_.back && gated_ ? 2 : 1); ++half) {
        Real want = (*f)(a, b) * s;
        if (op_.back) {
          constexpr Real e = 1e-6L;
          if (std::fabs(a) < 1e-4L) continue;  // possibly a kink
          const Real slope = half ? ((*f)(a, b + e) - (*f)(a, b - e)) / (2 * e)
                                  : ((*f)(a + e, b) - (*f)(a - e, b)) / (2 * e);
          want = grad_.values[static_cast<size_t>(at)] * slope * s;
        }
        const int64_t to = op_.back ? r * x_.cols + column(half) : at;
        const float got = values_[static_cast<size_t>(to)];
        if (!(std::fabs(got - want) <= 1e-6L + 5e-6L * std::fabs(want)))
          return fail("float64",
                      str("element ", to, " is ", got, ", exact ", static_cast<double>(want)));
      }
    }
  }

  // The adjacent-pair tree, on whole rows.
  [[nodiscard]] std::vector<float> column_sums() const {
    if (m_ == 0) return std::vector<float>(static_cast<size_t>(cols_), 0.0F);
    std::vector<float> v = values_;
    const int64_t k = cols_;
    for (int64_t n = m_; n > 1; n = (n + 1) / 2)
      for (int64_t i = 0; i < (n + 1) / 2; ++i)
        for (int64_t c = 0; c < k; ++c) {
          const float* two = v.data() + 2 * i * k + c;
          v[static_cast<size_t>(i * k + c)] = 2 * i + 1 < n ? two[0] + two[k] : two[0];
        }
    v.resize(static_cast<size_t>(k));
    return v;
  }

  void check_beside(std::string_view to, const Memory& amax, const Memory& sums) const {
    const uint32_t want = ref::amax_of(values_.data(), m_, cols_);
    if (!equal(amax.number(), from_bits(want)))
      fail(to, str("amax is ", amax.number(), ", expected ", from_bits(want)));
    if (!op_.dbias) return;
    const size_t size = x_.dtype == DType::f32 ? 4 : 2;
    const std::vector<uint8_t> got = sums.dense();
    for (size_t c = 0; c < sums_.size(); ++c) {
      uint32_t code = 0;
      std::memcpy(&code, got.data() + c * size, size);
      if (!equal(decode_ref(x_.dtype, code), rounded_ref(x_.dtype, sums_[c])))
        return fail(to, str("dbias ", c, " is ", decode_ref(x_.dtype, code), " of ", sums_[c]));
    }
  }

  Op op_;
  Activation f_;
  bool gated_;
  int64_t m_, h_, cols_ = 0;
  Input x_, grad_, s_;
  Fill fill_;
  bool odd_;
  std::vector<float> values_, sums_;
};

// A row of the matrix: operations x shapes x input dtypes x formats.
struct Suite {
  std::vector<Op> ops;
  std::vector<const char*> shapes;
  std::vector<Spec> outs;
  std::vector<DType> plain = {};
};

constexpr int64_t kSmall = 1 << 17, kDefault = 1 << 20, kHuge = 1 << 24;

// Small shapes run the full product. Larger shapes rotate the input and output dtypes. The largest
// also rotate the formats.
void run(const Suite& suite) {
  size_t turn = 0;
  for (const char* shape : suite.shapes) {
    const auto [m, h] = parse(shape);
    const int64_t n = m * h;
    if (n > kDefault && !large) continue;
    for (const Op& op : suite.ops) {
      ++turn;
      for (size_t i = 0; i < 3; ++i) {
        if (n > kSmall && i != turn % 3) continue;
        const Trial one(op, kPlain[i], m, h);
        for (size_t k = 0; k < suite.plain.size(); ++k)
          if (n <= kSmall || k == turn % suite.plain.size()) one.plain(suite.plain[k]);
        for (size_t k = 0; k < suite.outs.size(); ++k) {
          const Spec& s = suite.outs[k];
          if (n > kSmall && s.dtype != kFp8[turn % 2]) continue;
          if (n > kHuge && suite.outs.size() > 2 && (k / 2 + turn) % 3 != 0) continue;
          one.quantised(s);
        }
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

std::vector<Spec> specs(std::initializer_list<Scaling> modes, std::initializer_list<int> which) {
  std::vector<Spec> list;
  for (const Scaling mode : modes)
    for (const int w : which)
      for (const DType d : kFp8)
        list.push_back(
            {.dtype = d, .mode = mode, .row = w != 1, .column = w != 0, .scale = 0x1.3p4F});
  return list;
}
std::vector<Op> ops(std::initializer_list<const char*> acts, bool back, bool dbias = false) {
  std::vector<Op> list;
  for (const char* a : acts) list.push_back({.act = a, .back = back, .dbias = dbias});
  return list;
}
std::vector<Op> operator+(std::vector<Op> a, const std::vector<Op>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr auto kDelayed = Scaling::delayed, kCurrent = Scaling::current, kMx = Scaling::mxfp8;
const std::vector<DType> kAllPlain{DType::f32, DType::f16, DType::bf16};
const auto kActs = {"gelu", "silu", "relu", "qgelu", "srelu"};
const auto kGluActs = {"geglu", "reglu", "swiglu", "qgeglu", "sreglu"};

// test_act: every output type forward, plain types backward.
TEST(TeMatrix, Activations) {
  const std::vector<const char*> shapes{"2048x12288", "768x2816", "256x65536", "65536x128",
                                        "256x256",    "257x259",  "128x129"};
  run({ops(kActs, false) + ops(kGluActs, false), shapes, specs({kDelayed}, {0}), kAllPlain});
  run({ops(kActs, true) + ops(kGluActs, true), shapes, {}, kAllPlain});
}

// test_cast, test_cast_current_scaling.
TEST(TeMatrix, Cast) {
  run({{Op{}},
       {"16", "16000", "128x128", "256x256", "768x1024", "256x65536", "2048x12288", "65536x128",
        "65536x160", "16384x1616", "1x128", "1x1296", "1x16", "5x160", "5x4x3x160", "217x256"},
       specs({kDelayed, kCurrent}, {0}),
       kAllPlain});
}

// test_cast_dbias, test_cast_dbias_dgelu.
TEST(TeMatrix, CastDbias) {
  run({{Op{.dbias = true}, Op{.act = "gelu", .back = true, .dbias = true}},
       {"128x128", "256x256", "768x1024", "256x65536", "2048x12288", "65536x128", "65536x160",
        "16384x1616", "1x128", "1x1296", "1x16", "5x160", "5x4x3x160", "217x256"},
       specs({kDelayed, kCurrent}, {0})});
}

// test_cast_transpose, test_cast_transpose_current_scaling.
TEST(TeMatrix, CastTranspose) {
  run({{Op{}},
       {"2048x12288", "768x1024", "256x65536", "65536x128", "256x256", "120x2080", "8x8", "1x3221",
        "2333x1", "1481x677"},
       specs({kDelayed, kCurrent}, {2})});
}

// test_cast_transpose_dbias, test_cast_transpose_dbias_dgelu.
TEST(TeMatrix, CastTransposeDbias) {
  run({{Op{.dbias = true}, Op{.act = "gelu", .back = true, .dbias = true}},
       {"64x400", "2048x12288", "768x1024", "256x65536", "65536x128", "256x256"},
       specs({kDelayed}, {2})});
}

// test_cast_transpose_dgeglu.
TEST(TeMatrix, CastTransposeDgeglu) {
  run({ops({"geglu"}, true),
       {"64x400", "4096x2048", "768x2816", "256x5120", "128x10240", "256x256"},
       specs({kDelayed}, {2})});
}

// test_cast_gated_swiglu.
TEST(TeMatrix, CastGatedSwiglu) {
  run({ops({"swiglu"}, true),
       {"128x128", "256x256", "768x1024", "256x65536", "2048x12288", "65536x128", "217x256", "1296",
        "5x4x3x160"},
       specs({kDelayed}, {0})});
}

// test_cast_mxfp8: {cast, + dbias, + dbias + dact, + dact, + act}. Both encodings replace 32x32
// blocks.
TEST(TeMatrix, Mxfp8) {
  run({std::vector<Op>{Op{}, Op{.dbias = true}} + ops({"gelu"}, true, true) + ops({"gelu"}, true) +
           ops({"gelu"}, false),
       {"1x16", "16x48", "65x80", "127x400", "128x128", "993x512", "1024", "8x32x1024",
        "16x8x4x512", "8192x7168"},
       specs({kMx}, {0, 1, 2})});
}

TEST(TeMatrix, Mxfp8Swizzled) {
  std::vector<Spec> outs = specs({kMx}, {0, 1, 2});
  for (Spec& s : outs) s.swizzled = true;
  run({{Op{}},
       {"1x32", "16x64", "65x96", "128x128", "256x256", "993x512", "512x1024", "768x1024",
        "8192x128", "2048x6144", "16384x1024", "4096x32768"},
       outs});
}

// test_cast_mxfp8_gated_swiglu.
TEST(TeMatrix, Mxfp8GatedSwiglu) {
  run({ops({"swiglu"}, false) + ops({"swiglu"}, true),
       {"1x32", "16x64", "65x96", "128x128", "256x256", "993x512", "768x1024", "8192x128",
        "577x1632"},
       specs({kMx}, {0, 1, 2})});
}

// test_cast_float8blockwise: 1D and 2D, with and without powers of two, eps 0 and 1, with and
// without the transposed encoding.
TEST(TeMatrix, Float8Blockwise) {
  std::vector<Spec> outs;
  for (const bool pow2 : {true, false})
    for (const float eps : {0.0F, 1.0F})
      for (Spec s : specs({Scaling::block1x128, Scaling::block128x128}, {0, 2})) {
        s.pow2 = pow2, s.eps = eps;
        outs.push_back(s);
      }
  run({{Op{}},
       {"1x16", "65x96", "256x256", "993x512", "256x65536", "4096x1632", "1024x1", "16x512", "1024",
        "8x32x1024", "16x8x4x512"},
       outs});
}

// test_scaled_activation, and quantised results.
TEST(TeMatrix, ScaledActivations) {
  for (const char* act : {"swiglu", "clamped_swiglu", "situglu", "srelu"})
    for (const char* shape : {"17x64", "13x100", "1024x2048"}) {
      const auto [m, h] = parse(shape);
      if (m * h > kDefault && !large) continue;
      for (const int64_t interleave : {0, 32})
        for (const DType in : kPlain)
          for (const DType scale : kPlain) {
            if (interleave && (activation(act).inputs == 1 || h % interleave)) continue;
            if (m * h > kSmall && in != scale) continue;
            Op op{.act = act, .interleave = interleave, .scaled = true, .scale_dtype = scale};
            const Trial forward_run(op, in, m, h);
            forward_run.plain(in);
            op.back = true;
            const Trial backward_run(op, in, m, h);
            backward_run.plain(in);
            backward_run.scale_gradient(scale);
            for (const Spec& s : specs({kCurrent, kMx}, {2})) {
              forward_run.quantised(s);
              backward_run.quantised(s);
            }
            if (HasFailure()) return;
          }
    }
}

// test_dequantize_*.
TEST(TeMatrix, Dequantize) {
  for (const char* shape :
       {"1x16", "16x48", "65x96", "128x128", "256x256", "993x512", "768x1024"}) {
    const auto [m, k] = parse(shape);
    size_t turn = 0;
    for (const Spec& s : all_specs(true)) {
      if (m * k > kSmall && ++turn % 3) continue;
      const Input x(DType::f32, m, k, Fill::uniform, 1, false);
      const Quantised q = quantise_ref(s, x.values, m, k);
      Encoded codes(s, m, k);
      codes.put(q);
      const std::vector<float> want = dequantise_ref(s, q, m, k, !s.row);
      for (const DType d : kPlain) {
        const Memory y(d, m, k);
        dequantize(codes.input(), y.view());
        std::vector<uint8_t> bytes(want.size() * (d == DType::f32 ? 4 : 2));
        for (size_t i = 0; i < want.size(); ++i) {
          const uint32_t code = encode_ref(d, want[i]);
          const size_t size = bytes.size() / want.size();
          std::memcpy(bytes.data() + i * size, &code, size);
        }
        EXPECT_EQ(y.differs(bytes, "dequantised"), "") << shape << " " << s.text();
      }
    }
  }
}

// The tests below are not in the matrix of Transformer Engine.

const std::vector<Spec>& every_format() {
  static const std::vector<Spec> kAll =
      specs({kDelayed, kCurrent, kMx, Scaling::block1x128, Scaling::block128x128}, {0, 1, 2});
  return kAll;
}
const std::vector<Spec>& both_sides() {
  static const std::vector<Spec> kAll =
      specs({kDelayed, kCurrent, kMx, Scaling::block1x128, Scaling::block128x128}, {2});
  return kAll;
}

TEST(TeGaps, GluClampedSitu) {
  const auto acts = {"glu", "geglu_erf", "clamped_swiglu", "situglu"};
  run({ops(acts, false) + ops(acts, true, true),
       {"1x32", "65x96", "130x256"},
       every_format(),
       kAllPlain});
}

TEST(TeGaps, EveryActivationInEveryFormatWithDbias) {
  const auto acts = {"silu", "relu", "qgelu", "srelu", "gelu_erf", "mish", "hardswish"};
  run({ops(acts, false) + ops(acts, true, true),
       {"1x32", "65x96", "130x256"},
       every_format(),
       kAllPlain});
}

TEST(TeGaps, SpecialValues) {
  for (size_t f = 1; f < static_cast<size_t>(Fill::all); ++f)
    for (const DType in : kPlain)
      for (const Op& op :
           {Op{.dbias = true}, Op{.act = "gelu"}, Op{.act = "gelu", .back = true, .dbias = true},
            Op{.act = "swiglu"}, Op{.act = "swiglu", .back = true, .dbias = true},
            Op{.act = "situglu", .back = true}}) {
        const Trial one(op, in, 135, 160, static_cast<Fill>(f));
        one.plain(in);
        for (const Spec& s : both_sides()) one.quantised(s);
        if (HasFailure()) return;
      }
}

TEST(TeGaps, MisalignedPointers) {
  for (const DType in : kPlain)
    for (const Op& op : {Op{.dbias = true}, Op{.act = "silu"}, Op{.act = "geglu", .back = true},
                         Op{.act = "swiglu", .interleave = 8}}) {
      const Trial one(op, in, 67, 136, Fill::uniform, true);
      one.plain(DType::bf16);
      for (const Spec& s : every_format()) one.quantised(s);
    }
}

TEST(TeGaps, EmptyTensors) {
  for (const char* shape : {"0x64", "64x0", "0x0"})
    for (const Op& op : {Op{.dbias = true}, Op{.act = "gelu"}, Op{.act = "swiglu"},
                         Op{.act = "swiglu", .back = true, .dbias = true}}) {
      const auto [m, h] = parse(shape);
      const Trial one(op, DType::bf16, m, h);
      for (const Spec& s : every_format()) one.quantised(s);
    }
}

TEST(TeGaps, RaggedGatedShapes) {
  run({ops({"swiglu"}, false) + ops({"swiglu", "geglu"}, true, true),
       {"1x1", "3x5", "17x33", "31x65", "129x127", "65x131", "33x1", "257x97", "127x545"},
       both_sides()});
}

// The same bits in every run and for every thread count, native and strict.
TEST(TeGaps, Determinism) {
  for (const Op& op : {Op{.dbias = true}, Op{.act = "gelu"}, Op{.act = "swiglu", .back = true}}) {
    std::unique_ptr<Trial> first;
    for (const int count : {1, 2, 7}) {
      const Threads threads(count);
      if (!first) first = std::make_unique<Trial>(op, DType::bf16, 520, 1100);
      for (const Spec& s : both_sides())
        if (s.dtype == DType::e4m3) first->quantised(s);
    }
  }
}

}  // namespace
}  // namespace tenon::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* text = std::getenv("TENON_LARGE");
  tenon::test::large = text && *text && *text != '0';
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "--large") tenon::test::large = true;
  return RUN_ALL_TESTS();
}
