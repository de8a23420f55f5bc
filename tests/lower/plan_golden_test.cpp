// Golden plan texts of all fusions, and properties of the plan of a gated MLP.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "lower/data.h"
#include "support/golden_plans.h"
#include "support/plan_support.h"
#include "support/support.h"
#include "tenon/plan.h"

namespace tenon::test {
namespace {

// TENON_UPDATE_GOLDEN=1 writes the files again. Review the diff.
const std::string kFolder = TENON_GOLDEN_DIR "/plans";

// The null device supports every step, so its texts show the fusions. The texts of targets show the
// makers of the steps. No text depends on the machine.
constexpr const char* kTargets[] = {"", "avx512", "sm_90a", "sm_100a"};

class Plans : public testing::TestWithParam<std::tuple<Golden, const char*>> {};

TEST_P(Plans, AreAsInTheGoldenFile) {
  const auto& [g, target] = GetParam();
  const bool none = std::string_view(target).empty();
  PlanRequest request = request_of(g, none ? Device::null : Device::cpu);
  request.target = target;
  const std::string actual = Plan::build(g.chain, request).describe(256);
  const std::string folder = kFolder + (none ? "/" : str("_", target, "/"));
  const std::string path = folder + g.file + ".txt";
  if (std::getenv("TENON_UPDATE_GOLDEN")) {
    std::filesystem::create_directories(folder);
    std::ofstream(path) << actual;
  }
  std::ifstream file(path);
  ASSERT_TRUE(file) << path << " is missing; TENON_UPDATE_GOLDEN=1 writes it";
  std::stringstream expected;
  expected << file.rdbuf();
  EXPECT_EQ(expected.str(), actual) << "if this is meant, TENON_UPDATE_GOLDEN=1 writes " << path;
}

INSTANTIATE_TEST_SUITE_P(Fusions, Plans,
                         testing::Combine(testing::ValuesIn(kGoldenPlans),
                                          testing::ValuesIn(kTargets)));

// Memory between the two steps of a split is a normal buffer.
TEST(Targets, AreDescribedAndDoNotRun) {
  PlanRequest r;
  r.cols = 512;
  r.dtype = DType::bf16;
  r.backward = false;
  r.target = "sm_100a";
  const Plan p = Plan::build("linear(512,2048) bias gelu", r);
  ASSERT_EQ(data_of(p).forward.size(), 2U) << p.describe(256);
  const PlanStep& first = data_of(p).forward[0];
  EXPECT_EQ(first.step.head_name(), "gemm");
  EXPECT_EQ(data_of(p).forward[1].step.head_name(), "map");
  ASSERT_EQ(first.writes.size(), 1U);
  EXPECT_EQ(first.writes[0].operand.format.dtype, DType::bf16);
  EXPECT_EQ(data_of(p).forward[1].in.back().buffer, first.out.back().buffer);
  const std::vector<void*> memory(p.buffers().size(), nullptr);
  expect_error([&] { p.run(Pass::forward, 256, memory, nullptr); }, Code::invalid_argument,
               {"sm_100a", "without a target"});
  r.target = "sm_90a";
  const std::string text = Plan::build("linear(512,2048) bias gelu", r).describe(4096);
  EXPECT_NE(text.find("or     cublaslt below "), std::string::npos) << text;
  r.target = "sm_91";
  expect_error([&] { Plan::build("gelu", r); }, Code::invalid_argument, {"sm_91", "sm_90a"});
  r.target = "avx512";
  r.options.device = Device::cuda;
  expect_error([&] { Plan::build("gelu", r); }, Code::invalid_argument, {"avx512", "cuda"});
}

// The product of a step with a result in f32 stays in f32 between the two steps.
TEST(Targets, NoProductIsRoundedBeforeAResultInF32) {
  PlanRequest r;
  r.dtype = DType::bf16;
  r.target = "sm_100a";
  r.parameter_grads.assign(3, {.dtype = DType::f32});
  const Plan p = Plan::build("linear(64,64) bias gelu linear(64,64)", r);
  size_t seen = 0;
  for (const PlanStep& s : data_of(p).backward) {
    if (!s.step.name.ends_with("gelu+bias.bwd.product")) continue;
    ++seen;
    EXPECT_EQ(s.writes.at(0).operand.format.dtype, DType::f32) << p.describe(64);
  }
  EXPECT_EQ(seen, 1U) << p.describe(64);
}

// Equal steps share kernels, and each plan has names of its own.
TEST(Targets, StepsHaveTheNamesOfTheirOwnChain) {
  PlanRequest r;
  r.dtype = DType::bf16;
  r.backward = false;
  r.target = "sm_100a";
  Plan::build("linear(64,64) bias relu", r);
  const std::string text = Plan::build("linear(64,64) bias act(\"max(x,0)\")", r).describe(64);
  EXPECT_EQ(text.find("relu"), std::string::npos) << text;
}

size_t passes(const std::vector<PlanStep>& steps) {
  return static_cast<size_t>(
      std::ranges::count_if(steps, [](const auto& s) { return !s.weights; }));
}

// name=dtype of everything that the steps of a pass write. " | " separates steps.
std::string writes(const std::vector<PlanStep>& steps) {
  std::string text;
  for (const PlanStep& s : steps) {
    if (s.weights) continue;
    text += text.empty() ? "" : " |";
    for (const PlanStep::Write& w : s.writes)
      text += str(" ", w.name, "=", info(w.operand.format.dtype).name);
  }
  return text;
}

Plan mlp(const char* recipe_name, Device device = Device::cpu) {
  PlanRequest r;
  r.dtype = DType::bf16;
  r.recipe = recipe(recipe_name);
  r.options.device = device;
  return Plan::build("linear(512,2048) bias swiglu linear(1024,512)", r);
}

TEST(GatedMlp, HasThreePassesForwardAndFiveBackward) {
  for (const Device device : {Device::cpu, Device::null}) {
    const Plan p = mlp("delayed", device);
    const PlanData& d = data_of(p);
    EXPECT_EQ(passes(d.forward), 3U) << p.describe(256);
    EXPECT_EQ(passes(d.backward), 5U) << p.describe(256);
    // Quantise x; product, bias, SwiGLU with the pre-activation kept; product.
    EXPECT_EQ(writes(d.forward),
              " linear0.x=e4m3 linear0.x.amax=f32 | swiglu2.in=bf16 linear3.x=e4m3 "
              "linear3.x.amax=f32 | y=bf16");
    // Quantise dy; wgrad; dgrad, dSwiGLU, dbias, e5m2; wgrad; dgrad.
    EXPECT_EQ(writes(d.backward),
              " linear3.dy=e5m2 linear3.dy.amax=f32 | dlinear3.weight=bf16 | dbias1.bias=bf16 "
              "linear0.dy=e5m2 linear0.dy.amax=f32 | dlinear0.weight=bf16 | dx=bf16");
    const std::string_view map = "map", gemm = "gemm";
    std::vector<std::string_view> heads;
    for (const auto* steps : {&d.forward, &d.backward})
      for (const PlanStep& s : *steps)
        if (!s.weights) heads.push_back(s.step.head_name());
    EXPECT_EQ(heads, (std::vector<std::string_view>{map, gemm, gemm, map, gemm, gemm, gemm, gemm}));
  }
}

TEST(GatedMlp, WeightsAreQuantisedWhenTheyChanged) {
  for (const char* name : {"none", "delayed", "current", "mxfp8", "block"}) {
    const Plan plan = mlp(name);
    const PlanData& d = data_of(plan);
    std::map<std::string, size_t> by_weight;
    for (const PlanStep& s : d.forward)
      for (const PlanStep::Write& w : s.writes) {
        const bool weight = w.name.ends_with(".w");
        EXPECT_EQ(s.weights, weight || w.name.ends_with(".w.amax")) << name << " " << w.name;
        by_weight[w.name] += weight;
      }
    // The scales of mxfp8 differ between rows and columns. The backward pass encodes the columns.
    size_t again = 0;
    for (const PlanStep& s : d.backward)
      for (const PlanStep::Write& w : s.writes) {
        EXPECT_EQ(s.weights, w.name.ends_with(".w")) << name << " " << w.name;
        again += s.weights;
      }
    EXPECT_EQ(again, std::string_view(name) == "mxfp8" ? 2U : 0U) << name;
    const size_t quantised = std::string_view(name) == "none" ? 0 : 1;
    EXPECT_EQ(by_weight["linear0.w"], quantised) << name;
    EXPECT_EQ(by_weight["linear3.w"], quantised) << name;
  }
}

// The last backward pass may use the memory of saved tensors whose last reader has run.
TEST(Memory, OverwritingSavedTensorsChangesNoGradient) {
  size_t smaller = 0;
  for (const Golden& g : kGoldenPlans)
    for (const char* name : {"none", "delayed", "current", "mxfp8", "block"})
      for (const Keep keep : {Keep::input, Keep::fp8, Keep::recompute}) {
        constexpr int64_t kRows = 37;
        PlanRequest request = request_of(g, Device::cpu);
        request.recipe = recipe(name);
        request.keep = keep;
        Session s(g.chain, request, kRows);
        std::map<std::string, Numbers> given;
        fill(s, given);
        s.run(Pass::forward);
        s.run(Pass::backward);
        const auto before = s.gradients();
        s.run(Pass::backward, {.overwrite_saved = true});
        EXPECT_EQ(before, s.gradients()) << s.plan.describe(kRows);
        const int64_t all = s.plan.workspace_bytes(kRows, Pass::backward);
        const int64_t last =
            s.plan.workspace_bytes(kRows, Pass::backward, {.overwrite_saved = true});
        EXPECT_LE(last, all);
        EXPECT_LE(all, s.plan.workspace_bytes(kRows));
        smaller += last < all;
      }
  EXPECT_GT(smaller, 50U);
}

// The gradient of SwiGLU is written over the pre-activation, and the product before it over the
// input of the second linear.
TEST(Memory, TheLastBackwardOfAnMlpNeedsNoWorkspace) {
  PlanRequest r;
  r.dtype = DType::bf16;
  const Plan p = Plan::build("linear(512,2048) swiglu linear(1024,512)", r);
  EXPECT_GT(p.workspace_bytes(256, Pass::backward), 0) << p.describe(256);
  EXPECT_EQ(p.workspace_bytes(256, Pass::backward, {.overwrite_saved = true}), 0)
      << p.describe(256);
}

// A column sum that needs a second step would have a buffer of partial sums between two steps.
TEST(GatedMlp, ColumnSumsAreFinishedInTheirStep) {
  for (const Device device : {Device::cpu, Device::null}) {
    const Plan p = mlp("delayed", device);
    size_t sums = 0;
    for (const PlanStep& s : data_of(p).backward)
      for (const Store& store : s.step.stores) {
        if (store.to != Store::To::column_sum) continue;
        ++sums;
        const Buffer& b = p.buffers()[static_cast<size_t>(s.out[store.arg].buffer)];
        EXPECT_EQ(b.name, "dbias1.bias");
        EXPECT_EQ(b.role, Role::grad);
      }
    EXPECT_EQ(sums, 2U) << "one of each half";
  }
}

TEST(GatedMlp, OnlyBlocksThatDifferAreStoredBothWays) {
  for (const char* name : {"none", "delayed", "current", "mxfp8", "block"}) {
    const bool differ = std::string_view(name) == "mxfp8" || std::string_view(name) == "block";
    size_t columnwise = 0;
    const Plan p = mlp(name);
    for (const auto* steps : {&data_of(p).forward, &data_of(p).backward})
      for (const PlanStep& s : *steps)
        for (const PlanStep::Write& w : s.writes) columnwise += w.operand.columnwise;
    EXPECT_EQ(columnwise > 0, differ) << name << "\n" << p.describe(256);
  }
}

TEST(Fused, BiasDropoutAddIsOnePass) {
  PlanRequest r;
  r.cols = 96;
  r.dtype = DType::bf16;
  const Plan p = Plan::build("bias dropout(0.1) add", r);
  EXPECT_EQ(passes(data_of(p).forward), 1U);
  EXPECT_EQ(passes(data_of(p).backward), 1U);
  // Backward also returns the gradient of the extra input.
  EXPECT_EQ(writes(data_of(p).backward), " dbias0.bias=bf16 dx=bf16");
}

}  // namespace
}  // namespace tenon::test
