// Tests of the shapes of data and scales against the table of the specification.
#include "tenon/format.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "support/modes.h"

namespace {

using namespace tenon;

constexpr std::array<int64_t, 9> kSizes{0, 1, 31, 32, 33, 127, 128, 129, 4096};

// Rounds up to a multiple by counting, independently of the header.
int64_t multiple_from(int64_t a, int64_t step) {
  int64_t m = 0;
  while (m < a) m += step;
  return m;
}
int64_t pieces(int64_t a, int64_t size) { return multiple_from(a, size) / size; }

std::string where(int64_t m, int64_t k, Scaling s) {
  return std::string(info(s).name) + " " + std::to_string(m) + "x" + std::to_string(k);
}

template <class F>
void for_all_shapes(Scaling s, F f) {
  const Format format{.dtype = DType::e4m3, .scaling = s};
  for (const int64_t m : kSizes)
    for (const int64_t k : kSizes) f(format, m, k);
}

TEST(Format, RoundingHelpers) {
  for (const int64_t a : kSizes)
    for (const int64_t b : {1, 4, 32, 128}) {
      EXPECT_EQ(cdiv(a, b), pieces(a, b)) << a << " " << b;
      EXPECT_EQ(rup(a, b), multiple_from(a, b)) << a << " " << b;
    }
}

TEST(Format, RowwiseDataHaveTheTensorsShape) {
  for (size_t s = 0; s < kScalings.size(); ++s)
    for_all_shapes(static_cast<Scaling>(s), [](const Format& f, int64_t m, int64_t k) {
      EXPECT_EQ(f.data_shape(m, k, Orientation::rowwise), (Shape{m, k})) << where(m, k, f.scaling);
    });
}

TEST(Format, EveryModeIsAsSpecified) {
  static_assert(kScalings.size() == std::size(test::kSpecified));
  for (size_t i = 0; i < kScalings.size(); ++i) {
    const auto s = static_cast<Scaling>(i);
    const test::Mode& mode = test::kSpecified[i];
    EXPECT_EQ(info(s).name, mode.name);
    EXPECT_EQ(scaling_named(mode.name), s);
    EXPECT_EQ(info(s).scale, mode.e8m0 ? DType::e8m0 : DType::f32) << mode.name;
    EXPECT_EQ(info(s).reads_scale, mode.single) << mode.name;
    EXPECT_EQ(info(s).scale_given, mode.given) << mode.name;
    EXPECT_EQ((Format{.dtype = DType::e4m3, .scaling = s}.fp32_rule()), mode.rule) << mode.name;
    EXPECT_EQ(info(s).power_of_two, mode.pow2) << mode.name;
    for (const Orientation o : {Orientation::rowwise, Orientation::columnwise}) {
      const bool column = o == Orientation::columnwise;
      const Blocks blocks = info(s).blocks[column];
      EXPECT_EQ(blocks.single(), s == Scaling::none || mode.single) << mode.name;
      if (!blocks.single()) {
        EXPECT_EQ((test::ref::Size{blocks.rows, blocks.cols}), mode.block[column]) << mode.name;
      }
      EXPECT_EQ(blocks.transposed, mode.turned[column]) << mode.name;
      for_all_shapes(s, [&](const Format& f, int64_t m, int64_t k) {
        const Shape data = f.data_shape(m, k, o), scales = f.scale_shape(m, k, o);
        EXPECT_EQ((test::ref::Size{data.rows, data.cols}), test::ref::data_size(mode, m, k, column))
            << where(m, k, s);
        EXPECT_EQ((test::ref::Size{scales.rows, scales.cols}), mode.scales(m, k, column))
            << where(m, k, s);
      });
    }
  }
}

// Values computed by hand, to find errors that the table and the loops have in common.
TEST(Format, WorkedExamples) {
  const Format mx{DType::e4m3, Scaling::mxfp8};
  EXPECT_EQ(mx.scale_shape(129, 33, Orientation::rowwise), (Shape{256, 4}));
  EXPECT_EQ(mx.scale_shape(129, 33, Orientation::columnwise), (Shape{8, 128}));
  EXPECT_EQ(mx.scale_shape(4096, 129, Orientation::rowwise), (Shape{4096, 8}));
  EXPECT_EQ(mx.scale_shape(0, 0, Orientation::rowwise), (Shape{0, 0}));
  const Format line{DType::e4m3, Scaling::block1x128};
  EXPECT_EQ(line.scale_shape(33, 129, Orientation::rowwise), (Shape{2, 36}));
  EXPECT_EQ(line.scale_shape(33, 129, Orientation::columnwise), (Shape{1, 132}));
  const Format square{DType::e4m3, Scaling::block128x128};
  EXPECT_EQ(square.scale_shape(129, 4096, Orientation::rowwise), (Shape{2, 32}));
  EXPECT_EQ(square.scale_shape(129, 4096, Orientation::columnwise), (Shape{32, 4}));
}

TEST(Format, PaddedScalesHaveOneForEachBlock) {
  for (const ScalingInfo& mode : kScalings) {
    const Format f{.dtype = DType::e4m3, .scaling = *scaling_named(mode.name)};
    for (const Orientation o : {Orientation::rowwise, Orientation::columnwise}) {
      if (f.blocks(o).single()) continue;
      const Shape count = f.blocks(o).count(300, 1000);
      const Shape padded = f.scale_shape(300, 1000, o);
      const bool transposed = f.blocks(o).transposed;
      EXPECT_LE(count.rows, transposed ? padded.cols : padded.rows) << mode.name;
      EXPECT_LE(count.cols, transposed ? padded.rows : padded.cols) << mode.name;
    }
  }
}

// The order of tensor cores, from the formula of the specification.
TEST(Format, SwizzledOffsetsAreAPermutation) {
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::mxfp8, .swizzled = true};
  for (const Orientation o : {Orientation::rowwise, Orientation::columnwise}) {
    const bool rowwise = o == Orientation::rowwise;
    const Shape s = f.scale_shape(300, 700, o);
    std::vector<bool> seen(static_cast<size_t>(s.rows * s.cols), false);
    for (int64_t i = 0; i < s.rows; ++i)
      for (int64_t j = 0; j < s.cols; ++j) {
        const int64_t line = rowwise ? i : j, block = rowwise ? j : i;
        const int64_t tiles = (rowwise ? s.cols : s.rows) / 4;
        const int64_t at = scale_offset(f, o, i, j, s, s.cols);
        EXPECT_EQ(at, ((line / 128) * tiles + block / 4) * 512 + (line % 32) * 16 +
                          ((line % 128) / 32) * 4 + block % 4);
        ASSERT_TRUE(at >= 0 && at < s.rows * s.cols && !seen[static_cast<size_t>(at)]);
        seen[static_cast<size_t>(at)] = true;
      }
  }
  // By hand: row 33, block 5 of 8: second tile of four blocks, line 1, second group of 32.
  EXPECT_EQ(scale_offset(f, Orientation::rowwise, 33, 5, {128, 8}, 8), 512 + 16 + 4 + 1);
}

TEST(Format, DefaultIsPlain) {
  constexpr Format kDefault;
  static_assert(kDefault.dtype == DType::f32 && kDefault.scaling == Scaling::none);
  static_assert(kDefault.data_shape(3, 5, Orientation::columnwise) == Shape{5, 3});
}

}  // namespace
