// What parameters start as: ranges, bit patterns, streams.
#include <set>

#include "core/philox.h"
#include "support/plan_support.h"
#include "tenon/error.h"

namespace tenon::test {
namespace {

Plan plan_of(std::string_view chain, DType dtype = DType::f32, int64_t cols = 0) {
  PlanRequest r;
  r.dtype = dtype;
  r.cols = cols;
  r.options.device = Device::null;
  return Plan::build(chain, r);
}

size_t number(const Plan& p, std::string_view name) {
  for (size_t i = 0; i < p.buffers().size(); ++i)
    if (p.buffers()[i].name == name) return i;
  ADD_FAILURE() << "no buffer " << name;
  return 0;
}

// The codes of a parameter; the bytes behind it must stay as they are.
std::vector<uint32_t> codes(const Plan& p, std::string_view name, uint64_t seed) {
  const size_t i = number(p, name);
  const Buffer& b = p.buffers()[i];
  const auto size = static_cast<size_t>(info(b.dtype).bytes);
  const auto bytes = static_cast<size_t>(b.bytes(0));
  std::vector<uint8_t> memory(bytes + 16, 0xA5);
  p.initialise(i, seed, memory.data());
  for (size_t k = bytes; k < memory.size(); ++k) EXPECT_EQ(memory[k], 0xA5);
  std::vector<uint32_t> list(bytes / size);
  for (size_t k = 0; k < list.size(); ++k) std::memcpy(&list[k], &memory[k * size], size);
  return list;
}

TEST(Initial, WeightsAreUniformWithinOneOverTheRootOfTheirInputs) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    constexpr int64_t kIn = 192, kOut = 257;
    const Plan p = plan_of("linear(192,257)", dtype);
    const std::vector<uint32_t> list = codes(p, "linear0.weight", 7);
    ASSERT_EQ(list.size(), static_cast<size_t>(kIn * kOut));
    const double bound = 1 / std::sqrt(static_cast<double>(kIn));
    // Rounding may move a number by half a step beyond the end.
    const double most = bound * (1 + std::ldexp(1.0, -info(dtype).mantissa_bits - 1));
    double sum = 0, squares = 0;
    std::set<uint32_t> different;
    for (const uint32_t code : list) {
      const double v = decode_ref(dtype, code);
      ASSERT_LE(std::fabs(v), most);
      sum += v;
      squares += v * v;
      different.insert(code);
    }
    const auto n = static_cast<double>(list.size());
    // Six standard deviations of the mean and of the variance of n uniform numbers.
    EXPECT_LE(std::fabs(sum / n), 6 * bound / std::sqrt(3 * n));
    const double variance = bound * bound / 3;
    EXPECT_LE(std::fabs(squares / n - variance),
              6 * variance * std::sqrt(0.8 / n) + 1e-3 * variance);
    EXPECT_GT(different.size(), dtype == DType::f32 ? list.size() * 9 / 10 : size_t{1000});
  }
}

// The numbers of the Philox stream of the name, rounded to each dtype.
TEST(Initial, BitsFollowFromSeedAndName) {
  const std::string name = "linear0.weight";
  uint64_t stream = 14695981039346656037U;
  for (const char c : name) stream = (stream ^ static_cast<uint64_t>(c)) * 1099511628211U;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::vector<uint32_t> list = codes(plan_of("linear(16,3)", dtype), name, 0x123456789ULL);
    for (size_t i = 0; i < list.size(); ++i) {
      const uint32_t word = philox(0x123456789ULL, i / 4, stream).w[i % 4];
      const double exact = -0.25 + 0.5 * (word >> 8) / 16777216.0;
      EXPECT_EQ(list[i], encode_ref(dtype, static_cast<float>(exact))) << i;
    }
  }
}

TEST(Initial, ScalesAreOneAndOffsetsAreZero) {
  const std::pair<DType, uint32_t> kOnes[] = {
      {DType::f32, 0x3f800000}, {DType::f16, 0x3c00}, {DType::bf16, 0x3f80}};
  for (const auto& [dtype, one] : kOnes) {
    const Plan p = plan_of("rmsnorm(24):a layernorm:b layernorm(zero_centered_gamma=true):c bias:d",
                           dtype, 24);
    for (const uint32_t v : codes(p, "a.gamma", 1)) EXPECT_EQ(v, one);
    for (const uint32_t v : codes(p, "b.gamma", 1)) EXPECT_EQ(v, one);
    for (const char* name : {"b.beta", "c.gamma", "c.beta", "d.bias"})
      for (const uint32_t v : codes(p, name, 1)) EXPECT_EQ(v, 0U) << name;
  }
}

TEST(Initial, SeedsAndNamesHaveStreamsOfTheirOwn) {
  const Plan two = plan_of("linear(32,32):a linear(32,32):b");
  const Plan one = plan_of("gelu bias linear(32,32):b", DType::f32, 32);
  EXPECT_EQ(codes(two, "a.weight", 5), codes(two, "a.weight", 5));
  EXPECT_NE(codes(two, "a.weight", 5), codes(two, "a.weight", 6));
  EXPECT_NE(codes(two, "a.weight", 5), codes(two, "b.weight", 5));
  EXPECT_EQ(codes(two, "b.weight", 5), codes(one, "b.weight", 5));
}

TEST(Initial, OnlyParametersStartAsSomething) {
  const Plan p = plan_of("linear(4,4)");
  float memory[16] = {};
  try {
    p.initialise(number(p, "x"), 1, memory);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "plan: 'x' is no parameter; only those start as something");
  }
  EXPECT_THROW(p.initialise(p.buffers().size(), 1, memory), Error);
  try {
    p.initialise(number(p, "linear0.weight"), 1, nullptr);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "plan: no address for 'linear0.weight', which is to start as something");
  }
}

}  // namespace
}  // namespace tenon::test
