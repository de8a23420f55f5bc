// CUDA kernels as text: NVRTC compiles them without a GPU, and what cannot run says why.
#include <cstdlib>
#include <cstring>

#include "backend/cuda/driver.h"
#include "backend/cuda/map.h"
#include "backend/cuda/nvrtc.h"
#include "ops/activation.h"
#include "ops/builder.h"
#include "plan/execute.h"
#include "support.h"

namespace tenon::test {
namespace {

// NVRTC is part of what `./dev test` installs, so its absence is a failure and not a skip.
bool have_nvrtc() {
  const auto why = cuda::why_no_nvrtc();
  if (!why) return true;
  const char* file = std::getenv("TENON_NVRTC");
  if (file != nullptr && *file != '\0')
    ADD_FAILURE() << "TENON_NVRTC = " << file << " cannot be used: " << *why;
  else
    ADD_FAILURE() << *why << "\nrun ./dev test, which installs it";
  return false;
}

void expect_compiles(const Step& step, const char* arch) {
  const std::string source = cuda::map_source(step);
  try {
    const cuda::Compiled code = cuda::compile(source, arch);
    EXPECT_GT(code.image.size(), 100U) << step.describe();
    EXPECT_EQ(code.is_ptx || code.image.starts_with("\x7f"
                                                    "ELF"),
              true)
        << step.describe();
    EXPECT_NE(code.image.find(cuda::kMapKernel), std::string::npos) << step.describe();
  } catch (const Error& e) {
    ADD_FAILURE() << step.describe() << " for " << arch << ": " << e.what();
  }
}

// A call of an activation; dtypes, layout, bias and precision rotate with `turn`.
Step step_of(const std::string& act, bool backward, size_t turn, Precision precision) {
  const auto dtype = [&](size_t i) { return kPlain[(turn + i) % 3]; };
  ActivationForm form;
  form.f = activation(act);
  form.backward = backward;
  form.cols = 64;
  form.precision = precision;
  form.rounding = turn % 4 == 1 ? Rounding::eager : Rounding::once;
  form.x = dtype(0);
  form.y = dtype(1);
  if (backward) form.grad = dtype(2);
  if (form.f.inputs == 2) {
    const Gate gate = kGates[turn % std::size(kGates)];
    form.layout = layout_of(gate);
    form.separate = gate == Gate::separate;
    if (form.separate) form.b = dtype(2);
    if (form.separate && backward) form.db = dtype(0);
  }
  if (turn % 2) form.bias = dtype(turn);
  if (form.f.scaled) form.scale = dtype(1);
  return activation_step(form);
}

TEST(Cuda, EveryActivationCompilesForAmpereAndHopper) {
  if (!have_nvrtc()) return;
  size_t turn = 0;
  for (const std::string& name : activation_names())
    for (const bool backward : {false, true}) {
      for (const char* arch : {"sm_80", "sm_90a"})
        expect_compiles(step_of(name, backward, turn, Precision::strict), arch);
      ++turn;
    }
}

TEST(Cuda, EveryThirdActivationCompilesNativeAndWrapped) {
  if (!have_nvrtc()) return;
  size_t turn = 1;
  const auto names = activation_names();
  for (size_t i = 0; i < names.size(); i += 3) {
    const bool unary = activation(names[i]).inputs == 1;
    expect_compiles(step_of(names[i], false, turn++, Precision::strict), "sm_80");
    expect_compiles(step_of(names[i], true, turn++, Precision::native), "sm_80");
    const std::string wrapped = unary ? "gated(" + names[i] + ")" : "scaled(" + names[i] + ")";
    expect_compiles(step_of(wrapped, i % 2 == 0, turn++, Precision::native), "sm_90a");
  }
}

TEST(Cuda, EveryWordLoadAndRoundingCompiles) {
  if (!have_nvrtc()) return;
  StepBuilder build("all words", 32, Precision::strict);
  const Expr x = build.load({Load::From::tile, 0, DType::f32, {8, 16, 8}});
  const Expr y = build.load({Load::From::row, 1, DType::f16, {}});
  const Expr z = build.load({Load::From::column, 2, DType::bf16, {}});
  const Expr s = build.load({Load::From::scalar, 3, DType::f32, {}});
  const Expr p = build.load({Load::From::parameter, 0, DType::f32, {}});
  Expr all = min(x, y) - max(z, s) / p;
  for (size_t w = index(Word::neg); w <= index(Word::erfc); ++w)
    all = all + apply_word(static_cast<Word>(w), x * (1.0F + static_cast<float>(w)));
  for (const DType d : {DType::f16, DType::bf16, DType::e4m3, DType::e5m2}) all = all + round(x, d);
  all = select(x < y, all, x) + select(x <= y, all, y) + select(x > y, all, z) +
        select(x >= y, z, all) + select(x == y, all, s) + select(x != y, p, all);
  // Constants that a careless printer loses.
  all = all + max(x, -kInf) + max(y, 0x1p-149F) + max(z, -0.0F) + max(s, kNan);
  build.store({Store::To::tile, 0, DType::bf16, {1, 1, 32}}, all);
  const Step step = build.finish();
  expect_compiles(step, "sm_80");
  expect_compiles(step, "sm_90a");
}

TEST(Cuda, TheTextDependsOnNoSize) {
  ActivationForm form;
  form.f = activation("swiglu");
  form.y = DType::f32;
  form.cols = 64;
  const std::string text = cuda::map_source(activation_step(form));
  form.cols = 1000;
  EXPECT_EQ(text, cuda::map_source(activation_step(form)));
  form.layout = Layout::interleaved(8);
  EXPECT_EQ(text, cuda::map_source(activation_step(form)));
  form.x = DType::bf16;
  EXPECT_NE(text, cuda::map_source(activation_step(form)));
}

TEST(Cuda, BrokenTextAndUnknownArchitecturesAreErrors) {
  if (!have_nvrtc()) return;
  expect_error([] { cuda::compile("no such thing;", "sm_90a"); }, Code::runtime,
               {"nvrtc", "sm_90a", "error"});
  expect_error([] { cuda::compile("", "gfx90a"); }, Code::invalid_argument, {"gfx90a", "sm_90a"});
  expect_error([] { cuda::compile("", "sm_20"); }, Code::unsupported, {"sm_20", "TENON_NVRTC"});
  // A future architecture gets PTX.
  EXPECT_TRUE(cuda::compile("extern \"C\" __global__ void f() {}", "sm_990").is_ptx);
}

TEST(Cuda, SumsAreRefusedWithTheReason) {
  using To = Store::To;
  for (const To to : {To::column_sum, To::row_sum, To::sum, To::amax}) {
    StepBuilder build("refused", 8, Precision::native);
    const Expr x = build.load({Load::From::tile, 0, DType::f32, {}});
    build.store({To::tile, 0, DType::f32, {}}, x);
    build.store({to, 1, DType::f32, {}}, x);
    const Attempt attempt = cuda::make_map(build.finish());
    ASSERT_TRUE(std::holds_alternative<Refusal>(attempt));
    EXPECT_NE(std::get<Refusal>(attempt).why.find(kStoreNames[static_cast<size_t>(to)]),
              std::string::npos)
        << std::get<Refusal>(attempt).why;
  }
}

TEST(Cuda, QuantisedAndTooManyAccessesAreRefused) {
  StepBuilder quantised("quantised", 8, Precision::native);
  quantised.store({Store::To::tile, 0, DType::e4m3, {}},
                  quantised.load({Load::From::tile, 0, DType::f32, {}}));
  const Attempt first = cuda::make_map(quantised.finish());
  ASSERT_TRUE(std::holds_alternative<Refusal>(first));
  EXPECT_NE(std::get<Refusal>(first).why.find("e4m3"), std::string::npos);

  StepBuilder many("many", 8, Precision::native);
  Expr sum = many.load({Load::From::tile, 0, DType::f32, {}});
  for (uint32_t i = 1; i < 200; ++i) sum = sum + many.load({Load::From::tile, i, DType::f32, {}});
  many.store({Store::To::tile, 0, DType::f32, {}}, sum);
  const Attempt second = cuda::make_map(many.finish());
  ASSERT_TRUE(std::holds_alternative<Refusal>(second));
  EXPECT_NE(std::get<Refusal>(second).why.find("201"), std::string::npos);
}

// What the flat map does not do, the plain kernels do.
TEST(Cuda, EveryStepHasAKernel) {
  const Step sums = [] {
    StepBuilder build("sums", 8, Precision::native);
    const Expr x = build.load({Load::From::tile, 0, DType::f32, {}});
    build.store({Store::To::row_sum, 1, DType::f32, {}}, x);
    return build.finish();
  }();
  EXPECT_EQ(kernel_for(sums, Device::cuda).maker, "plain");
}

// Strict, in place: the GPU's bits are the CPU's.
void expect_same_bits_in_place() {
  constexpr int64_t kRows = 37, kCols = 101;
  const Options strict{.precision = Precision::strict};
  std::vector<float> x(kRows * kCols);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) * 0.01F - 20;
  std::vector<float> expected(x.size()), actual(x.size());
  const View host = matrix(x.data(), DType::f32, kRows, kCols);
  forward(activation("gelu"), {.x = host, .y = matrix(expected.data(), DType::f32, kRows, kCols)},
          strict);
  cuda::DeviceBuffer buffer(x.size() * sizeof(float));
  buffer.from_host(x.data());
  const View device = matrix(buffer.data(), DType::f32, kRows, kCols);
  forward(activation("gelu"), {.x = device, .y = device},
          {.precision = Precision::strict, .device = Device::cuda});
  buffer.to_host(actual.data());
  EXPECT_EQ(std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)), 0);
}

// With a GPU a call runs; without one it says why and touches nothing.
TEST(Cuda, ACallRunsOrSaysWhyNot) {
  const View nothing = matrix(nullptr, DType::f32, 0, 8);
  forward(activation("gelu"), {.x = nothing, .y = nothing}, {.device = Device::cuda});
  const auto why = cuda::why_no_gpu();
  if (!why) return expect_same_bits_in_place();
  EXPECT_FALSE(why->empty());
  const Mat x = Mat(DType::f32, 4, 8).fill(1), y(DType::f32, 4, 8);
  expect_error(
      [&] {
        forward(activation("gelu"), {.x = x.view(), .y = y.view()}, {.device = Device::cuda});
      },
      Code::runtime, {"cuda", *why});
  EXPECT_TRUE(y.untouched());
}

}  // namespace
}  // namespace tenon::test
