// Tests of delayed scaling over many updates against the specification, and in a loop with calls.
#include <gtest/gtest.h>

#include <vector>

#include "support/quantize_reference.h"

namespace tenon::test {
namespace {

// One column of the state. The reference copies vectors, the library updates in place.
struct Column {
  std::vector<float> history;
  float scale = 1;

  void update(DType d, int margin, bool most_recent) {
    const float last = history[0];
    if (last == 0) return;
    const std::vector<float> old = history;
    const size_t n = old.size();
    for (size_t i = 1; i + 1 < n; ++i) history[i] = old[i + 1];
    if (n > 1) history[n - 1] = last;
    history[0] = 0;
    std::vector<float> seen{last};
    if (!most_recent) seen.insert(seen.end(), old.begin() + 1, old.end());
    double amax = 0;
    for (const float v : seen)
      if (std::isfinite(v)) amax = std::max(amax, static_cast<double>(v));
    if (amax == 0) return;
    // The numerator is exact, so a float64 division followed by a rounding is one rounding.
    const auto s = static_cast<float>(std::ldexp(ref::fp8_max(d), -margin) / amax);
    scale = std::isinf(s) ? 0x1.fffffep127F : s;
  }
};

struct Setup {
  int64_t length, n;
  int margin;
  bool most_recent;
  DType dtype;
  int64_t pad;
  [[nodiscard]] std::string text() const {
    return str("L=", length, " n=", n, " margin=", margin, most_recent ? " most_recent " : " max ",
               info(dtype).name, " pad=", pad);
  }
};

// A typical amax of training, and sometimes 0, huge, tiny or NaN.
float draw(std::mt19937& random) {
  switch (random() % 16) {
    case 0:
    case 1:
      return 0;
    case 2:
      return kInf;
    case 3:
      return kNan;
    case 4:
      return 0x1p-149F;
    case 5:
      return 0x1.fffffep127F;
    case 6:
      return from_bits(random() % 0x7f800000U);
    default:
      return std::uniform_real_distribution<float>(0.001F, 100)(random);
  }
}

void many_updates(const Setup& s) {
  Mat history(DType::f32, s.length, s.n, s.pad, s.pad ? 1 : 0),
      scale(DType::f32, 1, s.n, 0, s.pad ? 3 : 0);
  std::vector<Column> columns(static_cast<size_t>(s.n));
  std::mt19937 random(static_cast<unsigned>(s.length * 31 + s.n));
  for (int64_t c = 0; c < s.n; ++c) {
    scale.set(0, c, 1);
    auto& own = columns[static_cast<size_t>(c)];
    // A new history is 0. A restored one is not.
    for (int64_t i = 0; i < s.length; ++i) {
      own.history.push_back(c % 2 == 0 ? 0.0F : draw(random));
      history.set(i, c, own.history.back());
    }
  }
  for (int step = 0; step < 200; ++step) {
    for (int64_t c = 0; c < s.n; ++c) {
      auto& own = columns[static_cast<size_t>(c)];
      own.history[0] = draw(random);
      history.set(0, c, own.history[0]);
      own.update(s.dtype, s.margin, s.most_recent);
    }
    update({.history = history.view(),
            .scale = scale.view(),
            .dtype = s.dtype,
            .margin = s.margin,
            .most_recent = s.most_recent});
    for (int64_t c = 0; c < s.n; ++c) {
      const auto& own = columns[static_cast<size_t>(c)];
      ASSERT_EQ(bits(scale.at(0, c)), bits(own.scale))
          << s.text() << ", step " << step << ", column " << c;
      for (int64_t i = 0; i < s.length; ++i)
        ASSERT_TRUE(equal(history.at(i, c), own.history[static_cast<size_t>(i)]))
            << s.text() << ", step " << step << ", history (" << i << ", " << c
            << "): " << history.at(i, c) << ", expected " << own.history[static_cast<size_t>(i)];
    }
    ASSERT_TRUE(history.guards_hold() && scale.guards_hold()) << s.text();
  }
}

TEST(Delayed, TwoHundredUpdates) {
  for (const int64_t length : {1, 2, 3, 16, 1024})
    for (const int64_t n : {1, 5})
      for (const int margin : {-3, 0, 2})
        for (const bool most_recent : {false, true})
          for (const DType d : kFp8) {
            // The longest history is slow to compare, so only one kind per dtype is tested.
            if (length == 1024 && (margin != 0) != most_recent) continue;
            many_updates({length, n, margin, most_recent, d, (length + n) % 2 ? 3 : 0});
            if (HasFailure()) return;
          }
}

TEST(Delayed, WorkedExamples) {
  const auto scale_after = [](std::vector<float> past, DType d, int margin, float before = 1) {
    const Mat history(DType::f32, static_cast<int64_t>(past.size()), 1), scale(DType::f32, 1, 1);
    for (size_t i = 0; i < past.size(); ++i)
      const_cast<Mat&>(history).set(static_cast<int64_t>(i), 0, past[i]);
    const_cast<Mat&>(scale).set(0, 0, before);
    update({.history = history.view(), .scale = scale.view(), .dtype = d, .margin = margin});
    return scale.at(0, 0);
  };
  EXPECT_EQ(scale_after({2, 0, 0}, DType::e4m3, 0), 224.0F);
  EXPECT_EQ(scale_after({2, 7, 1}, DType::e4m3, 0), 64.0F);
  EXPECT_EQ(scale_after({2, 7, 1}, DType::e4m3, 2), 16.0F);
  EXPECT_EQ(scale_after({2, 7, 1}, DType::e5m2, -3), 65536.0F);
  EXPECT_EQ(scale_after({0, 7, 1}, DType::e4m3, 0, 5), 5.0F);    // no new amax
  EXPECT_EQ(scale_after({kInf, 0}, DType::e4m3, 0, 5), 5.0F);    // no finite amax
  EXPECT_EQ(scale_after({kNan, 4}, DType::e4m3, 0, 5), 112.0F);  // finite entries only
  EXPECT_EQ(scale_after({0x1p-149F}, DType::e5m2, -3, 5), 0x1.fffffep127F);
  EXPECT_EQ(scale_after({0x1.fffffep127F}, DType::e4m3, 64, 5),
            static_cast<float>(448 / 0x1.fffffep127 * 0x1p-64));
}

TEST(Delayed, EveryTensorHasItsOwnColumn) {
  Mat history(DType::f32, 3, 3), scale(DType::f32, 1, 3);
  const float start[3][3] = {{1, 0, kNan}, {2, 3, 0}, {8, 5, 0}};
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t c = 0; c < 3; ++c) history.set(i, c, start[i][c]), scale.set(0, c, 1);
  update({.history = history.view(), .scale = scale.view()});
  const float end[3][3] = {{0, 0, 0}, {8, 3, 0}, {1, 5, kNan}};
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t c = 0; c < 3; ++c)
      EXPECT_TRUE(equal(history.at(i, c), end[i][c])) << i << " " << c << " " << history.at(i, c);
  EXPECT_EQ(scale.at(0, 0), 56.0F);
  EXPECT_EQ(scale.at(0, 1), 1.0F);
  EXPECT_EQ(scale.at(0, 2), 1.0F);
}

// As in training: two calls per step write to their slots of one history, then one update.
TEST(Delayed, ALoopWithCalls) {
  constexpr int64_t kLength = 4;
  const int64_t m = 37, k = 70;
  for (const DType d : kFp8) {
    Mat history(DType::f32, kLength, 2, 1), scale(DType::f32, 1, 2);
    std::vector<Column> columns(2);
    for (int64_t c = 0; c < 2; ++c) {
      scale.set(0, c, 1);
      for (int64_t i = 0; i < kLength; ++i) history.set(i, c, 0);
      columns[static_cast<size_t>(c)].history.assign(kLength, 0);
    }
    const Activation f = activation("gelu");
    for (unsigned step = 0; step < 50; ++step) {
      const float spread = step % 7 == 3 ? 300.0F : 0.01F * static_cast<float>(step + 1);
      Mat x = Mat(DType::bf16, m, k).fill(step, false, spread);
      const Mat g = Mat(DType::bf16, m, k).fill(step + 100);
      if (step == 20) x.set(3, 4, kInf);
      if (step == 30) x.fill(0, false, 0);
      const Mat y(DType::f32, m, k), dx(DType::f32, m, k);
      forward(f, {.x = x.view(), .y = y.view()}, kStrict);
      backward(f, {.grad = g.view(), .x = x.view(), .dx = dx.view()}, kStrict);
      const auto cell = [](const Mat& of, int64_t c) {
        View v = of.rows_from(0, 1);
        v.data = static_cast<char*>(v.data) + 4 * c;
        v.cols = 1;
        return v;
      };
      for (int64_t c = 0; c < 2; ++c) {
        Column& own = columns[static_cast<size_t>(c)];
        const Spec spec{.dtype = d, .mode = Scaling::delayed, .column = true, .scale = own.scale};
        const Encoded out(spec, m, k, false, false);
        Tensor t = out.tensor();
        t.scale = cell(scale, c);
        t.amax = cell(history, c);
        if (c == 0)
          forward(f, {.x = x.view(), .y = t}, kStrict);
        else
          backward(f, {.grad = g.view(), .x = x.view(), .dx = t}, kStrict);
        const Quantised q = quantise_ref(spec, numbers(c == 0 ? y : dx), m, k);
        ASSERT_EQ(out.data(false).differs(q.row.data, "row"), "") << step;
        ASSERT_EQ(out.data(true).differs(q.column.data, "column"), "") << step;
        ASSERT_EQ(out.scales(false).differs(q.row.scales, "scale"), "") << step;
        own.history[0] = from_bits(q.amax);
        ASSERT_TRUE(equal(history.at(0, c), own.history[0])) << step;
        own.update(d, 0, false);
      }
      update({.history = history.view(), .scale = scale.view(), .dtype = d});
      for (int64_t c = 0; c < 2; ++c) {
        const Column& own = columns[static_cast<size_t>(c)];
        ASSERT_EQ(bits(scale.at(0, c)), bits(own.scale)) << step;
        for (int64_t i = 0; i < kLength; ++i)
          ASSERT_TRUE(equal(history.at(i, c), own.history[static_cast<size_t>(i)])) << step;
      }
      ASSERT_TRUE(history.guards_hold() && scale.guards_hold());
    }
  }
}

TEST(Delayed, MistakesAreNamed) {
  const Mat history(DType::f32, 4, 3), scale(DType::f32, 1, 3), half(DType::bf16, 4, 3);
  const auto bad = [&](DelayedUpdate call, std::initializer_list<std::string_view> parts) {
    expect_error([&] { update(call); }, Code::invalid_argument, parts);
    EXPECT_TRUE(history.untouched() && scale.untouched());
  };
  const DelayedUpdate good{.history = history.view(), .scale = scale.view()};
  DelayedUpdate c = good;
  c.history = half.view();
  bad(c, {"delayed update", "history", "bf16", "f32"});
  c = good;
  c.history = history.rows_from(0, 0);
  bad(c, {"delayed update", "history", "no rows"});
  c = good;
  c.scale.cols = 2;
  bad(c, {"delayed update", "scale is 1x2", "1x3"});
  c = good;
  c.dtype = DType::bf16;
  bad(c, {"delayed update", "dtype", "e4m3"});
  c = good;
  c.margin = 65;
  bad(c, {"delayed update", "margin = 65", "64"});
  c = good;
  c.scale = history.rows_from(1, 1);
  bad(c, {"delayed update", "overlap"});
  c = good;
  c.history.data = nullptr;
  bad(c, {"delayed update", "history", "null"});
  update(
      {.history = matrix(nullptr, DType::f32, 4, 0), .scale = matrix(nullptr, DType::f32, 1, 0)});
}

}  // namespace
}  // namespace tenon::test
