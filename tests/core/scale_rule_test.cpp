// Tests of the rules that compute a scale from an amax, against integers and float64.
// `scale_exhaustive` tests every value.
#include <gtest/gtest.h>

#include <vector>

#include "core/scaling.h"
#include "support/quantize_reference.h"

namespace tenon::test {
namespace {

// Bit patterns at the edges of the rules: the first and last of every exponent with neighbours, and
// the limits of the type.
std::vector<uint32_t> edges() {
  std::vector<uint32_t> list{0, 1, 2, 3, 0x3fffff, 0x400000, 0x400001, 0x7ffffe, 0x7fffff};
  for (uint32_t e = 0; e <= 255; ++e)
    for (const uint32_t m : {0x0U, 0x1U, 0x2U, 0x3fffffU, 0x400000U, 0x400001U, 0x600000U,
                             0x5fffffU, 0x600001U, 0x7ffffeU, 0x7fffffU})
      list.push_back((e << 23) | m);
  return list;
}

void expect_scale(uint32_t amax, DType d, float eps, bool pow2) {
  const Scale got = scale_fp32(amax, d, eps, pow2);
  const float want = ref::multiplier(amax, d, eps, pow2);
  const float inverse = ref::quotient(1, want);
  if (bits(got.multiplier) != bits(want) || got.inverse != bits(inverse))
    ADD_FAILURE() << info(d).name << " amax " << std::hexfloat << from_bits(amax) << " eps " << eps
                  << (pow2 ? " pow2" : "") << ": got " << got.multiplier << " and "
                  << from_bits(got.inverse) << ", expected " << want << " and " << inverse;
}

void expect_e8m0(uint32_t amax, DType d) {
  const Scale got = scale_e8m0(amax, d);
  const uint8_t want = ref::e8m0(amax, d);
  if (got.inverse != want || !equal(got.multiplier, ref::e8m0_multiplier(want)))
    ADD_FAILURE() << info(d).name << " amax " << std::hexfloat << from_bits(amax)
                  << ": got e = " << got.inverse << ", multiplier " << got.multiplier
                  << ", expected " << static_cast<int>(want);
}

TEST(ScaleRule, CurrentAndBlockAtEdges) {
  for (const DType d : kFp8)
    for (const bool pow2 : {false, true})
      for (const float eps : {0.0F, 1e-30F, 1.0F, 0x1p-149F, 0x1.fffffep127F}) {
        for (const uint32_t a : edges()) {
          expect_scale(a, d, eps, pow2);
          if (HasFailure()) return;
        }
        for (uint32_t near = bits(eps) - std::min(bits(eps), 64U); near < bits(eps) + 64; ++near)
          expect_scale(near, d, eps, pow2);
      }
}

// Quotients near powers of two, and near overflow.
TEST(ScaleRule, CurrentAndBlockAroundQuotientsOfPowers) {
  for (const DType d : kFp8)
    for (int e = -149; e <= 127; ++e) {
      const double amax = ref::fp8_max(d) * std::ldexp(1.0, e);
      if (amax > 0x1.fffffep127) continue;
      const uint32_t at = bits(static_cast<float>(amax));
      for (uint32_t a = at - std::min(at, 8U); a < at + 8; ++a)
        for (const bool pow2 : {false, true}) expect_scale(a, d, 0, pow2);
    }
}

TEST(ScaleRule, CurrentAndBlockOnManyNumbers) {
  std::mt19937 random(1);
  for (int i = 0; i < 400000; ++i) {
    const uint32_t a = random() & 0x7fffffffU;
    for (const DType d : kFp8) expect_scale(a, d, i % 3 ? 0.0F : 1e-4F, i % 2);
    if (HasFailure()) return;
  }
}

// Computed by hand, to find errors that the library and the reference have in common.
TEST(ScaleRule, WorkedExamples) {
  const auto scale = [](float amax, DType d, float eps, bool pow2) {
    return scale_fp32(bits(amax), d, eps, pow2).multiplier;
  };
  EXPECT_EQ(scale(0, DType::e4m3, 0, true), 1.0F);
  EXPECT_EQ(scale(kInf, DType::e4m3, 0, true), 1.0F);
  EXPECT_EQ(scale(kNan, DType::e5m2, 1, false), 1.0F);
  EXPECT_EQ(scale(1, DType::e4m3, 0, false), 448.0F);
  EXPECT_EQ(scale(1, DType::e4m3, 0, true), 256.0F);
  EXPECT_EQ(scale(1, DType::e5m2, 0, true), 32768.0F);
  EXPECT_EQ(scale(0, DType::e4m3, 1, false), 448.0F);
  EXPECT_EQ(scale(0.5F, DType::e4m3, 1, false), 448.0F);
  EXPECT_EQ(scale(2, DType::e4m3, 1, false), 224.0F);
  EXPECT_EQ(scale(0x1p-149F, DType::e4m3, 0, false), 0x1.fffffep127F);
  EXPECT_EQ(scale(0x1p-149F, DType::e4m3, 0, true), 0x1p127F);
  const auto e = [](float amax, DType d) { return scale_e8m0(bits(amax), d).inverse; };
  EXPECT_EQ(e(0, DType::e4m3), 0U);
  EXPECT_EQ(scale_e8m0(0, DType::e4m3).multiplier, 0x1p127F);
  // fl32(1/448) > 1/448, but its product with 448 rounds to 1.
  EXPECT_EQ(e(448, DType::e4m3), 127U);
  EXPECT_EQ(e(0x1.c00002p8F, DType::e4m3), 128U);
  EXPECT_EQ(e(256, DType::e4m3), 127U);
  EXPECT_EQ(e(447.9F, DType::e4m3), 127U);
  EXPECT_EQ(e(1, DType::e4m3), 119U);  // 2^-9 < 1/448 < 2^-8
  EXPECT_EQ(e(1, DType::e5m2), 112U);  // 2^-16 < 1/57344 < 2^-15
  EXPECT_EQ(e(kInf, DType::e5m2), 254U);
  EXPECT_EQ(scale_e8m0(bits(kInf), DType::e5m2).multiplier, 0x1p-127F);
  EXPECT_EQ(e(kNan, DType::e4m3), 255U);
}

TEST(ScaleRule, E8m0OnFourMillionNumbers) {
  for (const DType d : kFp8) {
    for (const uint32_t a : edges()) expect_e8m0(a, d);
    // Near each amax whose product with fl32(1/max) crosses a power of two.
    for (int e = -149; e <= 127; ++e) {
      const double amax = ref::fp8_max(d) * std::ldexp(1.0, e);
      if (amax > 0x1.fffffep127) continue;
      const uint32_t at = bits(static_cast<float>(amax));
      for (uint32_t a = at - std::min(at, 32U); a < at + 32; ++a) expect_e8m0(a, d);
    }
    std::mt19937 random(2);
    // Evenly spaced bit patterns, including NaNs, plus a random offset within each step.
    constexpr uint32_t kStep = 1024;
    for (uint32_t a = 0; a < 0x80000000U - kStep; a += kStep) {
      expect_e8m0(a + random() % kStep, d);
      if (HasFailure()) return;
    }
  }
}

// The two forms of the rule in the reference agree: the smallest power of two, and the fields of p.
TEST(ScaleRule, TheFieldsOfTheProductSayTheSame) {
  for (const DType d : kFp8)
    for (const uint32_t a : edges()) {
      if (a >= 0x7f800000U) continue;
      const auto [r, lsb] = ref::times_inverse(a, d);
      const auto p = bits(static_cast<float>(std::ldexp(static_cast<double>(r), lsb)));
      EXPECT_EQ(from_bits(p),
                ref::product(from_bits(a), ref::quotient(1, static_cast<float>(ref::fp8_max(d)))));
      const uint32_t e = p >> 23;
      const uint32_t m = p & 0x7fffffU;
      const uint32_t code = e == 0 ? (m > 0x400000U ? 1 : 0) : e + (m != 0 && e != 254 ? 1 : 0);
      EXPECT_EQ(code, ref::e8m0(a, d)) << from_bits(a);
    }
}

}  // namespace
}  // namespace tenon::test
