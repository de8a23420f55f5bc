// Tests of quantised tensors, written and read, bit by bit against the scalar reference, and of
// invalid calls.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "accuracy/reference.h"
#include "runtime/execute.h"
#include "support/quantize_reference.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tenon::test {
namespace {

// Compares quantize(x → s) with the reference for the values of x.
void expect_quantised(const Spec& s, const Mat& x, const std::string& what, bool odd = false) {
  if (!chosen()) return;
  const int64_t m = x.rows(), k = x.cols();
  const Encoded y(s, m, k, odd);
  quantize(x.view(), y.tensor());
  const std::string wrong = y.differs(quantise_ref(s, numbers(x), m, k));
  if (!wrong.empty())
    ADD_FAILURE() << what << ", " << m << "x" << k << " " << info(x.dtype()).name << " to "
                  << s.text() << ": " << wrong;
}

TEST(Quantize, SpecialBlocks) {
  const int64_t m = 150, k = 300;
  struct Special {
    const char* name;
    void (*apply)(Mat&);
  };
  static constexpr auto kAll = [](Mat& x, auto f) {
    for (int64_t r = 0; r < x.rows(); ++r)
      for (int64_t c = 0; c < x.cols(); ++c) x.set(r, c, f(r, c));
  };
  const Special specials[] = {
      {"one NaN", [](Mat& x) { x.set(5, 7, kNan); }},
      {"one negative NaN", [](Mat& x) { x.set(149, 299, -kNan); }},
      {"one Inf", [](Mat& x) { x.set(140, 290, kInf); }},
      {"one -Inf", [](Mat& x) { x.set(0, 0, -kInf); }},
      {"NaN beside Inf",
       [](Mat& x) { x.set(9, 9, kInf), x.set(9, 10, kNan), x.set(10, 9, -kInf); }},
      {"largest", [](Mat& x) { x.set(33, 129, 0x1.fffffep127F); }},
      {"all zero", [](Mat& x) { kAll(x, [](int64_t, int64_t) { return 0.0F; }); }},
      {"all -0", [](Mat& x) { kAll(x, [](int64_t, int64_t) { return -0.0F; }); }},
      {"all Inf", [](Mat& x) { kAll(x, [](int64_t, int64_t) { return kInf; }); }},
      {"all NaN", [](Mat& x) { kAll(x, [](int64_t, int64_t) { return kNan; }); }},
      {"all subnormal",
       [](Mat& x) {
         kAll(x, [](int64_t r, int64_t c) {
           const float v = from_bits(static_cast<uint32_t>((r * 7919 + c * 104729) % 0x800000));
           return (r + c) % 2 ? v : -v;
         });
       }},
      {"smallest subnormals",
       [](Mat& x) {
         kAll(x,
              [](int64_t r, int64_t c) { return from_bits(static_cast<uint32_t>((r + c) % 3)); });
       }},
      {"one subnormal among zeros",
       [](Mat& x) {
         kAll(x, [](int64_t r, int64_t c) { return r == 64 && c == 200 ? 0x1p-149F : -0.0F; });
       }},
      {"all sorts",
       [](Mat& x) {
         kAll(x, [](int64_t r, int64_t c) {
           return kSpecials[static_cast<size_t>(r * 31 + c * 17 + c / 7) % std::size(kSpecials)];
         });
       }},
      {"magnitudes from 2^-149 to 2^127",
       [](Mat& x) {
         kAll(x, [](int64_t r, int64_t c) {
           return static_cast<float>(std::ldexp(r % 2 ? 1.37 : -1.61, (r * 3 + c * 5) % 277 - 149));
         });
       }},
  };
  for (const Special& special : specials) {
    Mat x = Mat(DType::f32, m, k).fill(1);
    special.apply(x);
    for (const Spec& s : all_specs()) expect_quantised(s, x, special.name);
    if (HasFailure()) return;
  }
}

// Checks that the conversion of the reference finds the nearest code.
TEST(Quantize, TheReferenceFindsTheNearestCode) {
  std::mt19937 random(1);
  for (const DType d : kFp8) {
    const auto expect = [&](float x) {
      // Compares all codes by float64 distance. Ties go to the even code. Large values saturate.
      const double v = std::min(std::fabs(static_cast<double>(x)), ref::fp8_max(d));
      int best = 0;
      for (int c = 1; c < ref::fp8_codes(d); ++c) {
        const double old = std::fabs(v - ref::fp8_value(d, static_cast<uint8_t>(best)));
        const double now = std::fabs(v - ref::fp8_value(d, static_cast<uint8_t>(c)));
        if (now < old || (now == old && c % 2 == 0)) best = c;
      }
      const uint8_t want = x != x ? 0x7f : static_cast<uint8_t>(best | (std::signbit(x) ? 128 : 0));
      ASSERT_EQ(ref::fp8_code(ref::fp8_steps(d), x), want) << std::hexfloat << x;
    };
    for (int c = 0; c + 1 < ref::fp8_codes(d); ++c) {
      const double low = ref::fp8_value(d, static_cast<uint8_t>(c));
      const double high = ref::fp8_value(d, static_cast<uint8_t>(c + 1));
      const uint32_t middle = bits(static_cast<float>((low + high) / 2));
      for (const uint32_t b : {middle - 1, middle, middle + 1, bits(static_cast<float>(high))})
        expect(from_bits(b)), expect(-from_bits(b));
    }
    for (const float x : kSpecials) expect(x);
    for (int i = 0; i < 20000; ++i) expect(from_bits(random()));
    for (int i = 0; i < 20000; ++i)
      expect(std::ldexp(1 + static_cast<float>(random() % 4096) * 0x1p-12F,
                        static_cast<int>(random() % 40) - 20));
  }
}

// Bytes computed by hand, to find errors that the library and the reference have in common.
TEST(Quantize, WorkedBytes) {
  const float v[] = {448,      -448,       449, 0,    -0.0F, 0x1p-9F,
                     0x1p-10F, 0x1.8p-10F, 17,  kInf, -kInf, kNan};
  const uint8_t e4m3[] = {0x7e, 0xfe, 0x7e, 0, 0x80, 1, 0, 1, 0x58, 0x7e, 0xfe, 0x7f};
  const uint8_t e5m2[] = {0x5f, 0xdf, 0x5f, 0, 0x80, 0x18, 0x14, 0x16, 0x4c, 0x7b, 0xfb, 0x7f};
  const int64_t n = std::size(v);
  for (const DType d : kFp8) {
    const Encoded y({.dtype = d, .mode = Scaling::delayed, .column = true}, 1, n);
    quantize(matrix(v, DType::f32, 1, n), y.tensor());
    const uint8_t* want = d == DType::e4m3 ? e4m3 : e5m2;
    for (const bool column : {false, true})
      EXPECT_EQ(y.data(column).dense(), std::vector<uint8_t>(want, want + n)) << info(d).name;
    EXPECT_EQ(y.scales(false).number(), 1.0F);
    EXPECT_EQ(y.health().number(0), 0.0F);                            // 449 rounds to 448
    EXPECT_EQ(y.health().number(1), d == DType::e4m3 ? 1.0F : 0.0F);  // 2^-10
    EXPECT_EQ(y.health().number(2), 3.0F);
    EXPECT_TRUE(std::isnan(y.amax()));
  }
  // mxfp8: one row of 33, so the second block has one element. amax 3 → e = 127 − 7, 3·2^7 = 384.
  std::vector<float> row(33, 0.5F);
  row[3] = 3;
  row[32] = kNan;
  const Encoded mx({.mode = Scaling::mxfp8, .column = true}, 1, 33);
  quantize(matrix(row.data(), DType::f32, 1, 33), mx.tensor());
  EXPECT_EQ(mx.scales(false).dense()[0], 120);
  EXPECT_EQ(mx.scales(false).dense()[1], 255);
  EXPECT_EQ(mx.scales(false).dense()[2], 0);
  EXPECT_EQ(mx.scales(false).dense()[4], 0);  // row 1 is padding
  EXPECT_EQ(mx.data(false).dense()[3], 0x7c);
  EXPECT_EQ(mx.data(false).dense()[0], 0x68);
  EXPECT_EQ(mx.data(false).dense()[32], 0x7f);
  EXPECT_EQ(mx.scales(true).dense()[0], 118);  // 0.5/448 is 2^-9.8
  EXPECT_EQ(mx.data(true).dense()[0], 0x78);   // 0.5·2^9 = 256
}

constexpr int64_t kSizes[] = {0, 1, 7, 31, 33, 127, 129, 257};

TEST(Quantize, EveryShapeModeOrientationAndDtype) {
  size_t turn = 0;
  for (const int64_t m : kSizes)
    for (const int64_t k : kSizes) {
      for (const Spec& s : all_specs(true)) {
        Mat x(kPlain[turn % 3], m, k, turn % 2 ? 5 : 0);
        x.fill(static_cast<unsigned>(turn), turn % 4 == 1);
        expect_quantised(s, x, "shape", turn % 5 == 2);
        ++turn;
      }
      if (HasFailure()) return;
    }
}

TEST(Quantize, EpsAndPowersOfTwo) {
  size_t turn = 0;
  for (const Scaling mode : {Scaling::current, Scaling::block1x128, Scaling::block128x128})
    for (const DType d : kFp8)
      for (const std::optional<bool> pow2 : {std::optional<bool>{}, {true}, {false}})
        // Also adjacent values: a kernel must not be reused for another eps.
        for (const float eps : {0.0F, 1e-30F, 1.0F, 0x1.000002p0F, 100.0F})
          for (const Spec& s : sides({.dtype = d, .mode = mode, .eps = eps, .pow2 = pow2})) {
            const float spread = turn % 3 == 0 ? 1e-31F : turn % 3 == 1 ? 0.5F : 30.0F;
            Mat x(DType::f32, 130, 140);
            x.fill(static_cast<unsigned>(turn++), false, spread);
            expect_quantised(s, x, "eps");
          }
}

TEST(Quantize, PaddingOfScalesIsZero) {
  for (const Spec& s : all_specs(true)) {
    if (ref::single(s.mode)) continue;
    const Mat x = Mat(DType::f32, 5, 131).fill(3);
    const Encoded y(s, 5, 131);
    quantize(x.view(), y.tensor());
    for (const bool column : {false, true}) {
      if (!(column ? s.column : s.row)) continue;
      const ref::Size block = ref::block_size(s.mode, column);
      const ref::Size all = ref::scale_size(s.mode, 5, 131, column);
      std::set<int64_t> used;
      for (int64_t i = 0; i < ref::up(5, block.rows); ++i)
        for (int64_t j = 0; j < ref::up(131, block.cols); ++j)
          used.insert(ref::scale_place(s, column, i, j, all));
      const std::vector<uint8_t> bytes = y.scales(column).dense();
      const size_t size = s.mode == Scaling::mxfp8 ? 1 : 4;
      for (size_t i = 0; i < bytes.size(); ++i) {
        const bool padding = !used.contains(static_cast<int64_t>(i / size));
        EXPECT_TRUE(!padding || bytes[i] == 0) << s.text() << " byte " << i;
      }
      EXPECT_LT(used.size(), bytes.size() / size) << "no padding in " << s.text();
    }
  }
}

TEST(Quantize, StridedAndUnalignedViews) {
  size_t turn = 0;
  for (const Spec& s : all_specs(true))
    for (const DType d : kPlain) {
      Mat x(d, 67, 201, 7, 1 + turn % 3);
      x.fill(static_cast<unsigned>(turn++));
      expect_quantised(s, x, "odd", true);
    }
}

TEST(Quantize, ATransposedCopyWithoutAScale) {
  for (const DType d : kPlain)
    for (const auto& [m, k] :
         {std::pair<int64_t, int64_t>{1, 1}, {33, 70}, {129, 600}, {0, 5}, {700, 3}})
      for (const bool both : {false, true}) {
        const Mat x = Mat(DType::f32, m, k).fill(1, true);
        const Mat y(d, m, k, 2), t(d, k, m, 3, 1);
        Tensor out;
        out.format = {.dtype = d};
        if (both) out.rowwise.data = y.view();
        out.columnwise.data = t.view();
        quantize(x.view(), out);
        for (int64_t r = 0; r < m; ++r)
          for (int64_t c = 0; c < k; ++c) {
            expect_element(t, c, r, x.at(r, c), "transposed");
            if (both) expect_element(y, r, c, x.at(r, c), "rowwise");
          }
        EXPECT_TRUE(t.guards_hold() && y.guards_hold());
        // The inverse direction.
        Tensor in;
        in.format = {.dtype = d};
        in.columnwise.data = t.view();
        const Mat back(d, m, k);
        dequantize(in, back.view());
        for (int64_t r = 0; r < m; ++r)
          for (int64_t c = 0; c < k; ++c) expect_element(back, r, c, x.at(r, c), "back");
        if (HasFailure()) return;
      }
}

// One gated or plain call: its inputs, and the plain strict fp32 results.
struct Call {
  std::string act;
  Gate gate;
  int64_t m, h;
  bool gated, biased;
  Mat x, b, bias, grad;

  Call(const std::string& name, Gate g, int64_t rows, int64_t cols, bool with_bias, DType d,
       unsigned seed, bool specials = false)
      : act(name),
        gate(g),
        m(rows),
        h(cols),
        gated(activation(name).inputs == 2),
        biased(with_bias),
        x(d, rows, gated && g != Gate::separate ? 2 * cols : cols, seed % 3),
        b(d, rows, cols),
        bias(DType::f32, 1, gated ? 2 * cols : cols),
        grad(d, rows, cols, seed % 2) {
    x.fill(seed, specials), b.fill(seed + 1), bias.fill(seed + 2), grad.fill(seed + 3, specials);
  }
  [[nodiscard]] bool apart() const { return gated && gate == Gate::separate; }
  [[nodiscard]] int64_t wide() const { return x.cols(); }
  [[nodiscard]] Forward forward_call(const Tensor& y) const {
    return {.x = x.view(),
            .b = apart() ? Tensor(b.view()) : Tensor{},
            .bias = biased ? bias.view() : View{},
            .y = y,
            .layout = gated && !apart() ? layout_of(gate) : Layout{}};
  }
  [[nodiscard]] Backward backward_call(const Tensor& dx, const Tensor& db = {},
                                       const View& dbias = {}) const {
    return {.grad = grad.view(),
            .x = x.view(),
            .b = apart() ? Tensor(b.view()) : Tensor{},
            .bias = biased ? bias.view() : View{},
            .dx = dx,
            .db = db,
            .dbias = dbias,
            .layout = gated && !apart() ? layout_of(gate) : Layout{}};
  }
  [[nodiscard]] std::string text() const {
    return str(act, " layout ", static_cast<int>(gate), " ", m, "x", h, biased ? " biased" : "",
               " ", info(x.dtype()).name);
  }
};

// Forward and backward to this format must equal the reference for the plain results.
void expect_call(const Call& c, const Spec& s, const Options& options = kStrict, bool odd = false) {
  if (!chosen()) return;
  const Activation f = activation(c.act);
  const auto report = [&](const char* what, const std::string& wrong) {
    if (!wrong.empty())
      ADD_FAILURE() << c.text() << " " << what << " " << s.text() << ": " << wrong;
  };
  const Mat plain(DType::f32, c.m, c.h);
  forward(f, c.forward_call(plain.view()), options);
  const Encoded y(s, c.m, c.h, odd);
  forward(f, c.forward_call(y.tensor()), options);
  report("forward", y.differs(quantise_ref(s, numbers(plain), c.m, c.h)));

  const Mat dx(DType::f32, c.m, c.wide()), db(DType::f32, c.m, c.h),
      sums(DType::f32, 1, c.bias.cols()), sums2(DType::f32, 1, c.bias.cols());
  backward(f, c.backward_call(dx.view(), c.apart() ? Tensor(db.view()) : Tensor{}, sums.view()),
           options);
  const Encoded qx(s, c.m, c.wide(), odd), qb(s, c.m, c.h, odd);
  backward(f, c.backward_call(qx.tensor(), c.apart() ? qb.tensor() : Tensor{}, sums2.view()),
           options);
  report("dx", qx.differs(quantise_ref(s, numbers(dx), c.m, c.wide())));
  if (c.apart()) report("db", qb.differs(quantise_ref(s, numbers(db), c.m, c.h)));
  EXPECT_TRUE(sums.same_bytes(sums2)) << c.text() << " " << s.text() << " dbias";
}

TEST(Quantize, GatedLayoutsForwardAndBackward) {
  unsigned turn = 0;
  for (const Gate gate : kGates)
    for (const int64_t h : {7, 40, 96, 160, 256, 544})
      for (const int64_t m : {1, 37, 130}) {
        if (!fits(gate, h)) continue;
        // Every mode and orientation. Dtypes rotate, and large shapes use every third.
        for (const Spec& s : all_specs(true)) {
          ++turn;
          if ((s.dtype == DType::e4m3) != (turn / 2 % 2 == 0)) continue;
          if (m * h > 20000 && turn % 3 != 0) continue;
          expect_call(Call("swiglu", gate, m, h, turn % 3 == 0, kPlain[turn / 3 % 3], turn), s,
                      kStrict, turn % 5 == 0);
        }
        if (HasFailure()) return;
      }
}

// Groups that do not fit in a tile: odd k, and k wider than a tile.
TEST(Quantize, InterleavedByAnyNumber) {
  for (const auto& [k, h] : {std::pair<int64_t, int64_t>{3, 33},
                             {5, 700},
                             {24, 528},
                             {600, 1200},
                             {1024, 1024},
                             {64, 1088},
                             {1, 1031}}) {
    const Layout layout = Layout::interleaved(k);
    const int64_t m = 35;
    const Mat x = Mat(DType::bf16, m, 2 * h).fill(1), g = Mat(DType::bf16, m, h).fill(2);
    const Activation f = activation("swiglu");
    const Mat dx(DType::f32, m, 2 * h);
    backward(f, {.grad = g.view(), .x = x.view(), .dx = dx.view(), .layout = layout}, kStrict);
    for (const Scaling mode : kModes)
      for (const Spec& s : sides({.mode = mode, .scale = 3})) {
        if (!chosen()) continue;
        const Encoded q(s, m, 2 * h);
        backward(f, {.grad = g.view(), .x = x.view(), .dx = q.tensor(), .layout = layout}, kStrict);
        EXPECT_EQ(q.differs(quantise_ref(s, numbers(dx), m, 2 * h)), "")
            << "interleaved(" << k << ") H=" << h << " " << s.text();
      }
  }
}

TEST(Quantize, EveryActivationForwardAndBackward) {
  unsigned turn = 0;
  for (const Row& row : rows()) {
    for (const Scaling mode : kModes) {
      const Spec s{.dtype = kFp8[turn % 2],
                   .mode = mode,
                   .row = turn % 3 != 1,
                   .column = turn % 3 != 0,
                   .scale = 7};
      expect_call(
          Call(row.act, kGates[turn % 6], 45, 96, turn % 2, kPlain[turn % 3], turn, turn % 4 == 0),
          s);
      ++turn;
    }
    if (HasFailure()) return;
  }
}

// dx and db in different formats. One of them computes its amax first.
TEST(Quantize, HalvesInDifferentFormats) {
  const Call c("geglu", Gate::separate, 70, 150, true, DType::bf16, 5);
  const Activation f = activation("geglu");
  const Mat dx(DType::f32, c.m, c.h), db(DType::f32, c.m, c.h);
  backward(f, c.backward_call(dx.view(), db.view()), kStrict);
  for (const Spec& s : all_specs())
    for (const Spec& t : all_specs()) {
      if (!(s.row && t.column) || s.dtype == t.dtype || !chosen()) continue;
      const Encoded qx(s, c.m, c.h), qb(t, c.m, c.h);
      backward(f, c.backward_call(qx.tensor(), qb.tensor()), kStrict);
      EXPECT_EQ(qx.differs(quantise_ref(s, numbers(dx), c.m, c.h)), "") << s.text() << t.text();
      EXPECT_EQ(qb.differs(quantise_ref(t, numbers(db), c.m, c.h)), "") << s.text() << t.text();
    }
  // Only one half, and a plain half in place while the other computes its amax.
  const Spec s{.mode = Scaling::current, .column = true};
  const Encoded alone(s, c.m, c.h), beside(s, c.m, c.h);
  backward(f, c.backward_call({}, alone.tensor()), kStrict);
  EXPECT_EQ(alone.differs(quantise_ref(s, numbers(db), c.m, c.h)), "");
  Call place = c;
  backward(f, place.backward_call(place.x.view(), beside.tensor()), kStrict);
  EXPECT_TRUE(beside.same_bytes(alone));
  for (int64_t r = 0; r < c.m; ++r)
    for (int64_t k = 0; k < c.h; ++k) expect_element(place.x, r, k, dx.at(r, k), "in place");
}

// The values by the scalar interpreter of lowered graphs, independent of the executor.
std::vector<std::vector<float>> interpret(const Step& step, const RunArgs& args) {
  const auto n = static_cast<size_t>(args.rows * step.cols);
  std::vector<std::vector<float>> data(step.loads.size());
  std::vector<accuracy::Column> columns;
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    if (l.from == Load::From::parameter) {
      data[i] = {args.parameters[l.arg]};
      columns.push_back({data[i].data(), 0});
      continue;
    }
    for (int64_t r = 0; r < args.rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c) {
        const View& v = args.in[l.arg];
        const int64_t row = l.from == Load::From::row ? 0 : r;
        const int64_t at = row * v.stride + l.columns(c);
        uint32_t code = 0;
        const size_t size = v.dtype == DType::f32 ? 4 : 2;
        std::memcpy(&code, static_cast<const char*>(v.data) + at * static_cast<int64_t>(size),
                    size);
        data[i].push_back(decode_ref(v.dtype, code));
      }
    columns.push_back({data[i].data(), 1});
  }
  std::vector<uint32_t> roots = step.roots();
  std::vector<std::vector<float>> out;
  accuracy::Reference(*step.graph, roots).run(n, columns, out);
  return out;
}

TEST(Quantize, AgainstTheInterpreter) {
  unsigned turn = 0;
  for (const char* act : {"gelu", "silu", "swiglu", "geglu_erf", "clamped_swiglu"})
    for (const Gate gate : {Gate::stacked, Gate::swapped, Gate::by1, Gate::by8})
      for (const Scaling mode : kModes)
        for (const bool back : {false, true}) {
          const Call c(act, gate, 33, 72, turn % 2, kPlain[turn % 3], turn, turn % 3 == 0);
          ++turn;
          if (!c.gated && gate != Gate::stacked) continue;
          const int64_t cols = back ? c.wide() : c.h;
          const Spec s{.dtype = kFp8[turn % 2], .mode = mode, .column = true, .scale = 11};
          const Encoded q(s, c.m, cols);
          std::vector<float> values(static_cast<size_t>(c.m * cols));
          set_observer([&](const Step& step, const RunArgs& args, const Options&,
                           const std::function<void()>& run) {
            const auto out = interpret(step, args);
            for (size_t k = 0; k < step.stores.size(); ++k) {
              if (step.stores[k].to != Store::To::encoded) continue;
              for (int64_t r = 0; r < c.m; ++r)
                for (int64_t i = 0; i < step.cols; ++i) {
                  const int64_t to =
                      !c.gated || !back ? i : gated_column(gate, c.h, k == 0 ? 0 : 1, i);
                  values[static_cast<size_t>(r * cols + to)] =
                      out[k][static_cast<size_t>(r * step.cols + i)];
                }
            }
            run();
          });
          if (back)
            backward(activation(act), c.backward_call(q.tensor()), kStrict);
          else
            forward(activation(act), c.forward_call(q.tensor()), kStrict);
          set_observer({});
          EXPECT_EQ(q.differs(quantise_ref(s, values, c.m, cols)), "")
              << c.text() << (back ? " backward " : " forward ") << s.text();
        }
}

TEST(Quantize, ThreadsDoNotChangeBits) {
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{700, 1100}, {130, 4500}, {4500, 33}}) {
    const Mat x = Mat(DType::bf16, m, k).fill(1);
    const std::vector<float> values = numbers(x);
    unsigned turn = 0;
    for (const Scaling mode : kModes) {
      const Spec s{.dtype = kFp8[turn++ % 2], .mode = mode, .column = true, .scale = 100};
      if (!chosen()) continue;
      const Quantised want = quantise_ref(s, values, m, k);
      Mat first(DType::f32, 1, k);
      for (const int count : {1, 2, 7}) {
        const Threads threads(count);
        const Encoded y(s, m, k);
        const Mat dbias(DType::f32, 1, k);
        quantize({.x = x.view(), .y = y.tensor(), .dbias = dbias.view()});
        EXPECT_EQ(y.differs(want), "") << s.text() << " threads " << count;
        if (count == 1)
          first = dbias;
        else
          EXPECT_TRUE(dbias.same_bytes(first)) << s.text() << " threads " << count;
      }
    }
  }
}

TEST(Quantize, ThreadsDoNotChangeBitsOfGatedGradients) {
  for (const Gate gate : {Gate::stacked, Gate::by8, Gate::separate})
    for (const int64_t h : {1096, 2048}) {
      const Call c("swiglu", gate, 300, h, true, DType::bf16, 3);
      const Activation f = activation("swiglu");
      for (const Scaling mode : kModes) {
        if (!chosen()) continue;
        const Spec s{.mode = mode, .column = true, .scale = 9};
        std::vector<Encoded> dx, db;
        for (const int count : {1, 2, 7}) {
          const Threads threads(count);
          dx.emplace_back(s, c.m, c.wide());
          db.emplace_back(s, c.m, c.h);
          // Native results also do not depend on the number of threads.
          backward(f,
                   c.backward_call(dx.back().tensor(), c.apart() ? db.back().tensor() : Tensor{}));
          EXPECT_TRUE(dx.back().same_bytes(dx[0])) << c.text() << s.text() << " threads " << count;
          EXPECT_TRUE(db.back().same_bytes(db[0])) << c.text() << s.text() << " threads " << count;
        }
      }
    }
}

TEST(Quantize, DelayedJoinsItsSlot) {
  Mat x = Mat(DType::f32, 50, 70).fill(1);
  const float most = from_bits(ref::amax_of(numbers(x).data(), 50, 70));
  for (const float held : {0.0F, most / 2, most, most * 2, kInf, kNan}) {
    const Spec s{.mode = Scaling::delayed, .scale = 4};
    Encoded y(s, 50, 70);
    y.hold_amax(held);
    quantize(x.view(), y.tensor());
    EXPECT_EQ(y.differs(quantise_ref(s, numbers(x), 50, 70), held), "") << held;
    EXPECT_TRUE(equal(y.amax(), held > most || held != held ? held : most)) << held;
  }
  // The amax of the call does not include the previous value of the slot.
  Encoded y({.mode = Scaling::delayed}, 50, 70);
  y.hold_amax(1e9F);
  const Mat amax(DType::f32, 1, 1);
  quantize({.x = x.view(), .y = y.tensor(), .amax = amax.view()});
  EXPECT_EQ(amax.at(0, 0), most);
  EXPECT_EQ(y.amax(), 1e9F);
  // NaN is the largest amax.
  x.set(2, 3, kNan), x.set(2, 4, kInf);
  y.hold_amax(kInf);
  quantize(x.view(), y.tensor());
  EXPECT_TRUE(std::isnan(y.amax()));
  // Without a slot no amax is written.
  Tensor t = y.tensor();
  t.amax = {};
  quantize(x.view(), t);
}

TEST(Quantize, DelayedWithAnyMultiplier) {
  const Mat x = Mat(DType::f32, 33, 65).fill(1, true);
  for (const float scale : {0.0F, -2.0F, 0x1p-149F, 0x1p-130F, 3.3F, 0x1.fffffep127F, kInf})
    for (const DType d : kFp8)
      for (const Spec& s : sides({.dtype = d, .mode = Scaling::delayed, .scale = scale}))
        expect_quantised(s, x, str("scale ", scale));
}

TEST(Quantize, CurrentWithAGivenAmax) {
  const Mat x = Mat(DType::bf16, 40, 90).fill(1);
  for (const float amax : {0.0F, 0.25F, 5.0F, 1e30F, 0x1p-149F, kInf, kNan})
    for (const DType d : kFp8)
      for (const bool pow2 : {false, true})
        for (const Spec& s : sides({.dtype = d,
                             .mode = Scaling::current,
                             .eps = amax == 0.25F ? 1.0F : 0.0F,
                             .pow2 = pow2,
                             .amax = bits(amax)}))
          expect_quantised(s, x, str("given ", amax));
  // Two shards with the amax of the group equal the halves of the whole tensor.
  const Mat whole = Mat(DType::f32, 64, 48).fill(2);
  const Spec s{.mode = Scaling::current};
  const Quantised q = quantise_ref(s, numbers(whole), 64, 48);
  Spec shard = s;
  shard.amax = q.amax;
  for (const int64_t half : {0, 1}) {
    const Encoded y(shard, 32, 48);
    quantize(whole.rows_from(32 * half, 32), y.tensor());
    EXPECT_TRUE(std::equal(q.row.data.begin() + 32 * 48 * half,
                           q.row.data.begin() + 32 * 48 * (half + 1),
                           y.data(false).dense().begin()));
  }
}

// amax and health are optional.
TEST(Quantize, CurrentWithoutAPlaceForItsAmax) {
  const Mat x = Mat(DType::f32, 40, 90).fill(1);
  const Spec s{.mode = Scaling::current, .column = true};
  const Encoded y(s, 40, 90, false, false);
  Tensor t = y.tensor();
  t.amax = {};
  quantize(x.view(), t);
  const Quantised q = quantise_ref(s, numbers(x), 40, 90);
  EXPECT_EQ(y.data(false).differs(q.row.data, "row"), "");
  EXPECT_EQ(y.data(true).differs(q.column.data, "column"), "");
  EXPECT_EQ(y.scales(false).differs(q.row.scales, "scale"), "");
}

// One scale_inv is used for both encodings. It may be given with either.
TEST(Quantize, OneScaleBesideEitherEncoding) {
  const Mat x = Mat(DType::f32, 20, 30).fill(1);
  for (const Scaling mode : {Scaling::delayed, Scaling::current}) {
    const Spec s{.mode = mode, .column = true, .scale = 8};
    const Quantised q = quantise_ref(s, numbers(x), 20, 30);
    for (const int where : {0, 1, 2}) {  // with the first, with the second, one view with both
      const Encoded y(s, 20, 30);
      Tensor t = y.tensor();
      if (where != 1) t.columnwise.scale_inv = {};
      if (where == 1) t.rowwise.scale_inv = {};
      if (where == 2) t.columnwise.scale_inv = t.rowwise.scale_inv;
      quantize(x.view(), t);
      EXPECT_EQ(y.data(false).differs(q.row.data, "row"), "") << where;
      EXPECT_EQ(y.data(true).differs(q.column.data, "column"), "") << where;
      EXPECT_EQ(y.scales(where == 1).differs(q.row.scales, "scale"), "") << where;
      // Reads through each encoding alone.
      for (const bool column : {false, true}) {
        Tensor in = t;
        in.scale = in.amax = in.health = {};
        (column ? in.rowwise.data : in.columnwise.data) = {};
        const Mat back(DType::f32, 20, 30);
        dequantize(in, back.view());
        const std::vector<float> want = dequantise_ref(s, q, 20, 30, column);
        for (int64_t r = 0; r < 20; ++r)
          for (int64_t c = 0; c < 30; ++c)
            expect_element(back, r, c, want[static_cast<size_t>(r * 30 + c)], "read back");
      }
    }
  }
}

// Both passes of `current` compute the same values, so the amax is that of the encoded values.
TEST(Quantize, CurrentNativeFindsTheAmaxOfItsOwnValues) {
  for (const char* act : {"gelu", "tanh", "swiglu", "mish"})
    for (const bool back : {false, true})
      for (const bool sums : {false, true}) {
        if (sums && !back) continue;
        const Call c(act, Gate::stacked, 61, 200, true, DType::bf16, 8);
        const int64_t cols = back ? c.wide() : c.h;
        const Encoded y({.mode = Scaling::current}, c.m, cols),
            d({.mode = Scaling::delayed}, c.m, cols);
        const Mat dbias(DType::f32, 1, c.bias.cols());
        const View out = sums ? dbias.view() : View{};
        const auto go = [&](const Tensor& t, const Options& o) {
          if (back)
            backward(activation(act), c.backward_call(t, {}, out), o);
          else
            forward(activation(act), c.forward_call(t), o);
        };
        go(y.tensor(), {});
        go(d.tensor(), {});
        EXPECT_EQ(bits(y.amax()), bits(d.amax())) << act << back << sums;
        // The multiplier of that amax maps the largest value to the largest code.
        const float scale = ref::multiplier(bits(y.amax()), DType::e4m3, 0, false);
        EXPECT_EQ(bits(y.scales(false).number()), bits(ref::quotient(1, scale)));
        uint8_t most = 0;
        for (const uint8_t code : y.data(false).dense())
          most = std::max<uint8_t>(most, code & 0x7f);
        EXPECT_EQ(most, 0x7e) << act << back << sums;
        // With an additional fp32 result all values are strict.
        if (!sums) continue;
        const Encoded strict({.mode = Scaling::current}, c.m, cols);
        go(strict.tensor(), kStrict);
        EXPECT_TRUE(strict.same_bytes(y)) << act;
      }
}

TEST(Quantize, AmaxAlone) {
  for (const DType d : kPlain) {
    const Mat x = Mat(d, 301, 77).fill(1);
    const Mat amax(DType::f32, 1, 1, 0, 1);
    quantize({.x = x.view(), .amax = amax.view()});
    EXPECT_EQ(bits(amax.at(0, 0)), ref::amax_of(numbers(x).data(), 301, 77));
    EXPECT_TRUE(amax.guards_hold());
    for (const Spec& s : all_specs()) {
      const Encoded y(s, 301, 77);
      const Mat beside(DType::f32, 1, 1);
      quantize({.x = x.view(), .y = y.tensor(), .amax = beside.view()});
      EXPECT_EQ(bits(beside.at(0, 0)), bits(amax.at(0, 0))) << s.text();
    }
  }
  const Mat amax(DType::f32, 1, 1);
  quantize({.x = matrix(nullptr, DType::f32, 0, 5), .amax = amax.view()});
  EXPECT_EQ(bits(amax.at(0, 0)), 0U);
}

TEST(Quantize, Health) {
  // 40 values too large, 30 too small, 20 not finite, the rest in range.
  Mat x = Mat(DType::f32, 20, 50);
  for (int64_t i = 0; i < 1000; ++i)
    x.set(i / 50, i % 50,
          i < 40   ? 464.5F
          : i < 70 ? 0x1p-11F
          : i < 80 ? kInf
          : i < 90 ? -kNan
          : i < 95 ? 0.0F
          : i < 99 ? 464.0F  // the midpoint rounds, it does not saturate
                   : -5.0F);
  for (const Spec& s : sides({.mode = Scaling::delayed})) {
    const Encoded y(s, 20, 50);
    quantize(x.view(), y.tensor());
    EXPECT_EQ(y.health().number(0), 40.0F) << s.text();
    EXPECT_EQ(y.health().number(1), 30.0F) << s.text();
    EXPECT_EQ(y.health().number(2), 20.0F) << s.text();
  }
  // Each encoding of mxfp8 has its own scales. The rowwise encoding is counted.
  const Mat wide = Mat(DType::f32, 64, 64).fill(7, true);
  for (const Spec& s : all_specs()) expect_quantised(s, wide, "health");
}

TEST(Quantize, WithColumnSums) {
  unsigned turn = 0;
  for (const auto& [m, k] :
       {std::pair<int64_t, int64_t>{1, 1}, {33, 70}, {257, 129}, {0, 9}, {600, 515}})
    for (const Spec& s : all_specs(true)) {
      const DType d = kPlain[turn % 3], sum = kPlain[turn / 3 % 3];
      const Mat x = Mat(d, m, k, 1).fill(turn++);
      if (!chosen()) continue;
      const Encoded y(s, m, k);
      const Mat dbias(sum, 1, k), amax(DType::f32, 1, 1);
      quantize({.x = x.view(), .y = y.tensor(), .dbias = dbias.view(), .amax = amax.view()});
      const Quantised q = quantise_ref(s, numbers(x), m, k);
      EXPECT_EQ(y.differs(q), "") << m << "x" << k << " " << s.text();
      EXPECT_EQ(bits(amax.at(0, 0)), q.amax);
      for (int64_t c = 0; c < k; ++c) {
        std::vector<float> column;
        for (int64_t r = 0; r < m; ++r) column.push_back(x.at(r, c));
        expect_element(dbias, 0, c, tree(column), "dbias");
      }
      if (HasFailure()) return;
    }
}

// All codes and scales, also those that a quantiser does not write.
Quantised wild(const Spec& s, int64_t m, int64_t k, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> v(static_cast<size_t>(m * k));
  for (float& x : v) x = normal(random);
  Quantised q = quantise_ref(s, v, m, k);
  for (SideBytes* side : {&q.row, &q.column}) {
    for (uint8_t& code : side->data)
      if (random() % 4 == 0) code = static_cast<uint8_t>(random());
    if (s.mode == Scaling::mxfp8)
      for (uint8_t& e : side->scales)
        if (random() % 4 == 0) e = static_cast<uint8_t>(random());
  }
  return q;
}

TEST(Quantize, DequantiseEveryMode) {
  unsigned turn = 0;
  for (const auto& [m, k] :
       {std::pair<int64_t, int64_t>{1, 1}, {33, 70}, {129, 257}, {200, 700}, {0, 3}, {3, 0}})
    for (const Spec& s : all_specs(true))
      for (const DType d : kPlain) {
        if ((m == 200 && d != kPlain[turn++ % 3]) || !chosen()) continue;
        const Quantised q = wild(s, m, k, turn);
        Encoded x(s, m, k, turn % 2);
        x.put(q);
        const Mat y(d, m, k, turn % 3, turn % 2);
        ++turn;
        dequantize(x.input(), y.view());
        const std::vector<float> want = dequantise_ref(s, q, m, k, !s.row);
        for (int64_t r = 0; r < m; ++r)
          for (int64_t c = 0; c < k; ++c)
            expect_element(y, r, c, want[static_cast<size_t>(r * k + c)], s.text());
        EXPECT_TRUE(y.guards_hold());
        if (HasFailure()) return;
      }
}

TEST(Quantize, RequantiseIsDequantiseThenQuantise) {
  const int64_t m = 133, k = 165;
  unsigned turn = 0;
  for (const Spec& from : all_specs(true)) {
    if (from.row && from.column) continue;
    const Quantised q = wild(from, m, k, turn++);
    Encoded x(from, m, k);
    x.put(q);
    const Mat between(DType::f32, m, k);
    dequantize(x.input(), between.view());
    for (Spec to : all_specs(true)) {
      if (to.dtype != kFp8[turn++ % 2] || !chosen()) continue;
      to.scale = 0.75F;
      const Encoded once(to, m, k), twice(to, m, k);
      quantize(x.input(), once.tensor());
      quantize(between.view(), twice.tensor());
      EXPECT_TRUE(once.same_bytes(twice)) << from.text() << " to " << to.text();
      EXPECT_EQ(once.differs(quantise_ref(to, dequantise_ref(from, q, m, k, !from.row), m, k)), "")
          << from.text() << " to " << to.text();
    }
  }
}

// Quantising a dequantised tensor again gives the same result, because powers of two are exact.
TEST(Quantize, ARoundTripIsStable) {
  for (const Spec& s : all_specs(true)) {
    if (s.row && s.column) continue;
    if (ref::single(s.mode)) continue;
    const Mat x = Mat(DType::f32, 100, 160).fill(4);
    const Encoded first(s, 100, 160, false, false), second(s, 100, 160, false, false);
    const Mat back(DType::f32, 100, 160), again(DType::f32, 100, 160);
    quantize(x.view(), first.tensor());
    dequantize(first.input(), back.view());
    quantize(back.view(), second.tensor());
    dequantize(second.input(), again.view());
    EXPECT_TRUE(back.same_bytes(again)) << s.text();
  }
}

TEST(Quantize, SwizzledScalesForwardAndAsInputs) {
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{1, 1}, {129, 160}, {300, 288}, {64, 1100}})
    for (const DType d : kFp8)
      for (const Spec& s : sides({.dtype = d, .mode = Scaling::mxfp8, .swizzled = true})) {
        const Call c("gelu", Gate::separate, m, k, true, DType::bf16, 3);
        expect_call(c, s);
        // Swizzled and plain scales have the same values.
        Spec linear = s;
        linear.swizzled = false;
        const Encoded a(s, m, k), b(linear, m, k);
        quantize(c.x.view(), a.tensor());
        quantize(c.x.view(), b.tensor());
        const Mat ya(DType::f32, m, k), yb(DType::f32, m, k);
        const Activation f = activation("gelu");
        forward(f, {.x = a.input(), .y = ya.view()}, kStrict);
        forward(f, {.x = b.input(), .y = yb.view()}, kStrict);
        EXPECT_TRUE(ya.same_bytes(yb)) << m << "x" << k << " " << s.text();
        EXPECT_TRUE(a.data(false).same_bytes(b.data(false)));
        EXPECT_TRUE(a.data(true).same_bytes(b.data(true)));
      }
  // Offsets in the rowwise tensor: scale (1, 0) 16 bytes, (32, 0) 4 bytes, (0, 4) one tile.
  const Spec s{.mode = Scaling::mxfp8, .swizzled = true};
  Mat x(DType::f32, 33, 160);
  for (int64_t r = 0; r < 33; ++r)
    for (int64_t c = 0; c < 160; ++c) x.set(r, c, 0);
  x.set(1, 0, 256), x.set(32, 0, 512), x.set(0, 128, 1024), x.set(0, 32, 2048);
  const Encoded y(s, 33, 160);
  quantize(x.view(), y.tensor());
  const std::vector<uint8_t> scales = y.scales(false).dense();
  EXPECT_EQ(scales[16], 127);
  EXPECT_EQ(scales[4], 128);
  EXPECT_EQ(scales[512], 129);
  EXPECT_EQ(scales[1], 130);
}

TEST(Quantize, EncodedInputsOfForwardAndBackward) {
  unsigned turn = 0;
  for (const char* act : {"gelu", "swiglu"})
    for (const Gate gate : kGates) {
      const bool is_gated = std::string_view(act) == "swiglu";
      if (!is_gated && gate != Gate::stacked) continue;
      const bool apart = is_gated && gate == Gate::separate;
      const int64_t m = 67, h = 160, wide = is_gated && !apart ? 2 * h : h;
      for (const Spec& sx : all_specs(true)) {
        const std::vector<Spec> grads = all_specs(true);
        const Spec& sg = grads[turn * 7 % grads.size()];
        if (!chosen()) continue;
        const Quantised qx =
                            quantise_ref(sx, numbers(Mat(DType::f32, m, wide).fill(turn)), m, wide),
                        qb = quantise_ref(sx, numbers(Mat(DType::f32, m, h).fill(turn + 1)), m, h),
                        qg = quantise_ref(sg, numbers(Mat(DType::f32, m, h).fill(turn + 2)), m, h);
        ++turn;
        Encoded x(sx, m, wide, turn % 2), b(sx, m, h), g(sg, m, h, turn % 3 == 0);
        x.put(qx), b.put(qb), g.put(qg);
        const auto plain = [](const Spec& s, const Quantised& q, int64_t rows, int64_t cols) {
          Mat out(DType::f32, rows, cols);
          const std::vector<float> v = dequantise_ref(s, q, rows, cols, !s.row);
          for (int64_t i = 0; i < rows * cols; ++i)
            out.set(i / cols, i % cols, v[static_cast<size_t>(i)]);
          return out;
        };
        const Mat px = plain(sx, qx, m, wide), pb = plain(sx, qb, m, h), pg = plain(sg, qg, m, h);
        const Activation f = activation(act);
        const Layout layout = is_gated && !apart ? layout_of(gate) : Layout{};
        for (const Options& o : {kStrict, kEager}) {
          const Mat y(DType::bf16, m, h), y2(DType::bf16, m, h), dx(DType::f32, m, wide),
              dx2(DType::f32, m, wide), dbias(DType::f32, 1, is_gated ? 2 * h : h),
              dbias2(DType::f32, 1, is_gated ? 2 * h : h);
          forward(
              f,
              {.x = x.input(), .b = apart ? b.input() : Tensor{}, .y = y.view(), .layout = layout},
              o);
          forward(f,
                  {.x = px.view(),
                   .b = apart ? Tensor(pb.view()) : Tensor{},
                   .y = y2.view(),
                   .layout = layout},
                  o);
          EXPECT_TRUE(y.same_bytes(y2)) << act << static_cast<int>(gate) << " " << sx.text();
          backward(f,
                   {.grad = g.input(),
                    .x = x.input(),
                    .b = apart ? b.input() : Tensor{},
                    .dx = dx.view(),
                    .dbias = dbias.view(),
                    .layout = layout},
                   o);
          backward(f,
                   {.grad = pg.view(),
                    .x = px.view(),
                    .b = apart ? Tensor(pb.view()) : Tensor{},
                    .dx = dx2.view(),
                    .dbias = dbias2.view(),
                    .layout = layout},
                   o);
          EXPECT_TRUE(dx.same_bytes(dx2) && dbias.same_bytes(dbias2))
              << act << static_cast<int>(gate) << " " << sx.text() << " " << sg.text();
        }
        // From codes to codes.
        const Encoded q(sg, m, wide);
        backward(f,
                 {.grad = g.input(),
                  .x = x.input(),
                  .b = apart ? b.input() : Tensor{},
                  .dx = q.tensor(),
                  .layout = layout},
                 kStrict);
        const Mat dx(DType::f32, m, wide);
        backward(f,
                 {.grad = pg.view(),
                  .x = px.view(),
                  .b = apart ? Tensor(pb.view()) : Tensor{},
                  .dx = dx.view(),
                  .layout = layout},
                 kStrict);
        EXPECT_EQ(q.differs(quantise_ref(sg, numbers(dx), m, wide)), "") << act << sg.text();
      }
    }
}

// eager: the value is rounded to the chain's dtype before scaling.
TEST(Quantize, EagerRoundsFirst) {
  for (const DType d : kPlain)
    for (const char* act : {"gelu", "swiglu", "mish"})
      for (const Gate gate : {Gate::stacked, Gate::by8, Gate::separate}) {
        const Call c(act, gate, 50, 96, true, d, 4);
        if (!c.gated && gate != Gate::stacked) continue;
        const Activation f = activation(act);
        const Mat y(d, c.m, c.h), dx(d, c.m, c.wide());
        forward(f, c.forward_call(y.view()), kEager);
        backward(f, c.backward_call(dx.view()), kEager);
        for (const Spec& s : all_specs()) {
          if (!chosen()) continue;
          const Encoded qy(s, c.m, c.h), qx(s, c.m, c.wide());
          forward(f, c.forward_call(qy.tensor()), kEager);
          backward(f, c.backward_call(qx.tensor()), kEager);
          EXPECT_EQ(qy.differs(quantise_ref(s, numbers(y), c.m, c.h)), "") << c.text() << s.text();
          EXPECT_EQ(qx.differs(quantise_ref(s, numbers(dx), c.m, c.wide())), "")
              << c.text() << s.text();
        }
      }
}

TEST(Quantize, ScaledFormsAndTheirGradients) {
  const int64_t m = 39, h = 96;
  const Activation f = scaled(activation("swiglu"));
  const Mat x = Mat(DType::bf16, m, 2 * h).fill(1), s = Mat(DType::f32, m, 1).fill(2),
            g = Mat(DType::bf16, m, h).fill(3);
  const Mat y(DType::f32, m, h), dx(DType::f32, m, 2 * h), ds(DType::f32, m, 1);
  forward(f, {.x = x.view(), .scale = s.view(), .y = y.view()}, kStrict);
  backward(
      f, {.grad = g.view(), .x = x.view(), .scale = s.view(), .dx = dx.view(), .dscale = ds.view()},
      kStrict);
  for (const Spec& spec : all_specs(true)) {
    const Encoded qy(spec, m, h), qx(spec, m, 2 * h);
    const Mat sums(DType::f32, m, 1);
    forward(f, {.x = x.view(), .scale = s.view(), .y = qy.tensor()}, kStrict);
    backward(f,
             {.grad = g.view(),
              .x = x.view(),
              .scale = s.view(),
              .dx = qx.tensor(),
              .dscale = sums.view()},
             kStrict);
    EXPECT_EQ(qy.differs(quantise_ref(spec, numbers(y), m, h)), "") << spec.text();
    EXPECT_EQ(qx.differs(quantise_ref(spec, numbers(dx), m, 2 * h)), "") << spec.text();
    EXPECT_TRUE(sums.same_bytes(ds)) << spec.text();
  }
}

// For empty tensors, the per-tensor values are still written.
TEST(Quantize, EmptyTensors) {
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{0, 64}, {64, 0}, {0, 0}})
    for (const Spec& s : all_specs(true)) {
      const Mat x(DType::f32, m, k), g(DType::f32, m, k);
      expect_quantised(s, x, "empty");
      const Encoded y(s, m, k), dx(s, m, k);
      const Mat dbias(DType::f32, 1, k), amax(DType::f32, 1, 1);
      const Activation f = activation("silu");
      forward(f, {.x = x.view(), .y = y.tensor(), .amax = amax.view()});
      EXPECT_EQ(y.differs(quantise_ref(s, numbers(x), m, k)), "") << s.text();
      EXPECT_EQ(bits(amax.at(0, 0)), 0U);
      backward(f, {.grad = g.view(), .x = x.view(), .dx = dx.tensor(), .dbias = dbias.view()});
      EXPECT_EQ(dx.differs(quantise_ref(s, numbers(x), m, k)), "") << s.text();
      for (int64_t c = 0; c < k; ++c) EXPECT_EQ(bits(dbias.at(0, c)), 0U);
    }
}

#if defined(__x86_64__)
// The host may flush subnormals. Scales, codes and sums must not depend on this.
TEST(Quantize, TheHostsFloatingPointModeDoesNotMatter) {
  Mat x(DType::f32, 40, 70);
  for (int64_t r = 0; r < 40; ++r)
    for (int64_t c = 0; c < 70; ++c) x.set(r, c, static_cast<float>(r * 70 + c) * 0x1p-149F);
  for (Spec s : all_specs(true)) {
    s.scale = 0x1.8p127F;
    const Encoded y(s, 40, 70), z(s, 40, 70);
    const Quantised q = quantise_ref(s, numbers(x), 40, 70);
    const Mat back(DType::f32, 40, 70), back2(DType::f32, 40, 70);
    quantize(x.view(), y.tensor());
    dequantize(y.input(), back.view());
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040U | 0x6000U);  // flush inputs and outputs, round towards zero
    quantize(x.view(), z.tensor());
    dequantize(z.input(), back2.view());
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after & 0xffc0U, (saved | 0xe040U) & 0xffc0U);
    EXPECT_EQ(z.differs(q), "") << s.text();
    EXPECT_TRUE(back.same_bytes(back2)) << s.text();
  }
}
#endif

// Invalid calls: the message contains op, part of the tensor, value and rule. No byte is written.
class Mistakes : public testing::Test {
 protected:
  static constexpr int64_t kM = 40, kK = 70;
  Mat x_ = Mat(DType::f32, kM, kK).fill(1);

  // `spoil` makes a valid tensor invalid.
  template <class Spoil>
  void bad(const Spec& s, Spoil spoil, std::initializer_list<std::string_view> parts,
           Code code = Code::invalid_argument) {
    const Encoded y(s, kM, kK), before = y;
    const Mat plain(DType::f32, kM, kK), dbias(DType::f32, 1, kK), amax(DType::f32, 1, 1);
    Tensor t = y.tensor();
    // Overlaps use the tensor's own memory, so the views are taken after `spoil`.
    spoil(t);
    expect_error([&] { quantize({.x = x_.view(), .y = t, .amax = amax.view()}); }, code, parts);
    expect_error([&] { forward(activation("gelu"), {.x = x_.view(), .y = t}); }, code,
                 {"gelu forward"});
    expect_error(
        [&] {
          backward(activation("gelu"),
                   {.grad = x_.view(), .x = x_.view(), .dx = t, .dbias = dbias.view()});
        },
        code, {"gelu backward"});
    EXPECT_TRUE(y.same_bytes(before)) << *parts.begin() << ": bytes changed";
    EXPECT_TRUE(amax.untouched() && dbias.untouched() && plain.untouched());
  }
};

TEST_F(Mistakes, Formats) {
  const Spec mx{.mode = Scaling::mxfp8}, cur{.mode = Scaling::current}, del{};
  const std::string below = str("below ", kScalings.size());
  bad(cur, [](Tensor& t) { t.format.scaling = static_cast<Scaling>(99); },
      {"quantize", "y", "scaling number 99", below.c_str()});
  bad(cur, [](Tensor& t) { t.format.dtype = static_cast<DType>(77); },
      {"quantize", "y", "dtype number 77", "below 6"});
  bad(mx, [](Tensor& t) { t.format.dtype = DType::bf16; },
      {"quantize", "y is bf16", "mxfp8", "e4m3 or e5m2"});
  bad(mx, [](Tensor& t) { t.format.dtype = DType::e8m0; },
      {"quantize", "y is e8m0", "e4m3 or e5m2"});
  bad(cur, [](Tensor& t) { t.format.eps = -1; }, {"quantize", "y has eps = -1", "not negative"});
  bad(cur, [](Tensor& t) { t.format.eps = kNan; }, {"quantize", "eps = nan", "finite"});
  bad(cur, [](Tensor& t) { t.format.eps = kInf; }, {"quantize", "eps = inf", "finite"});
  bad(mx, [](Tensor& t) { t.format.eps = 0.5F; },
      {"quantize", "eps = 0.5", "mxfp8", "current and block"});
  bad(del, [](Tensor& t) { t.format.eps = 0.5F; }, {"quantize", "eps = 0.5", "delayed"});
  bad(mx, [](Tensor& t) { t.format.power_of_two = true; },
      {"quantize", "power_of_two", "mxfp8", "current and block"});
  bad(del, [](Tensor& t) { t.format.power_of_two = false; },
      {"quantize", "power_of_two", "delayed"});
  bad(cur, [](Tensor& t) { t.format.swizzled = true; },
      {"quantize", "swizzled", "current", "only mxfp8"});
}

TEST_F(Mistakes, DataAndScales) {
  const Spec mx{.mode = Scaling::mxfp8, .column = true},
      cur{.mode = Scaling::current, .column = true},
      line{.mode = Scaling::block1x128, .column = true};
  bad(mx, [](Tensor& t) { t.rowwise.data.dtype = DType::e5m2; },
      {"quantize", "y.rowwise.data", "e5m2", "e4m3"});
  bad(mx, [](Tensor& t) { t.rowwise.data.rows = 39; },
      {"quantize", "y.rowwise.data is 39x70", "40x70"});
  bad(mx, [](Tensor& t) { t.columnwise.data.cols = 69; },
      {"quantize", "y.columnwise.data is 40x69", "40x70"});
  bad(line,
      [](Tensor& t) { t.columnwise.data = matrix(t.columnwise.data.data, DType::e4m3, 40, 70); },
      {"quantize", "y.columnwise.data is 40x70", "70x40", "transposed"});
  bad(mx, [](Tensor& t) { t.rowwise.data.stride = 3; },
      {"quantize", "y.rowwise.data", "stride 3", "70"});
  bad(mx, [](Tensor& t) { t.rowwise.data.rows = -1; }, {"quantize", "y.rowwise.data", "negative"});
  bad(mx, [](Tensor& t) { t.columnwise.data.data = nullptr; },
      {"quantize", "y.columnwise.data", "null"});
  bad(mx, [](Tensor& t) { t.rowwise.scale_inv = {}; },
      {"quantize", "y.rowwise.scale_inv is not given", "mxfp8", "128x4", "e8m0"});
  bad(cur, [](Tensor& t) { t.rowwise.scale_inv = t.columnwise.scale_inv = {}; },
      {"quantize", "scale_inv is not given", "current", "1x1", "f32"});
  bad(mx, [](Tensor& t) { t.columnwise.scale_inv.dtype = DType::f32; },
      {"quantize", "y.columnwise.scale_inv", "f32", "e8m0"});
  bad(line, [](Tensor& t) { t.rowwise.scale_inv.cols = 41; },
      {"quantize", "y.rowwise.scale_inv is 1x41", "1x40", "block1x128", "40x70"});
  bad(line, [](Tensor& t) { t.columnwise.scale_inv.data = nullptr; },
      {"quantize", "y.columnwise.scale_inv", "null"});
  bad(mx, [](Tensor& t) { t.rowwise.scale_inv.stride = 5, t.format.swizzled = true; },
      {"quantize", "y.rowwise.scale_inv", "stride 5", "dense"});
  bad(cur, [](Tensor& t) { t.rowwise.scale_inv.cols = 2; },
      {"quantize", "y.rowwise.scale_inv is 1x2", "1x1"});
}

TEST_F(Mistakes, WhatLiesBeside) {
  const Spec mx{.mode = Scaling::mxfp8}, cur{.mode = Scaling::current}, del{};
  static Mat other(DType::f32, 1, 3);
  bad(del, [](Tensor& t) { t.scale = {}; }, {"quantize", "y.scale is not given", "delayed"});
  bad(cur, [](Tensor& t) { t.scale = other.view(); },
      {"quantize", "y.scale is given", "current", "leave it out"});
  bad(del, [](Tensor& t) { t.scale.cols = 2; }, {"quantize", "y.scale is 1x2", "1x1"});
  bad(del, [](Tensor& t) { t.scale.dtype = DType::f16; }, {"quantize", "y.scale", "f16", "f32"});
  bad(mx, [](Tensor& t) { t.amax = other.view(); }, {"quantize", "y.amax is given", "mxfp8"});
  bad(cur, [](Tensor& t) { t.amax.dtype = DType::bf16; }, {"quantize", "y.amax", "bf16", "f32"});
  bad(cur, [](Tensor& t) { t.amax.rows = 3; }, {"quantize", "y.amax is 3x1", "1x1"});
  bad(cur, [](Tensor& t) { t.amax_given = true, t.amax = {}; },
      {"quantize", "y.amax_given", "amax"});
  bad(del, [](Tensor& t) { t.amax_given = true; }, {"quantize", "y.amax_given", "current"});
  bad(mx, [](Tensor& t) { t.health.cols = 2; }, {"quantize", "y.health is 1x2", "1x3"});
  bad(mx, [](Tensor& t) { t.health.dtype = DType::f16; }, {"quantize", "y.health", "f16", "f32"});
  bad(mx, [](Tensor& t) { t.health.data = nullptr; }, {"quantize", "y.health", "null"});
  EXPECT_TRUE(other.untouched());
}

TEST_F(Mistakes, Overlaps) {
  const Spec mx{.mode = Scaling::mxfp8, .column = true}, cur{.mode = Scaling::current}, del{};
  bad(mx, [](Tensor& t) { t.columnwise.data.data = t.rowwise.data.data; },
      {"y.rowwise.data", "y.columnwise.data", "overlap"});
  bad(mx, [](Tensor& t) { t.rowwise.scale_inv.data = t.rowwise.data.data; },
      {"y.rowwise.data", "y.rowwise.scale_inv", "overlap"});
  bad(mx, [](Tensor& t) { t.health.data = t.columnwise.scale_inv.data; },
      {"y.columnwise.scale_inv", "y.health", "overlap"});
  bad(cur, [](Tensor& t) { t.amax.data = t.rowwise.scale_inv.data; },
      {"y.rowwise.scale_inv", "y.amax", "overlap"});
  bad(del, [](Tensor& t) { t.scale.data = t.amax.data; }, {"y.amax", "y.scale", "overlap"});
  // The memory of the input is invalid as output, even if it fits.
  const Mat keep = x_;
  bad(mx, [&](Tensor& t) { t.rowwise.data.data = x_.view().data; },
      {"y.rowwise.data", "overlaps the input x"});
  EXPECT_TRUE(x_.same_bytes(keep));
}

TEST_F(Mistakes, EncodedInputs) {
  const Spec s{.mode = Scaling::mxfp8, .column = true};
  Encoded x(s, kM, kK);
  x.put(quantise_ref(s, numbers(x_), kM, kK));
  const Mat y(DType::f32, kM, kK);
  const auto bad_input = [&](auto spoil, std::initializer_list<std::string_view> parts) {
    Tensor t = x.input();
    spoil(t);
    expect_error([&] { dequantize(t, y.view()); }, Code::invalid_argument, parts);
    EXPECT_TRUE(y.untouched());
  };
  bad_input([](Tensor& t) { t.rowwise.scale_inv = {}; },
            {"quantize", "x.rowwise.scale_inv is not given"});
  bad_input([](Tensor& t) { t.rowwise.scale_inv.cols = 3; },
            {"quantize", "x.rowwise.scale_inv is 128x3"});
  bad_input([](Tensor& t) { t.rowwise.data.dtype = DType::f32; },
            {"quantize", "x.rowwise.data", "f32"});
  bad_input([](Tensor& t) { t.columnwise.data.rows = 41; },
            {"quantize", "x.columnwise.data is 41x70"});
  bad_input([](Tensor& t) { t.format.dtype = DType::f16; }, {"quantize", "x is f16", "mxfp8"});
  bad_input([](Tensor& t) { t.format.scaling = static_cast<Scaling>(200); },
            {"quantize", "x", "200"});
  bad_input([](Tensor& t) { t.rowwise.data.data = nullptr; },
            {"quantize", "x.rowwise.data", "null"});
  const Mat narrow(DType::f32, kM, kK - 1);
  expect_error([&] { dequantize(x.input(), narrow.view()); }, Code::invalid_argument,
               {"quantize", "y is 40x69", "40x70"});
  expect_error([&] { quantize({.x = x.input()}); }, Code::invalid_argument,
               {"quantize", "no output"});
}

// The format of a tensor and its views must match, also for plain tensors.
TEST_F(Mistakes, PlainTensors) {
  const Mat y(DType::f32, kM, kK), half(DType::bf16, kM, kK), t(DType::f32, kK, kM);
  const Encoded q({.mode = Scaling::mxfp8}, kM, kK);
  Tensor x = x_.view();
  x.format.dtype = DType::bf16;  // the view is f32
  expect_error([&] { dequantize(x, y.view()); }, Code::invalid_argument,
               {"quantize", "x", "f32", "bf16"});
  Tensor out = y.view();
  out.format.dtype = DType::f16;
  expect_error([&] { quantize(x_.view(), out); }, Code::invalid_argument,
               {"quantize", "y", "f32", "f16"});
  out = y.view();
  out.rowwise.scale_inv = q.scales(false).view();
  expect_error([&] { quantize(x_.view(), out); }, Code::invalid_argument,
               {"quantize", "y.rowwise.scale_inv", "none"});
  out = y.view();
  out.health = half.rows_from(0, 1);
  expect_error([&] { quantize(x_.view(), out); }, Code::invalid_argument, {"quantize", "y.health"});
  out = y.view();
  out.format.swizzled = true;
  expect_error([&] { quantize(x_.view(), out); }, Code::invalid_argument, {"quantize", "swizzled"});
  // fp8 without a scale is not a plain dtype.
  Tensor codes;
  codes.format.dtype = DType::e4m3;
  codes.rowwise.data = q.data(false).view();
  expect_error([&] { quantize(x_.view(), codes); }, Code::unsupported,
               {"quantize", "y", "e4m3", "scal"});
  EXPECT_TRUE(y.untouched() && half.untouched() && t.untouched());
}

// A scale_inv without its encoding is checked or rejected, never written unchecked.
TEST_F(Mistakes, AScaleWithoutItsData) {
  static Mat other(DType::f32, 2, 2);
  for (const Scaling mode : {Scaling::delayed, Scaling::current}) {
    const Spec s{.mode = mode};
    bad(s, [](Tensor& t) { t.columnwise.scale_inv = other.view(); },
        {"quantize", "y.columnwise.scale_inv is 2x2", "1x1"});
    bad(s,
        [](Tensor& t) {
          t.columnwise.scale_inv = t.rowwise.scale_inv;
          t.columnwise.scale_inv.dtype = DType::bf16;
        },
        {"quantize", "y.columnwise.scale_inv", "bf16", "f32"});
  }
  const Mat y(DType::f32, kK, kM);
  Tensor t;
  t.columnwise.data = y.view();
  t.rowwise.scale_inv = other.rows_from(0, 1);
  expect_error([&] { quantize(x_.view(), t); }, Code::invalid_argument,
               {"quantize", "y.rowwise.scale_inv"});
  EXPECT_TRUE(other.untouched());
  EXPECT_TRUE(y.untouched());
}

// quantize with dbias is one call for the user, so messages refer to x and y.
TEST_F(Mistakes, QuantizeWithColumnSums) {
  const Mat dbias(DType::f32, 1, kK), y(DType::f32, kM, kK);
  const auto bad_sums = [&](const Quantize& c, std::initializer_list<std::string_view> parts) {
    expect_error([&] { quantize(c); }, Code::invalid_argument, parts);
    EXPECT_TRUE(dbias.untouched() && y.untouched());
  };
  View wrong = dbias.view();
  wrong.cols = kK - 1;
  bad_sums({.x = x_.view(), .y = y.view(), .dbias = wrong}, {"quantize", "dbias is 1x69", "1x70"});
  bad_sums({.x = x_.view(), .y = y.view(), .dbias = y.rows_from(3, 1)},
           {"quantize", "dbias", "overlap"});
  wrong = x_.view();
  wrong.data = static_cast<char*>(wrong.data) + 4;
  bad_sums({.x = x_.view(), .y = wrong, .dbias = dbias.view()},
           {"quantize", "output y", "input x"});
}

}  // namespace
}  // namespace tenon::test
