// What `tenon bench` times: every activation, the mixes of bytes, and that each case has a kernel.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "backend/cuda/nvrtc.h"
#include "bench/cases.h"
#include "bench/ceiling.h"
#include "bench/cubin.h"
#include "bench/statistics.h"
#include "tenon/activation.h"

namespace tenon::bench {
namespace {

constexpr Shape kShape{256, 512};
constexpr Options kCuda{.device = Device::cuda};

std::vector<BenchCall> calls_of(const BenchCase& c) {
  BenchMemory nowhere;
  return bench_calls(c, kShape, DType::bf16, kCuda, nowhere);
}

std::map<std::string, BenchCase> by_name(bool all) {
  std::map<std::string, BenchCase> cases;
  for (const BenchCase& c : bench_cases(DType::bf16, all))
    EXPECT_TRUE(cases.emplace(c.name(), c).second) << c.name() << " is there twice";
  return cases;
}

TEST(BenchCases, HaveEveryActivation) {
  define("bench_probe", "x * 0.375");
  const auto some = by_name(false);
  const auto all = by_name(true);
  for (const std::string& name : activation_names())
    for (const char* direction : {"", ".bwd"}) {
      EXPECT_TRUE(some.contains(name + direction + " bf16")) << name;
      EXPECT_TRUE(all.contains(name + direction + " bf16 -> e4m3 mxfp8 rowcol")) << name;
    }
  EXPECT_TRUE(some.contains("gated(bench_probe).bwd bf16"));
  EXPECT_TRUE(some.contains("swiglu bf16"));
  EXPECT_FALSE(some.contains("gated(silu) bf16"));  // it is swiglu
}

// The table of the mixes, written down once more: bytes read : written rowwise + columnwise.
TEST(BenchCases, MoveTheBytesOfTheirMix) {
  const std::map<std::string, std::vector<std::string>> expected{
      {"gelu bf16", {"2:2"}},
      {"gelu.bwd bf16", {"4:2"}},
      {"swiglu bf16", {"4:2"}},
      {"swiglu.bwd bf16", {"6:4"}},
      {"dropout bf16", {"2:2"}},
      {"bias_dropout_add bf16", {"4:2"}},
      {"rmsnorm bf16", {"2:2"}},
      {"layernorm.bwd bf16", {"4:2"}},
      {"quantize bf16 -> e4m3 delayed row", {"2:1"}},
      {"gelu.bwd bf16 -> e5m2 delayed row +dbias", {"4:1"}},
      {"swiglu bf16 -> e4m3 block1x128 row", {"4:1"}},
      {"swiglu.bwd bf16 -> e4m3 mxfp8 row", {"6:2"}},
      {"gelu bf16 -> e4m3 delayed rowcol", {"2:1+1"}},
      {"gelu.bwd bf16 -> e4m3 block128x128 rowcol +dbias", {"4:1+1"}},
      {"swiglu.bwd bf16 -> e4m3 block1x128 rowcol +dbias", {"6:2+2"}},
      {"swiglu.bwd bf16 -> e5m2 delayed rowcol", {"6:2+2"}},
      {"gelu bf16 -> e4m3 current row", {"2:0", "2:1"}},
      {"swiglu bf16 -> e4m3 current rowcol", {"4:0", "4:1+1"}},
      {"gelu bf16 -> e4m3 current row amax-pass", {"2:0"}},
      {"quantize bf16 -> e4m3 current rowcol encode-pass", {"2:1+1"}},
  };
  const auto cases = by_name(false);
  for (const auto& [name, mixes] : expected) {
    ASSERT_TRUE(cases.contains(name)) << name;
    std::vector<std::string> found;
    for (const BenchCall& c : calls_of(cases.at(name))) found.push_back(mix_of(c.step).name());
    EXPECT_EQ(found, mixes) << name;
  }
}

// Scales, rows and columns come on top of a mix; with blocks of 32 they are few.
TEST(BenchCases, HaveKernelsAndCeilings) {
  constexpr int64_t kElements = kShape.rows * kShape.cols;
  const std::vector<BenchCase> cases = bench_cases(DType::bf16, true);
  ASSERT_GT(cases.size(), 500U);
  for (const BenchCase& c : cases) {
    const std::vector<BenchCall> calls = calls_of(c);
    const bool encodes = c.op != "dequantize" && info(c.out.scaling).reads_amax();
    ASSERT_EQ(calls.size(), encodes && !c.pass ? 2U : 1U) << c.name();
    for (const BenchCall& call : calls) {
      EXPECT_TRUE(call.kernel && !call.maker.empty()) << c.name();
      const Mix mix = mix_of(call.step);
      const auto bytes = static_cast<double>(call.step.bytes(call.rows));
      EXPECT_GE(bytes, static_cast<double>(mix.bytes() * kElements)) << c.name();
      EXPECT_LT(bytes, static_cast<double>(mix.bytes() * kElements) * 1.04) << c.name();
      const Ceiling ceiling = ceiling_of(mix);
      EXPECT_EQ(ceiling.read_width * ceiling.reads + ceiling.width * ceiling.writes, mix.bytes())
          << mix.name();
      EXPECT_FALSE(ceiling.ways.empty()) << mix.name();
    }
  }
}

// Sets lie one behind the other: a call must stay in the bytes that it said it takes.
TEST(BenchCases, StayInTheirMemory) {
  for (const BenchCase& c : bench_cases(DType::bf16, false)) {
    BenchMemory nowhere;
    (void)bench_calls(c, {130, 96}, DType::bf16, kCuda, nowhere);
    std::vector<char> in(nowhere.in_bytes() + 256), out(nowhere.out_bytes() + 256);
    std::vector<char> numbers(nowhere.number_bytes() + 256), random(64);
    const auto aligned = [](std::vector<char>& v) {
      return v.data() + (256 - reinterpret_cast<uintptr_t>(v.data()) % 256) % 256;
    };
    BenchMemory memory({aligned(in), aligned(numbers), aligned(out), random.data()});
    const auto calls = bench_calls(c, {130, 96}, DType::bf16, kCuda, memory);
    EXPECT_EQ(memory.in_bytes(), nowhere.in_bytes()) << c.name();
    EXPECT_EQ(memory.out_bytes(), nowhere.out_bytes()) << c.name();
    for (const View& v : memory.outputs()) {
      const char* const first = static_cast<const char*>(v.data);
      EXPECT_GE(first, aligned(out)) << c.name();
      EXPECT_LE(first + ((v.rows - 1) * v.stride + v.cols) * info(v.dtype).bytes,
                aligned(out) + memory.out_bytes())
          << c.name();
    }
  }
}

TEST(BenchCases, AreFilteredByWords) {
  const std::vector<BenchCase> all = bench_cases(DType::bf16, false);
  EXPECT_EQ(filtered(all, {}).size(), all.size());
  for (const BenchCase& c : filtered(all, {"gelu rowcol"})) {
    EXPECT_EQ(c.op, "gelu");  // a whole word where there is one
    EXPECT_TRUE(c.columnwise);
  }
  std::set<std::string> ops;
  for (const BenchCase& c : filtered(all, {"swi fwd", "layernorm bwd"})) ops.insert(c.op);
  EXPECT_EQ(ops, (std::set<std::string>{"swiglu", "clamped_swiglu", "hardswish", "gated(hardswish)",
                                        "layernorm"}));
  EXPECT_TRUE(filtered(all, {"no_such_thing"}).empty());
}

TEST(BenchStatistics, IntervalsCoverTheMedian) {
  EXPECT_EQ(estimate({}).median, 0);
  const Estimate one = estimate({3});
  EXPECT_EQ(one.low, 3);
  EXPECT_EQ(one.high, 3);
  EXPECT_EQ(estimate({4, 1, 2, 3}).median, 2.5);
  std::mt19937 random(1);
  std::normal_distribution<double> normal(7, 1);
  constexpr int kTimes = 4000;
  for (const size_t rounds : {11, 15, 30}) {
    int covered = 0;
    for (int i = 0; i < kTimes; ++i) {
      std::vector<double> values(rounds);
      for (double& v : values) v = normal(random);
      const Estimate e = estimate(values);
      EXPECT_LE(e.low, e.median);
      EXPECT_GE(e.high, e.median);
      covered += e.low <= 7 && 7 <= e.high ? 1 : 0;
    }
    EXPECT_GT(covered, kTimes * 94 / 100) << rounds;
    EXPECT_LT(covered, kTimes) << rounds;
  }
}

TEST(BenchCubin, ReadsRegistersAndLocalMemory) {
  if (const auto why = cuda::why_no_nvrtc())
    FAIL() << *why << "\nrun ./dev test, which installs it";
  const std::string image = cuda::compile(R"(
extern "C" __global__ void flat(float* x) { x[threadIdx.x] = 1; }
extern "C" __global__ void local(float* x, const int* at, int n) {
  float held[100];
  for (int i = 0; i < n; ++i) held[at[i]] = x[i];
  for (int i = 0; i < n; ++i) x[i] = held[at[n + i]];
}
)",
                                          "sm_90a")
                                .image;
  const auto uses = kernel_uses(image);
  ASSERT_EQ(uses.size(), 2U);
  EXPECT_GT(uses.at("flat").registers, 0);
  EXPECT_LE(uses.at("flat").registers, 255);
  EXPECT_EQ(uses.at("flat").local_bytes, 0);
  EXPECT_GE(uses.at("local").local_bytes, 400);
  EXPECT_TRUE(kernel_uses("no machine code").empty());
  for (size_t length = 0; length < image.size(); length += 97)
    (void)kernel_uses(image.substr(0, length));  // reads nothing behind the end
}

}  // namespace
}  // namespace tenon::bench
