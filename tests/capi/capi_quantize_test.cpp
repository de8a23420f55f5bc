// Tests of quantised tensors and dropout through the C ABI: every mode against the reference, and
// every invalid call with its code, its message and unchanged outputs.
#include "support/quantize_reference.h"
#include "tenon/tenon.h"

namespace tenon::test {
namespace {

tenon_view c_view(const View& v) {
  return {v.data, v.rows, v.cols, v.stride, static_cast<int32_t>(v.dtype)};
}

// Converts the views of a C++ tensor to the C ABI.
struct CTensor {
  tenon_tensor t{};
  tenon_view views[7];

  explicit CTensor(const Tensor& from) {
    size_t n = 0;
    const auto put = [&](const View& v) -> const tenon_view* {
      if (!v.given()) return nullptr;
      views[n] = c_view(v);
      return &views[n++];
    };
    t.size = sizeof t;
    t.scaling = info(from.format.scaling).name.data();
    t.dtype = static_cast<int32_t>(from.format.dtype);
    if (from.format.power_of_two)
      t.power_of_two = *from.format.power_of_two ? TENON_POWER_OF_TWO : TENON_EXACT_SCALE;
    t.eps = from.format.eps;
    t.swizzled = from.format.swizzled;
    t.amax_given = from.amax_given;
    t.data = put(from.rowwise.data);
    t.scale_inv = put(from.rowwise.scale_inv);
    t.columnwise_data = put(from.columnwise.data);
    t.columnwise_scale_inv = put(from.columnwise.scale_inv);
    t.scale = put(from.scale);
    t.amax = put(from.amax);
    t.health = put(from.health);
  }
  CTensor(const CTensor&) = delete;
};

template <class T>
T sized() {
  T args{};
  args.size = sizeof(T);
  return args;
}

const tenon_options* strict() {
  static const tenon_options kStrict{
      sizeof(tenon_options), TENON_STRICT, TENON_ONCE, TENON_CPU, nullptr, nullptr, nullptr};
  return &kStrict;
}

void succeeds(int code, const std::string& what = "") {
  EXPECT_EQ(code, TENON_OK) << what << ": " << tenon_last_error();
  if (code == TENON_OK) {
    EXPECT_STREQ(tenon_last_error(), "");
  }
}
void fails(int code, int expected, std::initializer_list<const char*> parts) {
  EXPECT_EQ(code, expected) << tenon_last_error();
  for (const char* part : parts)
    EXPECT_NE(std::strstr(tenon_last_error(), part), nullptr)
        << "no '" << part << "' in: " << tenon_last_error();
}

constexpr std::pair<int64_t, int64_t> kShapes[] = {
    {5, 7}, {33, 130}, {130, 33}, {1, 1}, {0, 40}, {40, 0}, {0, 0}, {128, 128}, {3, 257}, {257, 4}};

std::string expect_quantised(const Spec& s, const Encoded& got, const std::vector<float>& v,
                             int64_t m, int64_t k, float held = 0) {
  return got.differs(quantise_ref(s, v, m, k), held);
}

TEST(CApiQuantize, EncodingShapeOfEveryMode) {
  for (const ScalingInfo& mode : kScalings)
    for (const auto& [m, k] : kShapes)
      for (const bool column : {false, true}) {
        const auto s = *scaling_named(mode.name);
        int64_t data[3] = {-7, -7, -7}, scales[3] = {-7, -7, -7};
        succeeds(tenon_encoding_shape(mode.name.data(), m, k, column, data, scales));
        const ref::Size d = ref::data_size(s, m, k, column), n = ref::scale_size(s, m, k, column);
        EXPECT_TRUE(data[0] == d.rows && data[1] == d.cols && data[2] == -7) << mode.name;
        EXPECT_TRUE(scales[0] == n.rows && scales[1] == n.cols && scales[2] == -7) << mode.name;
        succeeds(tenon_encoding_shape(mode.name.data(), m, k, column, nullptr, nullptr));
      }
  int64_t data[2] = {-7, -7}, scales[2] = {-7, -7};
  constexpr int64_t kMost = int64_t{1} << 60;
  succeeds(tenon_encoding_shape(nullptr, 3, 4, 1, data, nullptr));  // none
  EXPECT_TRUE(data[0] == 4 && data[1] == 3);
  succeeds(tenon_encoding_shape("mxfp8", kMost, kMost, 0, nullptr, scales));
  EXPECT_TRUE(scales[0] == kMost && scales[1] == kMost / 32);
  data[0] = data[1] = scales[0] = scales[1] = -7;
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{-1, 4},
                             {4, -1},
                             {kMost + 1, 1},
                             {1, INT64_MAX},
                             {INT64_MIN, INT64_MIN}})
    fails(tenon_encoding_shape("mxfp8", m, k, 0, data, scales), TENON_INVALID_ARGUMENT,
          {"tenon_encoding_shape", std::to_string(m).c_str(), "2^60"});
  for (const char* name : {"", "mxfp4", "MXFP8", "block", "none "})
    fails(tenon_encoding_shape(name, 4, 4, 0, data, scales), TENON_INVALID_ARGUMENT,
          {"tenon_encoding_shape", "the scaling '", name, "block1x128"});
  EXPECT_TRUE(data[0] == -7 && data[1] == -7 && scales[0] == -7 && scales[1] == -7);
}

TEST(CApiQuantize, ScalingsAreThoseOfTheTable) {
  size_t count = 0;
  succeeds(tenon_scalings(nullptr, 9, &count));
  ASSERT_EQ(count, kScalings.size());
  for (const size_t capacity : {size_t{0}, size_t{2}, count, count + 2}) {
    std::vector<tenon_scaling> list(count + 2, tenon_scaling{});
    succeeds(tenon_scalings(list.data(), capacity, nullptr));
    for (size_t i = 0; i < list.size(); ++i)
      EXPECT_EQ(list[i].name != nullptr, i < std::min(capacity, count)) << capacity;
  }
  std::vector<tenon_scaling> list(count);
  succeeds(tenon_scalings(list.data(), count, nullptr));
  for (size_t i = 0; i < count; ++i) {
    const ScalingInfo& mode = kScalings[i];
    const tenon_scaling& s = list[i];
    EXPECT_EQ(s.name, mode.name);
    EXPECT_EQ(s.scale_dtype, static_cast<int32_t>(mode.scale)) << s.name;
    EXPECT_EQ(s.transposes != 0, mode.transposes) << s.name;
    EXPECT_EQ(s.single != 0, mode.name == "delayed" || mode.name == "current") << s.name;
    EXPECT_EQ(s.scale_given != 0, mode.name == "delayed") << s.name;
    for (const size_t side : {0, 1}) {
      EXPECT_EQ(s.block_rows[side], mode.blocks[side].rows) << s.name;
      EXPECT_EQ(s.block_cols[side], mode.blocks[side].cols) << s.name;
    }
  }
  const tenon_scaling& mx = list[static_cast<size_t>(Scaling::mxfp8)];
  EXPECT_EQ(mx.scale_dtype, TENON_E8M0);
  EXPECT_TRUE(mx.block_rows[0] == 1 && mx.block_cols[0] == 32 && mx.block_rows[1] == 32);
}

TEST(CApiQuantize, EveryModeAndOrientation) {
  unsigned seed = 1;
  for (const Spec& s : all_specs(true))
    for (const auto& [m, k] : kShapes) {
      const DType dtype = kPlain[seed % 3];
      const bool odd = seed % 2;
      const Mat x = Mat(dtype, m, k, odd ? 3 : 0, odd ? 1 : 0).fill(seed, seed % 3 == 0);
      ++seed;
      const Encoded y(s, m, k, odd);
      Memory amax(DType::f32, 1, 1);
      const CTensor to(y.tensor());
      const tenon_view from = c_view(x.view()), most = c_view(amax.view());
      auto args = sized<tenon_quantize_args>();
      args.x = &from, args.y_encoded = &to.t, args.amax = &most;
      succeeds(tenon_quantize(&args, nullptr), s.text());
      const std::vector<float> v = numbers(x);
      EXPECT_EQ(expect_quantised(s, y, v, m, k), "") << s.text() << " " << m << "x" << k;
      EXPECT_TRUE(equal(amax.number(), from_bits(ref::amax_of(v.data(), m, k)))) << s.text();
    }
}

TEST(CApiQuantize, PowerOfTwoEpsAndAmaxGiven) {
  constexpr int64_t kM = 9, kK = 140;
  for (const Scaling mode : {Scaling::current, Scaling::block1x128, Scaling::block128x128})
    for (const auto& pow2 : {std::optional<bool>{}, std::optional(true), std::optional(false)})
      for (const float eps : {0.0F, 3.0F, 1e6F})
        for (const bool given : {false, true}) {
          if (given && mode != Scaling::current) continue;
          Spec s{.dtype = kFp8[eps > 4], .mode = mode, .column = true, .eps = eps, .pow2 = pow2};
          if (given) s.amax = bits(11.0F);
          const Mat x = Mat(DType::f32, kM, kK).fill(3);
          const Encoded y(s, kM, kK);
          const CTensor to(y.tensor());
          EXPECT_EQ(to.t.amax_given, given);
          const tenon_view from = c_view(x.view());
          auto args = sized<tenon_quantize_args>();
          args.x = &from, args.y_encoded = &to.t;
          succeeds(tenon_quantize(&args, nullptr), s.text());
          EXPECT_EQ(expect_quantised(s, y, numbers(x), kM, kK), "") << s.text();
        }
}

// One scale may be given with either encoding, or with both.
TEST(CApiQuantize, OneScaleInEitherPlace) {
  constexpr int64_t kM = 6, kK = 10;
  for (const Scaling mode : {Scaling::delayed, Scaling::current})
    for (const bool beside_column : {false, true}) {
      const Spec s{.mode = mode, .row = !beside_column, .column = beside_column, .scale = 3};
      const Mat x = Mat(DType::f32, kM, kK).fill(8);
      const Encoded y(s, kM, kK);
      CTensor to(y.tensor());
      std::swap(to.t.scale_inv, to.t.columnwise_scale_inv);
      const tenon_view from = c_view(x.view());
      auto args = sized<tenon_quantize_args>();
      args.x = &from, args.y_encoded = &to.t;
      succeeds(tenon_quantize(&args, nullptr), s.text());
      EXPECT_EQ(expect_quantised(s, y, numbers(x), kM, kK), "") << s.text();
    }
}

TEST(CApiQuantize, DequantiseEveryMode) {
  unsigned seed = 50;
  for (const Spec& s : all_specs(true))
    for (const auto& [m, k] : kShapes) {
      const Mat x = Mat(DType::f32, m, k).fill(seed++, true);
      const Quantised q = quantise_ref(s, numbers(x), m, k);
      Encoded from(s, m, k, seed % 2);
      from.put(q);
      const CTensor encoded(from.input());
      Mat y(kPlain[seed % 3], m, k, 2);
      Memory dbias(DType::f32, 1, k);
      const tenon_view to = c_view(y.view()), sums = c_view(dbias.view());
      auto args = sized<tenon_quantize_args>();
      args.x_encoded = &encoded.t, args.y = &to;
      const bool summed = seed % 2;
      if (summed) args.dbias = &sums;
      succeeds(tenon_quantize(&args, nullptr), s.text());
      const std::vector<float> v = dequantise_ref(s, q, m, k, !s.row);
      for (int64_t i = 0; i < m * k; ++i)
        expect_element(y, i / k, i % k, v[static_cast<size_t>(i)], s.text());
      for (int64_t c = 0; summed && c < k; ++c) {
        std::vector<float> column;
        for (int64_t r = 0; r < m; ++r) column.push_back(v[static_cast<size_t>(r * k + c)]);
        EXPECT_TRUE(equal(dbias.number(c), tree(column))) << s.text() << " column " << c;
      }
      EXPECT_TRUE(y.guards_hold());
    }
}

TEST(CApiQuantize, FromEveryEncodingToEveryOther) {
  constexpr int64_t kM = 35, kK = 131;
  const Mat x = Mat(DType::f32, kM, kK).fill(5, true);
  for (const Spec& from : all_specs(true)) {
    const Quantised q = quantise_ref(from, numbers(x), kM, kK);
    Encoded source(from, kM, kK);
    source.put(q);
    const CTensor encoded(source.input());
    const std::vector<float> v = dequantise_ref(from, q, kM, kK, !from.row);
    for (const Spec& to : all_specs(true)) {
      if (!to.row || !to.column) continue;
      const Encoded y(to, kM, kK);
      const CTensor target(y.tensor());
      auto args = sized<tenon_quantize_args>();
      args.x_encoded = &encoded.t, args.y_encoded = &target.t;
      succeeds(tenon_quantize(&args, nullptr));
      EXPECT_EQ(expect_quantised(to, y, v, kM, kK), "") << from.text() << " to " << to.text();
    }
  }
}

// "none": a transposed copy, alone or in addition to the rowwise one, written and read.
TEST(CApiQuantize, TransposedCopies) {
  constexpr int64_t kM = 37, kK = 50;
  const Mat x = Mat(DType::f32, kM, kK).fill(4, true);
  const tenon_view from = c_view(x.view());
  for (const DType d : kPlain)
    for (const bool both : {false, true}) {
      const Mat row(d, kM, kK, 1), column(d, kK, kM, 2), back(DType::f32, kM, kK);
      const tenon_view rowwise = c_view(row.view()), columnwise = c_view(column.view());
      const tenon_view again = c_view(back.view());
      auto t = sized<tenon_tensor>();
      t.dtype = static_cast<int32_t>(d);
      if (both) t.data = &rowwise, t.scaling = "none";
      t.columnwise_data = &columnwise;
      auto args = sized<tenon_quantize_args>();
      args.x = &from, args.y_encoded = &t;
      succeeds(tenon_quantize(&args, nullptr));
      auto read = sized<tenon_quantize_args>();
      read.x_encoded = &t, read.y = &again;
      succeeds(tenon_quantize(&read, nullptr));
      for (int64_t r = 0; r < kM; ++r)
        for (int64_t c = 0; c < kK; ++c) {
          expect_element(column, c, r, x.at(r, c), "columnwise");
          if (both) expect_element(row, r, c, x.at(r, c), "rowwise");
          expect_element(back, r, c, rounded_ref(d, x.at(r, c)), "read again");
        }
      EXPECT_TRUE(row.guards_hold() && column.guards_hold());
    }
}

float relu(float x) { return x > 0 || x != x ? x : 0.0F; }

TEST(CApiQuantize, ForwardFromAndToEveryEncoding) {
  constexpr int64_t kM = 34, kK = 132;
  unsigned seed = 90;
  for (const Spec& s : all_specs(true)) {
    const Spec in = sides({.dtype = kFp8[seed % 2],
                           .mode = kModes[seed % std::size(kModes)],
                           .swizzled = kModes[seed % std::size(kModes)] == Scaling::mxfp8,
                           .scale = 7})[seed % 3];
    const Mat a = Mat(DType::f32, kM, kK).fill(seed++), b = Mat(DType::f32, kM, kK).fill(seed);
    const Quantised qa = quantise_ref(in, numbers(a), kM, kK);
    const Quantised qb = quantise_ref(in, numbers(b), kM, kK);
    Encoded first(in, kM, kK), second(in, kM, kK);
    first.put(qa), second.put(qb);
    const CTensor x(first.input()), linear(second.input());
    const std::vector<float> va = dequantise_ref(in, qa, kM, kK, !in.row);
    const std::vector<float> vb = dequantise_ref(in, qb, kM, kK, !in.row);
    for (const bool gated : {false, true}) {
      std::vector<float> want;
      for (size_t i = 0; i < va.size(); ++i) want.push_back(relu(va[i]) * (gated ? vb[i] : 1));
      const Encoded y(s, kM, kK, seed % 2);
      const CTensor to(y.tensor());
      Memory amax(DType::f32, 1, 1);
      const tenon_view most = c_view(amax.view());
      auto args = sized<tenon_forward_args>();
      args.x_encoded = &x.t, args.y_encoded = &to.t, args.amax = &most;
      if (gated) args.b_encoded = &linear.t;
      succeeds(tenon_forward(gated ? "reglu" : "relu", &args, strict()));
      EXPECT_EQ(expect_quantised(s, y, want, kM, kK), "") << in.text() << " to " << s.text();
      EXPECT_EQ(bits(amax.number()), ref::amax_of(want.data(), kM, kK));
      // Only the amax, of the same values.
      Memory alone(DType::f32, 1, 1);
      const tenon_view only = c_view(alone.view());
      args.y_encoded = nullptr, args.amax = &only;
      succeeds(tenon_forward(gated ? "reglu" : "relu", &args, strict()));
      EXPECT_EQ(bits(alone.number()), bits(amax.number()));
    }
  }
}

TEST(CApiQuantize, BackwardFromAndToEveryEncoding) {
  constexpr int64_t kM = 33, kK = 130;
  unsigned seed = 200;
  for (const Spec& s : all_specs(true)) {
    const Spec in = sides(
        {.dtype = kFp8[seed % 2], .mode = kModes[seed % std::size(kModes)], .scale = 5})[seed % 3];
    Mat values[3] = {{DType::f32, kM, kK}, {DType::f32, kM, kK}, {DType::f32, kM, kK}};
    std::vector<float> v[3];  // grad, a, b
    std::vector<Encoded> memory(3, Encoded(in, kM, kK));
    for (size_t i = 0; i < 3; ++i) {
      const Quantised q = quantise_ref(in, numbers(values[i].fill(seed++)), kM, kK);
      memory[i].put(q);
      v[i] = dequantise_ref(in, q, kM, kK, !in.row);
    }
    const CTensor grad(memory[0].input()), x(memory[1].input()), b(memory[2].input());
    for (const bool gated : {false, true}) {
      std::vector<float> da, db;
      for (size_t i = 0; i < v[0].size(); ++i) {
        da.push_back(v[1][i] > 0 ? gated ? v[0][i] * v[2][i] : v[0][i] : 0);
        db.push_back(v[0][i] * relu(v[1][i]));
      }
      const Encoded dx(s, kM, kK), dlinear(s, kM, kK, true);
      const CTensor to(dx.tensor()), other(dlinear.tensor());
      Memory dbias(DType::f32, 1, gated ? 2 * kK : kK), amax(DType::f32, 1, 1);
      const tenon_view sums = c_view(dbias.view()), most = c_view(amax.view());
      auto args = sized<tenon_backward_args>();
      args.grad_encoded = &grad.t, args.x_encoded = &x.t, args.dx_encoded = &to.t;
      args.dbias = &sums, args.amax = &most;
      if (gated) args.b_encoded = &b.t, args.db_encoded = &other.t;
      const char* act = gated ? "reglu" : "relu";
      succeeds(tenon_backward(act, &args, strict()));
      EXPECT_EQ(expect_quantised(s, dx, da, kM, kK), "") << in.text() << " to " << s.text();
      uint32_t largest = ref::amax_of(da.data(), kM, kK);
      if (gated) {
        EXPECT_EQ(expect_quantised(s, dlinear, db, kM, kK), "") << s.text();
        largest = std::max(largest, ref::amax_of(db.data(), kM, kK));
      }
      EXPECT_EQ(bits(amax.number()), largest);
      for (int64_t c = 0; c < (gated ? 2 * kK : kK); ++c) {
        std::vector<float> column;
        for (int64_t r = 0; r < kM; ++r)
          column.push_back((c < kK ? da : db)[static_cast<size_t>(r * kK + c % kK)]);
        EXPECT_EQ(bits(dbias.number(c)), bits(tree(column))) << s.text() << " column " << c;
      }
      Memory alone(DType::f32, 1, 1);
      const tenon_view only = c_view(alone.view());
      args.dx_encoded = args.db_encoded = nullptr;
      args.dbias = nullptr, args.amax = &only;
      succeeds(tenon_backward(act, &args, strict()));
      EXPECT_EQ(bits(alone.number()), largest);
    }
  }
}

TEST(CApiQuantize, DelayedAmaxIsJoined) {
  constexpr int64_t kM = 4, kK = 9;
  const Spec s{.scale = 2};
  const Mat x = Mat(DType::f32, kM, kK).fill(6);
  const tenon_view from = c_view(x.view());
  const std::vector<float> v = numbers(x);
  for (const float held : {0.0F, 0.25F, 1e9F, -1e9F, kInf}) {
    Encoded y(s, kM, kK);
    y.hold_amax(held);
    const CTensor to(y.tensor());
    auto args = sized<tenon_quantize_args>();
    args.x = &from, args.y_encoded = &to.t;
    succeeds(tenon_quantize(&args, nullptr));
    EXPECT_EQ(expect_quantised(s, y, v, kM, kK, held), "") << held;
    auto again = sized<tenon_forward_args>();
    again.x = &from, again.y_encoded = &to.t;
    succeeds(tenon_forward("x*0", &again, nullptr));  // smaller amax: the slot keeps its value
    EXPECT_EQ(y.amax(), from_bits(std::max(ref::amax_of(v.data(), kM, kK), bits(std::fabs(held)))));
  }
}

TEST(CApiQuantize, HealthCounts) {
  const float values[] = {1, 500, -600, kInf, -kInf, kNan, 1e-9F, -1e-20F, 0, -0.0F, 448, 0x1p-9F};
  constexpr int64_t kK = std::size(values);
  for (const bool column : {false, true}) {
    const Spec s{.row = !column, .column = column, .scale = 1};
    Mat x(DType::f32, 1, kK);
    for (int64_t i = 0; i < kK; ++i) x.set(0, i, values[i]);
    const Encoded y(s, 1, kK);
    const CTensor to(y.tensor());
    const tenon_view from = c_view(x.view());
    auto args = sized<tenon_quantize_args>();
    args.x = &from, args.y_encoded = &to.t;
    succeeds(tenon_quantize(&args, nullptr));
    EXPECT_EQ(y.health().number(0), 2);
    EXPECT_EQ(y.health().number(1), 2);
    EXPECT_EQ(y.health().number(2), 3);
    EXPECT_TRUE(y.health().guards_hold());
  }
}

struct Delayed {
  std::vector<float> history, scale;
  int64_t length, n, pad;
  Delayed(int64_t length, int64_t n, int64_t pad)
      : history(static_cast<size_t>(length * (n + pad)), -5),
        scale(static_cast<size_t>(n), 1.5F),
        length(length),
        n(n),
        pad(pad) {}
  float& at(int64_t i, int64_t k) { return history[static_cast<size_t>(i * (n + pad) + k)]; }
  int update(int32_t dtype, int32_t margin, bool recent, const tenon_options* o = nullptr) {
    const tenon_view h{history.data(), length, n, n + pad, TENON_F32};
    const tenon_view s{scale.data(), 1, n, 0, TENON_F32};
    return tenon_delayed_update(&h, &s, dtype, margin, recent, o);
  }
};

TEST(CApiQuantize, DelayedUpdate) {
  const float kRows[4][6] = {{0, 2, kInf, kNan, 1e-39F, 7},
                             {3, 9, 4, kInf, 0, 1},
                             {1, kNan, 2, kNan, 0, 100},
                             {8, 4, 16, kInf, 0, 2}};
  for (const int64_t length : {1, 2, 4})
    for (const int32_t dtype : {TENON_E4M3, TENON_E5M2})
      for (const int32_t margin : {0, 3, -2, 64, -64})
        for (const bool recent : {false, true}) {
          Delayed d(length, 6, 2);
          for (int64_t i = 0; i < length; ++i)
            for (int64_t k = 0; k < 6; ++k) d.at(i, k) = kRows[i][k];
          Delayed want = d;
          for (int64_t k = 0; k < 6; ++k) {
            const float last = kRows[0][k];
            if (last == 0) continue;
            float most = std::isfinite(last) ? last : 0;
            for (int64_t i = 1; i < length && !recent; ++i)
              if (std::isfinite(kRows[i][k])) most = std::max(most, kRows[i][k]);
            for (int64_t i = 1; i < length; ++i)
              want.at(i, k) = i + 1 < length ? kRows[i + 1][k] : last;
            want.at(0, k) = 0;
            if (most <= 0) continue;
            const double max = dtype == TENON_E4M3 ? 448 : 57344;
            const auto scale = static_cast<float>(std::ldexp(max, -margin) / most);
            want.scale[static_cast<size_t>(k)] = std::isinf(scale) ? 0x1.fffffep127F : scale;
          }
          succeeds(d.update(dtype, margin, recent, strict()));
          EXPECT_EQ(d.scale, want.scale) << length << " " << dtype << " " << margin;
          for (size_t i = 0; i < d.history.size(); ++i)
            EXPECT_TRUE(equal(d.history[i], want.history[i])) << i;
        }
}

TEST(CApiQuantize, DelayedUpdateRefuses) {
  Delayed d(3, 4, 0);
  const Delayed before = d;
  const tenon_view h{d.history.data(), 3, 4, 4, TENON_F32}, s{d.scale.data(), 1, 4, 4, TENON_F32};
  const auto call = [&](const tenon_view* history, const tenon_view* scale, int32_t dtype = 3,
                        int32_t margin = 0, const tenon_options* o = nullptr) {
    return tenon_delayed_update(history, scale, dtype, margin, 0, o);
  };
  const auto with = [](tenon_view v, auto change) {
    change(v);
    return v;
  };
  fails(call(nullptr, &s), 1, {"tenon_delayed_update", "history is NULL"});
  fails(call(&h, nullptr), 1, {"tenon_delayed_update", "scale is NULL"});
  for (const int32_t dtype : {-1, 6, 99})
    fails(call(&h, &s, dtype), 1, {"tenon_delayed_update", "dtype = ", "0 to 5"});
  for (const int32_t dtype : {0, 1, 2, 5}) fails(call(&h, &s, dtype), 1, {"e4m3 or e5m2"});
  for (const int32_t margin : {65, -65, INT32_MAX, INT32_MIN})
    fails(call(&h, &s, 3, margin), 1, {"delayed update", "margin = ", "[-64, 64]"});
  const tenon_view bad[] = {with(h, [](auto& v) { v.rows = 0; }),
                            with(h, [](auto& v) { v.rows = -1; }),
                            with(h, [](auto& v) { v.data = nullptr; }),
                            with(h, [](auto& v) { v.stride = 3; }),
                            with(h, [](auto& v) { v.dtype = TENON_BF16; }),
                            with(h, [](auto& v) { v.dtype = 17; }),
                            with(h, [](auto& v) { v.cols = 3; }),
                            with(h, [](auto& v) { v.rows = v.stride = INT64_MAX; })};
  for (const tenon_view& v : bad) fails(call(&v, &s), 1, {});
  const tenon_view two = with(s, [](auto& v) { v.rows = 2; });
  fails(call(&h, &two), 1, {"delayed update", "scale is 2x4", "1x4"});
  const tenon_view inside = with(h, [](auto& v) { v.rows = 1; });
  fails(call(&h, &inside), 1, {"history and scale overlap", "its own memory"});
  auto o = sized<tenon_options>();
  o.size = 5;
  fails(call(&h, &s, 3, 0, &o), 1, {"tenon_delayed_update", "size is 5"});
  EXPECT_TRUE(d.history == before.history && d.scale == before.scale);
}

// Philox 4x32-10 and the mask, as in the specification.
uint16_t random16(const uint64_t* state, uint64_t r, uint64_t c) {
  const uint64_t i = (state[2] + r) * state[4] + state[3] + c;
  uint32_t x[4] = {static_cast<uint32_t>(i / 8), static_cast<uint32_t>((i / 8) >> 32),
                   static_cast<uint32_t>(state[1]), static_cast<uint32_t>(state[1] >> 32)};
  uint32_t key[2] = {static_cast<uint32_t>(state[0]), static_cast<uint32_t>(state[0] >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ x[1] ^ key[0], static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ x[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, x);
    key[0] += 0x9E3779B9U, key[1] += 0xBB67AE85U;
  }
  return static_cast<uint16_t>(x[i % 8 / 2] >> (16 * (i % 2)));
}

struct Dropout {
  static constexpr int64_t kM = 7, kK = 21;
  Mat x = Mat(DType::f32, kM, kK, 1).fill(1), bias = Mat(DType::f32, 1, kK).fill(2),
      residual = Mat(DType::f32, kM, kK).fill(3), y = Mat(DType::f32, kM, kK, 2),
      grad = Mat(DType::f32, kM, kK).fill(4), dx = Mat(DType::f32, kM, kK),
      dbias = Mat(DType::f32, 1, kK), dresidual = Mat(DType::f32, kM, kK, 1);
  tenon_view views[8] = {c_view(x.view()),     c_view(bias.view()),     c_view(residual.view()),
                         c_view(y.view()),     c_view(grad.view()),     c_view(dx.view()),
                         c_view(dbias.view()), c_view(dresidual.view())};
  uint64_t state[5] = {0x123456789abcdef0U, 0xffffffffU, 3, 5, 40};
  tenon_dropout_args forward = sized<tenon_dropout_args>();
  tenon_dropout_backward_args backward = sized<tenon_dropout_backward_args>();
  Dropout() {
    forward.x = &views[0], forward.bias = &views[1], forward.residual = &views[2];
    forward.y = &views[3], forward.p = 0.3, forward.training = 1, forward.random = state;
    backward.grad = &views[4], backward.dx = &views[5], backward.dbias = &views[6];
    backward.dresidual = &views[7], backward.p = 0.3, backward.training = 1;
    backward.random = state;
  }
  Dropout(const Dropout&) = delete;
  [[nodiscard]] bool untouched() const {
    const Dropout fresh;
    return y.untouched() && dx.untouched() && dbias.untouched() && dresidual.untouched() &&
           std::equal(state, state + 5, fresh.state);
  }
};

TEST(CApiDropout, ForwardAndBackward) {
  for (const double p : {0.0, 0.3, 0.5, 1.0})
    for (const bool training : {true, false}) {
      Dropout d;
      d.forward.p = d.backward.p = p;
      d.forward.training = d.backward.training = training ? -3 : 0;  // nonzero is true
      const std::vector<uint64_t> saved(d.state, d.state + 5);
      succeeds(tenon_bias_dropout_add(&d.forward, nullptr));
      std::vector<uint64_t> moved = saved;
      if (training) ++moved[1];
      EXPECT_TRUE(std::equal(moved.begin(), moved.end(), d.state));
      d.backward.random = saved.data();
      succeeds(tenon_bias_dropout_add_backward(&d.backward, nullptr));
      EXPECT_TRUE(std::equal(moved.begin(), moved.end(), d.state));
      const double threshold = std::nearbyint(65536 * p);
      const auto scale = static_cast<float>(threshold == 65536 ? 1 : 65536 / (65536 - threshold));
      std::vector<std::vector<float>> columns(Dropout::kK);
      for (int64_t r = 0; r < Dropout::kM; ++r)
        for (int64_t c = 0; c < Dropout::kK; ++c) {
          const bool kept = random16(saved.data(), static_cast<uint64_t>(r),
                                     static_cast<uint64_t>(c)) >= threshold;
          const auto masked = [&](float v) { return training ? kept ? v * scale : 0.0F : v; };
          const float dx = masked(d.grad.at(r, c));
          expect_element(d.y, r, c, d.residual.at(r, c) + masked(d.x.at(r, c) + d.bias.at(0, c)),
                         "y");
          expect_element(d.dx, r, c, dx, "dx");
          expect_element(d.dresidual, r, c, d.grad.at(r, c), "dresidual");
          columns[static_cast<size_t>(c)].push_back(dx);
        }
      for (int64_t c = 0; c < Dropout::kK; ++c)
        expect_element(d.dbias, 0, c, tree(columns[static_cast<size_t>(c)]), "dbias");
      for (const Mat* m : {&d.y, &d.dx, &d.dbias, &d.dresidual}) EXPECT_TRUE(m->guards_hold());
    }
}

TEST(CApiDropout, ShardsDrawWhatTheWholeDraws) {
  Dropout whole, part;
  whole.state[3] = 0, whole.state[4] = Dropout::kK;
  std::copy(whole.state, whole.state + 5, part.state);
  succeeds(tenon_bias_dropout_add(&whole.forward, nullptr));
  constexpr int64_t kLeft = 8;
  for (const int64_t first : {int64_t{0}, kLeft}) {
    const int64_t n = first ? Dropout::kK - kLeft : kLeft;
    uint64_t state[5] = {part.state[0], part.state[1], part.state[2], static_cast<uint64_t>(first),
                         Dropout::kK};
    tenon_view v[4];
    for (size_t i = 0; i < 4; ++i) {
      v[i] = part.views[i];
      v[i].data = static_cast<float*>(v[i].data) + first;
      v[i].cols = n;
    }
    part.forward.x = &v[0], part.forward.bias = &v[1], part.forward.residual = &v[2];
    part.forward.y = &v[3], part.forward.random = state;
    succeeds(tenon_bias_dropout_add(&part.forward, nullptr));
    EXPECT_EQ(state[1], part.state[1] + 1);
  }
  EXPECT_TRUE(part.y.same_bytes(whole.y));
}

TEST(CApiDropout, WhatMayBeLeftOut) {
  Dropout d;
  d.forward.bias = d.forward.residual = nullptr;
  d.forward.training = 0, d.forward.random = nullptr;
  succeeds(tenon_bias_dropout_add(&d.forward, nullptr));
  for (int64_t c = 0; c < Dropout::kK; ++c) expect_element(d.y, 2, c, d.x.at(2, c), "y");
  d.backward.dx = d.backward.dresidual = nullptr;
  succeeds(tenon_bias_dropout_add_backward(&d.backward, nullptr));
  EXPECT_TRUE(d.dx.untouched() && d.dresidual.untouched() && !d.dbias.untouched());
}

TEST(CApiDropout, Refuses) {
  const char* kForward = "bias_dropout_add";
  const auto forward = [&](auto change, std::initializer_list<const char*> parts, int code = 1) {
    Dropout d;
    change(d);
    fails(tenon_bias_dropout_add(&d.forward, nullptr), code, parts);
    fails(code, code, {kForward});
    EXPECT_TRUE(d.untouched());
  };
  const auto backward = [&](auto change, std::initializer_list<const char*> parts, int code = 1) {
    Dropout d;
    change(d);
    fails(tenon_bias_dropout_add_backward(&d.backward, nullptr), code, parts);
    fails(code, code, {kForward});
    EXPECT_TRUE(d.untouched());
  };
  fails(tenon_bias_dropout_add(nullptr, nullptr), 1, {"tenon_bias_dropout_add", "args is NULL"});
  fails(tenon_bias_dropout_add_backward(nullptr, nullptr), 1,
        {"tenon_bias_dropout_add_backward", "args is NULL"});
  forward([](auto& d) { d.forward.x = nullptr; }, {"tenon_bias_dropout_add", "x is NULL"});
  forward([](auto& d) { d.forward.y = nullptr; }, {"tenon_bias_dropout_add", "y is NULL"});
  forward([](auto& d) { d.forward.random = nullptr; }, {"random is null", "columns = 21"});
  forward([](auto& d) { d.views[0].data = nullptr; }, {"x is 7x21", "data pointer is null"});
  forward([](auto& d) { d.views[3].rows = 6; }, {"y is 6x21", "must be 7x21"});
  forward([](auto& d) { d.views[1].rows = 2; }, {"bias is 2x21", "must be 1x21"});
  forward([](auto& d) { d.views[2].cols = 20; }, {"residual is 7x20", "must be 7x21"});
  forward([](auto& d) { d.views[0].stride = 20; }, {"x has row stride 20", "at least 21"});
  forward([](auto& d) { d.views[2].data = static_cast<float*>(d.views[3].data) + 1; },
          {"output y overlaps the input residual"});
  forward([](auto& d) { d.views[0].dtype = TENON_E4M3; }, {"x is e4m3", "f32, f16 or bf16"}, 2);
  backward([](auto& d) { d.backward.grad = nullptr; }, {"grad is NULL"});
  backward([](auto& d) { d.backward.random = nullptr; }, {"random is null"});
  backward([](auto& d) { d.backward.dx = d.backward.dbias = d.backward.dresidual = nullptr; },
           {"no output is given", "dx, dbias or dresidual"});
  backward([](auto& d) { d.views[5].rows = 8; }, {"dx is 8x21", "must be 7x21"});
  backward([](auto& d) { d.views[6].cols = 22; }, {"dbias is 1x22", "must be 1x21"});
  backward([](auto& d) { d.backward.dresidual = d.backward.dx; }, {"dx and dresidual overlap"});
  for (const double p : {-0.1, 1.5, kNan + 0.0, kInf + 0.0}) {
    forward([&](auto& d) { d.forward.p = p; }, {"p = ", "[0, 1]"});
    backward([&](auto& d) { d.backward.p = p; }, {"p = ", "[0, 1]"});
  }
  for (const size_t size : {size_t{0}, size_t{8}, sizeof(tenon_dropout_args) - 1, size_t{4097}}) {
    forward([&](auto& d) { d.forward.size = size; }, {"sizeof(tenon_dropout_args)"});
    backward([&](auto& d) { d.backward.size = size; }, {"sizeof(tenon_dropout_backward_args)"});
  }
  for (const auto& [col0, columns] : {std::pair<uint64_t, uint64_t>{0, 20}, {20, 40}, {~0ULL, 0}}) {
    Dropout d;
    d.state[3] = col0, d.state[4] = columns;
    fails(tenon_bias_dropout_add(&d.forward, nullptr), 1, {"columns = ", "21 columns are drawn"});
    fails(tenon_bias_dropout_add_backward(&d.backward, nullptr), 1, {"col0 = "});
    EXPECT_TRUE(d.y.untouched() && d.dx.untouched() && d.state[1] == 0xffffffffU);
  }
}

// A valid call of tenon_quantize with plain x and encoded y. x can also be encoded.
struct Mistake {
  static constexpr int64_t kM = 6, kK = 40;
  Spec spec;
  Mat x = Mat(DType::f32, kM, kK).fill(9), plain = Mat(DType::f32, kM, kK);
  Encoded y, source;
  Memory dbias = Memory(DType::f32, 1, kK), amax = Memory(DType::f32, 1, 1);
  CTensor to, from;
  tenon_view views[4] = {c_view(x.view()), c_view(plain.view()), c_view(dbias.view()),
                         c_view(amax.view())};
  tenon_quantize_args args = sized<tenon_quantize_args>();
  tenon_view *data, *scale_inv, *multiplier = nullptr, *most = nullptr, *health;

  explicit Mistake(Scaling mode = Scaling::mxfp8)
      : spec{.mode = mode},
        y(spec, kM, kK),
        source(spec, kM, kK),
        to(y.tensor()),
        from(source.input()) {
    args.x = &views[0], args.y_encoded = &to.t, args.dbias = &views[2], args.amax = &views[3];
    data = const_cast<tenon_view*>(to.t.data);
    scale_inv = const_cast<tenon_view*>(to.t.scale_inv);
    multiplier = const_cast<tenon_view*>(to.t.scale);
    most = const_cast<tenon_view*>(to.t.amax);
    health = const_cast<tenon_view*>(to.t.health);
  }
  Mistake(const Mistake&) = delete;
  void encoded_x() { args.x = nullptr, args.x_encoded = &from.t; }
  [[nodiscard]] bool untouched() const {
    const Mistake fresh(spec.mode);
    return y.same_bytes(fresh.y) && source.same_bytes(fresh.source) && x.same_bytes(fresh.x) &&
           plain.untouched() && dbias.same_bytes(fresh.dbias) && amax.same_bytes(fresh.amax);
  }
};

template <class F>
void expect_refused(Scaling mode, F change, std::initializer_list<const char*> parts,
                    int code = 1) {
  Mistake m(mode);
  change(m);
  fails(tenon_quantize(&m.args, nullptr), code, parts);
  fails(code, code, {"quantize"});
  EXPECT_TRUE(m.untouched()) << tenon_last_error();
}

TEST(CApiQuantize, RefusesNullAndTwice) {
  const Scaling mx = Scaling::mxfp8;
  const Mistake right;
  succeeds(tenon_quantize(&right.args, nullptr));
  fails(tenon_quantize(nullptr, nullptr), 1, {"tenon_quantize", "args is NULL"});
  expect_refused(mx, [](auto& m) { m.args.x = nullptr; }, {"x is NULL", "plain or encoded"});
  expect_refused(mx, [](auto& m) { m.args.x_encoded = &m.from.t; },
                 {"tenon_quantize", "x and x_encoded are both given", "leave one out"});
  expect_refused(mx, [](auto& m) { m.args.y = &m.views[1]; },
                 {"tenon_quantize", "y and y_encoded are both given", "leave one out"});
  expect_refused(mx,
                 [](auto& m) { m.args.y_encoded = nullptr, m.args.dbias = m.args.amax = nullptr; },
                 {"no output"});
  expect_refused(mx, [](auto& m) { m.to.t.data = nullptr; },
                 {"y_encoded has no data", "columnwise_data or both"});
  expect_refused(mx, [](auto& m) { m.encoded_x(), m.from.t.data = nullptr; },
                 {"x_encoded has no data"});
  expect_refused(mx, [](auto& m) { m.to.t.scale_inv = nullptr; },
                 {"y.rowwise.scale_inv is not given", "mxfp8 needs 128x4 e8m0"});
  expect_refused(mx, [](auto& m) { m.encoded_x(), m.from.t.scale_inv = nullptr; },
                 {"x.rowwise.scale_inv is not given", "128x4 e8m0"});
  expect_refused(Scaling::delayed, [](auto& m) { m.to.t.scale = nullptr; },
                 {"y.scale is not given", "one f32 number"});
  for (const auto place : {&Mistake::data, &Mistake::scale_inv, &Mistake::health})
    expect_refused(mx, [&](auto& m) { (m.*place)->data = nullptr; },
                   {"data pointer is null", "address"});
  for (const auto place : {&Mistake::multiplier, &Mistake::most})
    expect_refused(Scaling::delayed, [&](auto& m) { (m.*place)->data = nullptr; },
                   {"data pointer is null"});
  for (const size_t i : {0, 2, 3})
    expect_refused(mx, [&](auto& m) { m.views[i].data = nullptr; }, {"data pointer is null"});
}

TEST(CApiQuantize, RefusesWrongStructSizes) {
  for (const size_t size : {size_t{0}, size_t{8}, size_t{4097}, SIZE_MAX}) {
    expect_refused(Scaling::mxfp8, [&](auto& m) { m.args.size = size; },
                   {"tenon_quantize", "size is ", "sizeof(tenon_quantize_args)"});
    expect_refused(Scaling::mxfp8, [&](auto& m) { m.to.t.size = size; },
                   {"tenon_quantize", std::to_string(size).c_str(), "sizeof(tenon_tensor)"});
    expect_refused(Scaling::mxfp8, [&](auto& m) { m.encoded_x(), m.from.t.size = size; },
                   {"sizeof(tenon_tensor)"});
  }
  struct Longer {
    tenon_tensor t;
    uint64_t news[2];
  };
  for (const uint64_t news : {0, 1}) {
    Mistake m;
    Longer longer{m.to.t, {0, news}};
    longer.t.size = sizeof longer;
    m.args.y_encoded = &longer.t;
    const int code = tenon_quantize(&m.args, nullptr);
    if (news == 0) {
      succeeds(code);
    } else {
      fails(code, 1, {"tenon_tensor has fields that this library does not know"});
      EXPECT_TRUE(m.untouched());
    }
  }
}

TEST(CApiQuantize, RefusesFormatsThatDoNotExist) {
  const Scaling mx = Scaling::mxfp8, cur = Scaling::current;
  for (const char* name : {"", "mxfp4", "Current", "block128", "\xff\x01"}) {
    expect_refused(mx, [&](auto& m) { m.to.t.scaling = name; },
                   {"tenon_quantize", "the scaling '", name, "is not known", "mxfp8"});
    expect_refused(mx, [&](auto& m) { m.encoded_x(), m.from.t.scaling = name; },
                   {"the scaling '", name});
  }
  for (const int32_t dtype : {-1, 6, 1000, INT32_MIN}) {
    const std::string text = std::to_string(dtype);
    expect_refused(mx, [&](auto& m) { m.to.t.dtype = dtype; },
                   {"tenon_quantize", "dtype = ", text.c_str(), "0 to 5"});
    Mistake m;  // the dtype of a view is checked before any name is known
    m.scale_inv->dtype = dtype;
    fails(tenon_quantize(&m.args, nullptr), 1, {"dtype number", text.c_str(), "TENON_F32"});
    EXPECT_TRUE(m.untouched());
  }
  for (const int32_t dtype : {TENON_F32, TENON_F16, TENON_BF16, TENON_E8M0})
    expect_refused(mx, [&](auto& m) { m.to.t.dtype = dtype; },
                   {"y is ", "with scaling mxfp8", "e4m3 or e5m2"});
  expect_refused(mx, [](auto& m) { m.to.t.dtype = TENON_E5M2; },
                 {"y.rowwise.data has the dtype e4m3", "must be e5m2"});
  expect_refused(
      mx, [](auto& m) { m.to.t.scaling = "none"; }, {"y is e4m3", "f32, f16 or bf16"}, 2);
  for (const int32_t value : {-1, 3, 99})
    expect_refused(cur, [&](auto& m) { m.to.t.power_of_two = value; },
                   {"y_encoded has power_of_two = ", std::to_string(value).c_str(), "0, 1 or 2"});
  for (const int32_t value : {1, 2}) {
    expect_refused(mx, [&](auto& m) { m.to.t.power_of_two = value; }, {"power_of_two", "mxfp8"});
    expect_refused(Scaling::delayed, [&](auto& m) { m.to.t.power_of_two = value; },
                   {"power_of_two", "current and block"});
  }
  for (const float eps : {-1.0F, kNan, kInf})
    expect_refused(cur, [&](auto& m) { m.to.t.eps = eps; },
                   {"y has eps = ", "finite and not negative"});
  expect_refused(mx, [](auto& m) { m.to.t.eps = 1; }, {"eps = 1", "mxfp8 has none"});
  for (const Scaling mode : {cur, Scaling::delayed, Scaling::block1x128})
    expect_refused(mode, [](auto& m) { m.to.t.swizzled = 1; }, {"swizzled", "only mxfp8"});
  expect_refused(mx, [](auto& m) { m.to.t.swizzled = 1, m.scale_inv->stride = 5; },
                 {"row stride 5", "dense, give 4"});
  expect_refused(mx, [](auto& m) { m.to.t.amax_given = 1; }, {"amax_given", "scaling current"});
  expect_refused(cur, [](auto& m) { m.to.t.amax_given = 1, m.to.t.amax = nullptr; },
                 {"amax_given"});
}

TEST(CApiQuantize, RefusesWrongShapes) {
  const Scaling mx = Scaling::mxfp8;
  expect_refused(mx, [](auto& m) { m.data->rows = 5; }, {"y.rowwise.data is 5x40", "must be 6x40"});
  expect_refused(mx, [](auto& m) { m.scale_inv->cols = 3; },
                 {"y.rowwise.scale_inv is 128x3", "must be 128x4", "what mxfp8 needs for 6x40"});
  expect_refused(mx, [](auto& m) { m.scale_inv->dtype = TENON_F32; },
                 {"y.rowwise.scale_inv has the dtype f32", "must be e8m0"});
  expect_refused(mx, [](auto& m) { m.health->cols = 2; }, {"y.health is 1x2", "must be 1x3"});
  expect_refused(mx, [](auto& m) { m.health->dtype = TENON_BF16; }, {"y.health", "must be f32"});
  expect_refused(Scaling::delayed, [](auto& m) { m.multiplier->cols = 2; },
                 {"y.scale is 1x2", "1x1"});
  expect_refused(Scaling::delayed, [](auto& m) { m.most->rows = 2, m.most->stride = 1; },
                 {"y.amax is 2x1", "1x1"});
  expect_refused(Scaling::delayed, [](auto& m) { m.scale_inv->cols = 0; }, {"scale_inv is 1x0"});
  expect_refused(mx, [](auto& m) { m.to.t.amax = &m.views[3]; },
                 {"y.amax is given", "amax of the call"});
  expect_refused(mx, [](auto& m) { m.to.t.scale = &m.views[3]; },
                 {"y.scale is given", "leave it out"});
  expect_refused(mx, [](auto& m) { m.data->rows = -1; }, {"-1x40", "must not be negative"});
  expect_refused(mx, [](auto& m) { m.data->stride = 39; }, {"row stride 39", "at least 40"});
  expect_refused(mx, [](auto& m) { m.data->stride = INT64_MAX; }, {"does not fit into memory"});
  expect_refused(mx,
                 [](auto& m) { m.encoded_x(), const_cast<tenon_view*>(m.from.t.data)->cols = -40; },
                 {"x.rowwise.data is 6x-40"});
  expect_refused(mx, [](auto& m) { m.views[2].cols = 39; }, {"dbias is 1x39", "1x40"});
  expect_refused(mx, [](auto& m) { m.views[3].cols = 2; }, {"amax is 1x2", "1x1"});
  expect_refused(mx, [](auto& m) { m.views[3].dtype = TENON_F16; }, {"amax is f16", "must be f32"});
  expect_refused(mx, [](auto& m) { m.views[0].rows = 5; },
                 {"y.rowwise.data is 6x40", "must be 5x40"});
}

TEST(CApiQuantize, RefusesOverlaps) {
  expect_refused(Scaling::mxfp8, [](auto& m) { m.data->data = m.views[0].data; },
                 {"y.rowwise.data overlaps the input x", "its own memory"});
  expect_refused(Scaling::mxfp8, [](auto& m) { m.health->data = m.scale_inv->data; },
                 {"y.rowwise.scale_inv and y.health overlap"});
  expect_refused(Scaling::delayed, [](auto& m) { m.scale_inv->data = m.multiplier->data; },
                 {"y.rowwise.scale_inv overlaps the input y.scale"});
  expect_refused(Scaling::delayed, [](auto& m) { m.views[3].data = m.most->data; },
                 {"y.amax and amax overlap"});
  expect_refused(Scaling::mxfp8, [](auto& m) { m.encoded_x(), m.data->data = m.from.t.data->data; },
                 {"y.rowwise.data overlaps the input x.rowwise.data"});
}

// Unused fields may have any value. Used fields are all checked.
TEST(CApiQuantize, StridesOfSingleRowsAreNotUsed) {
  for (const int64_t stride : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    Mistake m(Scaling::delayed);
    m.scale_inv->stride = m.multiplier->stride = m.most->stride = m.health->stride = stride;
    m.views[2].stride = m.views[3].stride = stride;
    succeeds(tenon_quantize(&m.args, nullptr));
  }
}

TEST(CApiQuantize, NumbersWithoutScaleHaveOneDtype) {
  Mistake m;
  auto t = sized<tenon_tensor>();
  std::vector<uint16_t> halves(Mistake::kM * Mistake::kK, 7);
  const tenon_view data{halves.data(), Mistake::kM, Mistake::kK, Mistake::kK, TENON_F16};
  t.scaling = "none", t.data = &data, t.dtype = TENON_F32;  // too long when it is read or written
  m.args.x = nullptr, m.args.x_encoded = &t;
  fails(tenon_quantize(&m.args, nullptr), 1, {"quantize", "x ", "f16", "f32"});
  EXPECT_TRUE(m.untouched());
  Mistake o;
  o.args.y_encoded = &t;
  fails(tenon_quantize(&o.args, nullptr), 1, {"quantize", "y ", "f16", "f32"});
  EXPECT_TRUE(o.untouched());
  EXPECT_EQ(halves, std::vector<uint16_t>(halves.size(), 7));
  t.dtype = TENON_F16, t.eps = 1;
  fails(tenon_quantize(&o.args, nullptr), 1, {"eps = 1", "none"});
  t.eps = 0, t.scale_inv = &o.views[3];
  fails(tenon_quantize(&o.args, nullptr), 1, {"y.rowwise.scale_inv is given", "scaling is none"});
  t.scale_inv = nullptr, t.columnwise_scale_inv = &o.views[3];
  fails(tenon_quantize(&o.args, nullptr), 1, {"y.columnwise.scale_inv is given"});
}

TEST(CApiQuantize, ScalesWithoutDataAreChecked) {
  float number = 5;
  const tenon_view wrong[] = {{nullptr, 1, 1, 1, TENON_F32},
                              {&number, 0, 0, 0, TENON_F32},
                              {&number, 1, 1, 1, TENON_E8M0},
                              {&number, INT64_MAX, INT64_MAX, INT64_MAX, TENON_F32},
                              {&number, -1, 1, 1, TENON_F32}};
  for (const tenon_view& v : wrong)
    for (const Scaling mode : kModes) {
      expect_refused(mode, [&](auto& m) { m.to.t.columnwise_scale_inv = &v; },
                     {"y.columnwise.scale_inv"});
      expect_refused(mode, [&](auto& m) { m.encoded_x(), m.from.t.columnwise_scale_inv = &v; },
                     {"x.columnwise.scale_inv"});
    }
  EXPECT_EQ(number, 5);
}

// A non-null encoded tensor is used even if it is empty.
TEST(CApiQuantize, TensorsOfNothing) {
  for (const Scaling mode : {Scaling::delayed, Scaling::current}) {
    const Spec s{.mode = mode, .column = true, .scale = 4};
    const Encoded y(s, 0, 0);
    CTensor to(y.tensor());
    for (const tenon_view* v : {to.t.data, to.t.columnwise_data})
      const_cast<tenon_view*>(v)->data = nullptr;
    const tenon_view from{nullptr, 0, 0, 0, TENON_F32};
    auto args = sized<tenon_quantize_args>();
    args.x = &from, args.y_encoded = &to.t;
    succeeds(tenon_quantize(&args, nullptr));
    EXPECT_EQ(expect_quantised(s, y, {}, 0, 0), "") << s.text();
  }
}

// Rows without columns: nothing to compute for any number of rows.
TEST(CApiQuantize, ManyRowsOfNothing) {
  constexpr int64_t kRows = int64_t{1} << 57;
  for (const Spec& s : all_specs(true)) {
    char none = 0;
    float one[4] = {1, 1, 1, 1};
    const tenon_view x{&none, kRows, 0, 0, TENON_F32}, number{&one[1], 1, 1, 1, TENON_F32},
        multiplier{&one[0], 1, 1, 1, TENON_F32};
    tenon_view views[4];
    auto t = sized<tenon_tensor>();
    t.scaling = info(s.mode).name.data(), t.dtype = static_cast<int32_t>(s.dtype);
    t.swizzled = s.swizzled;
    for (const bool column : {false, true}) {
      int64_t data[2], scales[2];
      succeeds(tenon_encoding_shape(t.scaling, kRows, 0, column, data, scales));
      views[2 * column] = {&none, data[0], data[1], data[1], t.dtype};
      views[2 * column + 1] = {&one[2 + column], scales[0], scales[1], scales[1],
                               s.mode == Scaling::mxfp8 ? TENON_E8M0 : TENON_F32};
    }
    if (s.row) t.data = &views[0], t.scale_inv = &views[1];
    if (s.column) t.columnwise_data = &views[2], t.columnwise_scale_inv = &views[3];
    if (s.mode == Scaling::delayed) t.scale = &multiplier;
    auto args = sized<tenon_quantize_args>();
    args.x = &x, args.y_encoded = &t, args.amax = &number;
    succeeds(tenon_quantize(&args, nullptr), s.text());
    EXPECT_EQ(one[1], 0);
  }
}

TEST(CApiQuantize, ForwardAndBackwardRefuse) {
  const char* act = "relu";
  const auto forward = [&](auto change, std::initializer_list<const char*> parts) {
    Mistake m;
    auto a = sized<tenon_forward_args>();
    a.x = &m.views[0], a.y_encoded = &m.to.t, a.amax = &m.views[3];
    change(m, a);
    fails(tenon_forward(act, &a, nullptr), 1, parts);
    EXPECT_TRUE(m.untouched());
  };
  const auto backward = [&](auto change, std::initializer_list<const char*> parts) {
    Mistake m;
    auto a = sized<tenon_backward_args>();
    a.grad = &m.views[0], a.x = &m.views[0], a.dx_encoded = &m.to.t, a.dbias = &m.views[2];
    change(m, a);
    fails(tenon_backward(act, &a, nullptr), 1, parts);
    EXPECT_TRUE(m.untouched());
  };
  forward([](auto& m, auto& a) { a.x_encoded = &m.from.t; },
          {"tenon_forward", "x and x_encoded are both given"});
  forward([](auto& m, auto& a) { a.y = &m.views[1]; }, {"y and y_encoded are both given"});
  forward([](auto& m, auto& a) { a.b = &m.views[1], a.b_encoded = &m.from.t; },
          {"b and b_encoded are both given"});
  forward([](auto& m, auto& a) { a.b_encoded = &m.from.t; }, {"relu forward", "b is given"});
  forward([](auto& m, auto&) { m.to.t.scaling = "what"; }, {"tenon_forward", "'what'"});
  forward([](auto& m, auto&) { m.to.t.data = nullptr; },
          {"tenon_forward", "y_encoded has no data"});
  forward([](auto& m, auto&) { m.to.t.size = 1; }, {"tenon_forward", "sizeof(tenon_tensor)"});
  forward([](auto& m, auto&) { m.data->cols = 39; }, {"relu forward", "y.rowwise.data is 6x39"});
  backward([](auto& m, auto& a) { a.grad_encoded = &m.from.t; },
           {"tenon_backward", "grad and grad_encoded are both given"});
  backward([](auto& m, auto& a) { a.x_encoded = &m.from.t; }, {"x and x_encoded are both given"});
  backward([](auto& m, auto& a) { a.dx = &m.views[1]; }, {"dx and dx_encoded are both given"});
  backward([](auto& m, auto& a) { a.db = &m.views[1], a.db_encoded = &m.to.t; },
           {"db and db_encoded are both given"});
  backward([](auto& m, auto& a) { a.db_encoded = &m.to.t, a.dx_encoded = nullptr; },
           {"relu backward", "db is given", "not a tensor of its own"});
  backward([](auto&, auto& a) { a.dx_encoded = nullptr, a.dbias = nullptr; },
           {"relu backward", "no output is given"});
  backward([](auto& m, auto&) { m.to.t.scaling = "none "; }, {"tenon_backward", "'none '"});
  backward([](auto& m, auto&) { m.scale_inv->rows = 1; },
           {"relu backward", "dx.rowwise.scale_inv is 1x4", "128x4"});
  act = "reglu";
  // Without columns any k is valid. It is not multiplied.
  forward(
      [](auto& m, auto& a) {
        m.views[0].cols = 0;
        a.layout = "interleaved(9223372036854775807)";
      },
      {"reglu forward", "must be 6x0"});
}

}  // namespace
}  // namespace tenon::test
