// Tests of the conversions of every format, scalar and vectorised, against float64 definitions.
#include "tenon/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backend/cpu/isa.h"

namespace {

using namespace tenon;

static_assert(decode<DType::f16>(0x3c00) == 1.0F && encode<DType::f16>(1.0F) == 0x3c00);
static_assert(decode<DType::bf16>(0xbf80) == -1.0F && encode<DType::bf16>(-1.0F) == 0xbf80);
static_assert(decode<DType::e4m3>(0x7e) == 448.0F && encode<DType::e4m3>(1e9F) == 0x7e);
static_assert(decode<DType::e5m2>(0x7b) == 57344.0F && encode<DType::e5m2>(-1e9F) == 0xfb);
static_assert(decode<DType::e8m0>(127) == 1.0F && encode<DType::e8m0>(3.0F) == 129);
static_assert(decode(DType::f16, 0x0001) == 0x1p-24F && encode(DType::bf16, 1.0F) == 0x3f80);
static_assert(rounded_to<DType::e4m3>(17.0F) == 16.0F);

// Independent definitions of the formats.
struct Definition {
  DType dtype;
  int bits, exponent_bits, mantissa_bits, bias;
  uint32_t nan, overflow;  // overflow: the code for a positive value that is too large
  double max;
};
constexpr std::array<Definition, 4> kDefinitions{{
    {DType::f16, 16, 5, 10, 15, 0x7e00, 0x7c00, 65504},
    {DType::bf16, 16, 8, 7, 127, 0x7fc0, 0x7f80, 0x1.fep127},
    {DType::e4m3, 8, 4, 3, 7, 0x7f, 0x7e, 448},
    {DType::e5m2, 8, 5, 2, 15, 0x7f, 0x7b, 57344},
}};

uint32_t sign_of(const Definition& f) { return 1U << (f.bits - 1); }

double defined_value(const Definition& f, uint32_t code) {
  const double sign = code & sign_of(f) ? -1 : 1;
  const int e = static_cast<int>(code >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int m = static_cast<int>(code) & ((1 << f.mantissa_bits) - 1);
  if (f.dtype == DType::e4m3 ? (code & 0x7f) == 0x7f : e == (1 << f.exponent_bits) - 1) {
    const bool infinite = f.dtype != DType::e4m3 && m == 0;
    return infinite ? sign * INFINITY : NAN;
  }
  const double fraction = std::ldexp(m, -f.mantissa_bits);
  return sign * (e == 0 ? std::ldexp(fraction, 1 - f.bias) : std::ldexp(1 + fraction, e - f.bias));
}

bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
uint32_t bits_of(float v) { return __builtin_bit_cast(uint32_t, v); }

// Codes of non-negative finite values have the order of their values, so the list is sorted.
std::vector<double> magnitudes(const Definition& f) {
  std::vector<double> list;
  for (uint32_t c = 0; c < sign_of(f) && std::isfinite(defined_value(f, c)); ++c)
    list.push_back(defined_value(f, c));
  return list;
}

// Finds the nearest value by search in the list of all values. Distances between fp32 values are
// exact in float64 wherever they decide.
uint32_t searched(const Definition& f, const std::vector<double>& list, float v) {
  if (std::isnan(v)) return f.nan;
  const uint32_t sign = std::signbit(v) ? sign_of(f) : 0;
  const double a = std::fabs(static_cast<double>(v));
  const auto above = static_cast<uint32_t>(std::ranges::lower_bound(list, a) - list.begin());
  if (above == list.size()) {
    // Half a step above the largest value is the midpoint to the next power of two.
    const double half = (list[above - 1] - list[above - 2]) / 2;
    const bool over = a >= list.back() + half;
    return sign | (over ? f.overflow : above - 1);
  }
  if (above == 0) return sign;
  const double up = list[above] - a, down = a - list[above - 1];
  const bool upward = up < down || (up == down && above % 2 == 0);
  return sign | (upward ? above : above - 1);
}

// Rounds in float64 after scaling the last place to 1. Fast enough for millions of values.
uint32_t scaled_nearest(const Definition& f, float v) {
  if (std::isnan(v)) return f.nan;
  const uint32_t sign = std::signbit(v) ? sign_of(f) : 0;
  const double a = std::fabs(static_cast<double>(v));
  if (a == 0) return sign;
  if (std::isinf(a)) return sign | f.overflow;
  const int e = std::max(std::ilogb(a), 1 - f.bias);
  const double units = std::nearbyint(std::ldexp(a, f.mantissa_bits - e));
  if (std::ldexp(units, e - f.mantissa_bits) > f.max) return sign | f.overflow;
  // `units` counts from the start of the binade. A carry gives the first code of the next binade.
  const auto n = static_cast<uint32_t>(units);
  return sign | ((static_cast<uint32_t>(e + f.bias - 1) << f.mantissa_bits) + n);
}

TEST(Decode, EveryPatternMatchesItsDefinition) {
  for (const Definition& f : kDefinitions)
    for (uint32_t c = 0; c < 1U << f.bits; ++c)
      ASSERT_TRUE(same(decode(f.dtype, c), defined_value(f, c))) << info(f.dtype).name << " " << c;
}

TEST(Decode, SpecialPatterns) {
  std::set<uint32_t> nans, infinities;
  for (uint32_t c = 0; c < 256; ++c) {
    if (std::isnan(decode<DType::e4m3>(c))) nans.insert(c);
    if (std::isinf(decode<DType::e4m3>(c))) infinities.insert(c);
  }
  EXPECT_EQ(nans, (std::set<uint32_t>{0x7f, 0xff}));
  EXPECT_TRUE(infinities.empty());
  EXPECT_EQ(decode<DType::e5m2>(0x7c), INFINITY);
  EXPECT_EQ(decode<DType::e5m2>(0xfc), -INFINITY);
  for (const uint32_t c : {0x7dU, 0x7eU, 0x7fU, 0xfdU, 0xfeU, 0xffU})
    EXPECT_TRUE(std::isnan(decode<DType::e5m2>(c))) << c;
  EXPECT_EQ(decode<DType::f16>(0xfc00), -INFINITY);
  EXPECT_EQ(decode<DType::bf16>(0x7f80), INFINITY);
}

TEST(Decode, ScaleExponents) {
  for (uint32_t c = 0; c < 255; ++c)
    ASSERT_EQ(decode<DType::e8m0>(c), std::ldexp(1.0, static_cast<int>(c) - 127)) << c;
  EXPECT_TRUE(std::isnan(decode<DType::e8m0>(255)));
}

TEST(Decode, TableRowsMatchTheDefinitions) {
  for (const Definition& f : kDefinitions) {
    EXPECT_EQ(info(f.dtype).bytes * 8, f.bits);
    EXPECT_EQ(info(f.dtype).max, f.max);
    EXPECT_EQ(defined_value(f, info(f.dtype).largest), f.max);
    EXPECT_EQ(dtype_named(info(f.dtype).name), f.dtype);
  }
  EXPECT_FALSE(dtype_named("f64"));
}

void expect_encoded(const Definition& f, const std::vector<double>& list, float v) {
  const uint32_t expected = searched(f, list, v);
  ASSERT_EQ(encode(f.dtype, v), expected) << info(f.dtype).name << " of " << std::hexfloat << v;
  // The two oracles check each other.
  ASSERT_EQ(scaled_nearest(f, v), expected) << info(f.dtype).name << " of " << std::hexfloat << v;
}

TEST(Encode, EveryHalfPrecisionValue) {
  for (const Definition& f : kDefinitions) {
    const std::vector<double> list = magnitudes(f);
    for (const Definition& source : {kDefinitions[0], kDefinitions[1]})
      for (uint32_t c = 0; c < 0x10000; ++c)
        expect_encoded(f, list, static_cast<float>(defined_value(source, c)));
  }
}

TEST(Encode, EveryMidpointAndItsNeighbours) {
  for (const Definition& f : kDefinitions) {
    std::vector<double> list = magnitudes(f);
    const double step = list.back() - list[list.size() - 2];
    std::vector<double> ends = list;
    ends.push_back(list.back() + step);  // the midpoint at which overflow begins
    for (size_t i = 0; i + 1 < ends.size(); ++i) {
      const double middle = (ends[i] + ends[i + 1]) / 2;
      const auto m = static_cast<float>(middle);
      ASSERT_EQ(m, middle);  // fp32 represents every midpoint of the narrower formats
      for (const float v : {m, std::nextafterf(m, 0), std::nextafterf(m, INFINITY)}) {
        expect_encoded(f, list, v);
        expect_encoded(f, list, -v);
      }
    }
  }
}

TEST(Encode, SpecialValues) {
  const std::array<float, 4> nans{NAN, -NAN, float_of(0x7f800001), float_of(0xffffffff)};
  for (const float n : nans) {
    EXPECT_EQ(encode<DType::f16>(n), 0x7e00U);
    EXPECT_EQ(encode<DType::bf16>(n), 0x7fc0U);
    EXPECT_EQ(encode<DType::e4m3>(n), 0x7fU);
    EXPECT_EQ(encode<DType::e5m2>(n), 0x7fU);
  }
  EXPECT_EQ(encode<DType::f16>(-0.0F), 0x8000U);
  EXPECT_EQ(encode<DType::bf16>(-0.0F), 0x8000U);
  EXPECT_EQ(encode<DType::e4m3>(-0.0F), 0x80U);
  EXPECT_EQ(encode<DType::e5m2>(-0.0F), 0x80U);
  // FP8 saturates. Other formats overflow to infinity.
  EXPECT_EQ(encode<DType::e4m3>(INFINITY), 0x7eU);
  EXPECT_EQ(encode<DType::e4m3>(-INFINITY), 0xfeU);
  EXPECT_EQ(encode<DType::e4m3>(448.1F), 0x7eU);
  EXPECT_EQ(encode<DType::e5m2>(INFINITY), 0x7bU);
  EXPECT_EQ(encode<DType::e5m2>(-FLT_MAX), 0xfbU);
  EXPECT_EQ(encode<DType::f16>(65520.0F), 0x7c00U);
  EXPECT_EQ(encode<DType::f16>(std::nextafterf(65520.0F, 0)), 0x7bffU);
  EXPECT_EQ(encode<DType::f16>(-FLT_MAX), 0xfc00U);
  EXPECT_EQ(encode<DType::bf16>(FLT_MAX), 0x7f80U);
  // Subnormals are kept: the smallest one, and half of it, which is a tie that rounds to zero.
  EXPECT_EQ(encode<DType::e4m3>(0x1p-9F), 0x01U);
  EXPECT_EQ(encode<DType::e4m3>(0x1p-10F), 0x00U);
  EXPECT_EQ(encode<DType::e4m3>(-0x1.000002p-10F), 0x81U);
  EXPECT_EQ(encode<DType::bf16>(0x1p-149F), 0x00U);
}

TEST(Encode, TenMillionRandomPatterns) {
  for (const Definition& f : kDefinitions) {
    std::mt19937 random(index(f.dtype) + 7);
    visit(f.dtype, [&](auto tag) {
      for (int i = 0; i < 10'000'000; ++i) {
        const float v = float_of(static_cast<uint32_t>(random()));
        if (encode<tag()>(v) != scaled_nearest(f, v))
          FAIL() << info(f.dtype).name << " of " << std::hexfloat << v;
      }
    });
  }
}

// The smallest power of two >= p: 2^(e−127), at least 2^−127, at most 2^127.
uint32_t least_power(double p) {
  uint32_t e = 0;
  while (e < 254 && std::ldexp(1.0, static_cast<int>(e) - 127) < p) ++e;
  return e;
}

TEST(Encode, ScaleRule) {
  EXPECT_EQ(encode<DType::e8m0>(NAN), 255U);
  EXPECT_EQ(encode<DType::e8m0>(INFINITY), 254U);
  EXPECT_EQ(encode<DType::e8m0>(FLT_MAX), 254U);
  EXPECT_EQ(encode<DType::e8m0>(0.0F), 0U);
  EXPECT_EQ(encode<DType::e8m0>(float_of(0x400000)), 0U);  // exactly 2^−127
  EXPECT_EQ(encode<DType::e8m0>(float_of(0x400001)), 1U);
  for (uint32_t e = 0; e < 255; ++e)
    for (const uint32_t m : {0U, 1U, 0x3fffffU, 0x400000U, 0x400001U, 0x7fffffU}) {
      const float p = float_of(e << 23 | m);
      ASSERT_EQ(encode<DType::e8m0>(p), least_power(p)) << std::hexfloat << p;
    }
  for (const uint32_t bits : {1U, 2U, 0x1fffffU, 0x3ffffeU, 0x7ffffeU})
    ASSERT_EQ(encode<DType::e8m0>(float_of(bits)), least_power(float_of(bits))) << bits;
  std::mt19937 random(3);
  for (int i = 0; i < 1'000'000; ++i) {
    const float p = float_of(static_cast<uint32_t>(random()) & 0x7fffffffU);
    if (!std::isfinite(p)) continue;
    const int e = static_cast<int>(encode<DType::e8m0>(p));
    const double power = std::ldexp(1.0, e - 127);
    const bool covers = power >= p || e == 254;
    const bool least = e == 0 || power / 2 < p;
    ASSERT_TRUE(covers && least) << std::hexfloat << p << " gave " << e;
  }
}

// Values for every branch of every conversion. The length is not a multiple of a vector.
std::vector<float> samples() {
  std::vector<float> list;
  for (uint32_t c = 0; c < 0x10000; ++c) {
    list.push_back(float_of(c << 16));
    list.push_back(float_of(c << 16 | 0x8000));
    list.push_back(float_of(c << 16 | 0x8001));
    list.push_back(static_cast<float>(defined_value(kDefinitions[0], c)));
  }
  std::mt19937 random(11);
  for (int i = 0; i < 100'003; ++i) list.push_back(float_of(static_cast<uint32_t>(random())));
  return list;
}

uint32_t element(const uint8_t* p, int bytes) {
  uint32_t code = 0;
  std::memcpy(&code, p, static_cast<size_t>(bytes));
  return code;
}

bool equal_floats(float a, float b) {
  return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b));
}

constexpr std::array<DType, 6> kAll{DType::f32,  DType::f16,  DType::bf16,
                                    DType::e4m3, DType::e5m2, DType::e8m0};
constexpr uint8_t kGuard = 0xa5;

TEST(Loops, LoadEveryPatternAtOddAddressesAndStrides) {
  for (const cpu::Isa& isa : cpu::isas_here())
    for (const DType d : kAll) {
      const auto bytes = static_cast<size_t>(info(d).bytes);
      const size_t n = bytes == 1 ? 256 + 13 : 0x10000 + 13;
      for (const size_t stride : {1U, 2U, 3U}) {
        std::vector<uint8_t> memory(1 + (n * stride) * bytes, kGuard);
        for (size_t i = 0; i < n; ++i) {
          const auto code = static_cast<uint32_t>(bytes == 4 ? i << 16 | i : i);
          std::memcpy(&memory[1 + i * stride * bytes], &code, bytes);
        }
        std::vector<float> out(n + 2, 42.0F);
        isa.loops->load[index(d)](&out[1], &memory[1], static_cast<int64_t>(stride), n);
        for (size_t i = 0; i < n; ++i) {
          const uint32_t code = element(&memory[1 + i * stride * bytes], info(d).bytes);
          ASSERT_TRUE(equal_floats(out[i + 1], decode(d, code)))
              << isa.name << " " << info(d).name << " " << code << " stride " << stride;
        }
        ASSERT_TRUE(out.front() == 42 && out.back() == 42) << isa.name << " " << info(d).name;
      }
    }
}

TEST(Loops, StoreAtOddAddressesAndStridesAndNothingElse) {
  const std::vector<float> values = samples();
  for (const cpu::Isa& isa : cpu::isas_here())
    for (const DType d : kAll) {
      const auto bytes = static_cast<size_t>(info(d).bytes);
      for (const size_t stride : {1U, 2U, 3U})
        for (const size_t n : {values.size(), size_t{1}, size_t{7}, size_t{37}}) {
          std::vector<uint8_t> memory(1 + n * stride * bytes + 64, kGuard);
          isa.loops->store[index(d)](&memory[1], static_cast<int64_t>(stride), values.data(), n);
          std::vector<uint8_t> expected(memory.size(), kGuard);
          for (size_t i = 0; i < n; ++i) {
            const uint32_t code = encode(d, values[i]);
            std::memcpy(&expected[1 + i * stride * bytes], &code, bytes);
          }
          ASSERT_TRUE(memory == expected)
              << isa.name << " " << info(d).name << " stride " << stride << " n " << n;
        }
    }
}

TEST(Loops, RoundEqualsEncodeThenDecode) {
  const std::vector<float> values = samples();
  const float* in = values.data();
  for (const cpu::Isa& isa : cpu::isas_here())
    for (const DType d : kAll) {
      std::vector<float> out(values.size() + 1, 42.0F);
      isa.loops->round[index(d)](out.data(), &in, values.size());
      for (size_t i = 0; i < values.size(); ++i)
        ASSERT_TRUE(equal_floats(out[i], decode(d, encode(d, values[i]))))
            << isa.name << " " << info(d).name << " of " << std::hexfloat << values[i];
      ASSERT_EQ(out.back(), 42.0F);
    }
}

}  // namespace
