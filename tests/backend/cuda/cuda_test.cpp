// Tests of CUDA kernel texts: NVRTC compiles them without a GPU. Calls that cannot run report why.
#include <cstdlib>
#include <cstring>

#include "backend/cuda/driver.h"
#include "backend/cuda/eight.h"
#include "backend/cuda/map.h"
#include "backend/cuda/native.h"
#include "backend/cuda/nvrtc.h"
#include "backend/cuda/skeletons.h"
#include "backend/cuda/tile.h"
#include "backend/cuda/vector.h"
#include "lazy/builder.h"
#include "lower/single_activation.h"
#include "runtime/execute.h"
#include "support/cuda_emulator.h"
#include "support/support.h"
#include "support/verify.h"

namespace tenon::test {
namespace {

// `./dev test` installs NVRTC, so without it the test fails instead of being skipped.
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
  if (!chosen()) return;
  const std::string source = cuda::MapProgram(step).text();
  try {
    const cuda::Compiled code = cuda::compile(source, arch);
    EXPECT_GT(code.image.size(), 100U) << step.describe();
    EXPECT_EQ(code.is_ptx || code.image.starts_with("\x7f"
                                                    "ELF"),
              true)
        << step.describe();
    EXPECT_NE(code.image.find("tenon_map_kernel"), std::string::npos) << step.describe();
  } catch (const Error& e) {
    ADD_FAILURE() << step.describe() << " for " << arch << ": " << e.what();
  }
}

// A call of an activation. Dtypes, layout, bias and precision rotate with `turn`.
Step step_of(const std::string& act, bool backward, size_t turn, Precision precision) {
  const auto dtype = [&](size_t i) { return kPlain[(turn + i) % 3]; };
  const Activation f = activation(act);
  ActivationForm form;
  form.backward = backward;
  form.cols = 64;
  form.precision = precision;
  form.rounding = turn % 4 == 1 ? Rounding::eager : Rounding::once;
  form.x = dtype(0);
  form.y = dtype(1);
  if (backward) form.grad = dtype(2);
  if (f.inputs == 2) {
    const Gate gate = kGates[turn % std::size(kGates)];
    form.layout = layout_of(gate);
    form.separate = gate == Gate::separate;
    if (form.separate) form.b = dtype(2);
    if (form.separate && backward) form.db = dtype(0);
  }
  if (turn % 2) form.bias = dtype(turn);
  if (f.scaled) form.scale = dtype(1);
  return activation_step(f, form);
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
  // Constants that are hard to print exactly.
  all = all + max(x, -kInf) + max(y, 0x1p-149F) + max(z, -0.0F) + max(s, kNan);
  build.store({Store::To::tile, 0, DType::bf16, {1, 1, 32}}, all);
  const Step step = build.finish();
  expect_compiles(step, "sm_80");
  expect_compiles(step, "sm_90a");
}

TEST(Cuda, TheTextDependsOnNoSize) {
  const Activation f = activation("swiglu");
  ActivationForm form;
  form.y = DType::f32;
  form.cols = 64;
  const std::string text = cuda::MapProgram(activation_step(f, form)).text();
  form.cols = 1000;
  EXPECT_EQ(text, cuda::MapProgram(activation_step(f, form)).text());
  form.layout = Layout::interleaved(8);
  EXPECT_EQ(text, cuda::MapProgram(activation_step(f, form)).text());
  form.x = DType::bf16;
  EXPECT_NE(text, cuda::MapProgram(activation_step(f, form)).text());
}

TEST(Cuda, BrokenTextAndUnknownArchitecturesAreErrors) {
  if (!have_nvrtc()) return;
  expect_error([] { cuda::compile("no such thing;", "sm_90a"); }, Code::runtime,
               {"nvrtc", "sm_90a", "error"});
  expect_error([] { cuda::compile("", "gfx90a"); }, Code::invalid_argument, {"gfx90a", "sm_90a"});
  expect_error([] { cuda::compile("", "sm_20"); }, Code::unsupported, {"sm_20", "sm_80", "cpu"});
  // A future architecture uses PTX.
  EXPECT_TRUE(cuda::compile("extern \"C\" __global__ void f() {}", "sm_990").is_ptx);
}

TEST(Cuda, SumsAreRefusedWithTheReason) {
  using To = Store::To;
  for (const To to : {To::column_sum, To::row_sum, To::sum, To::amax}) {
    StepBuilder build("refused", 8, Precision::native);
    const Expr x = build.load({Load::From::tile, 0, DType::f32, {}});
    build.store({To::tile, 0, DType::f32, {}}, x);
    build.store({to, 1, DType::f32, {}}, x);
    const Attempt attempt = cuda::make_map(build.finish(), named_target("sm_90a"));
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
  const Attempt first = cuda::make_map(quantised.finish(), named_target("sm_90a"));
  ASSERT_TRUE(std::holds_alternative<Refusal>(first));
  EXPECT_NE(std::get<Refusal>(first).why.find("e4m3"), std::string::npos);

  StepBuilder many("many", 8, Precision::native);
  Expr sum = many.load({Load::From::tile, 0, DType::f32, {}});
  for (uint32_t i = 1; i < 200; ++i) sum = sum + many.load({Load::From::tile, i, DType::f32, {}});
  many.store({Store::To::tile, 0, DType::f32, {}}, sum);
  const Attempt second = cuda::make_map(many.finish(), named_target("sm_90a"));
  ASSERT_TRUE(std::holds_alternative<Refusal>(second));
  EXPECT_NE(std::get<Refusal>(second).why.find("201"), std::string::npos);
}

// Steps that the flat map does not support use the plain kernels.
TEST(Cuda, EveryStepHasAKernel) {
  const Step sums = [] {
    StepBuilder build("sums", 8, Precision::native);
    const Expr x = build.load({Load::From::tile, 0, DType::f32, {}});
    build.store({Store::To::row_sum, 1, DType::f32, {}}, x);
    return build.finish();
  }();
  EXPECT_EQ(kernel_for(sums, Device::cuda).maker, "plain");
}

// Strict, in place: the GPU gives the bits of the CPU.
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

// A native call for every bf16 value, first with ordinary gradients and linear halves, then with
// special ones. The stored values are checked against float64.
struct NativeCall {
  std::string where;
  bool backward = false;
  std::vector<std::unique_ptr<Mat>> memory;
  std::shared_ptr<Step> step;
  std::vector<View> in, out;
  std::vector<float> parameters;

  [[nodiscard]] RunArgs args() const {
    return {.rows = in[0].rows, .in = in, .out = out, .parameters = parameters};
  }
};

std::unique_ptr<NativeCall> native_call(const std::string& name, bool backward, DType result) {
  constexpr int64_t kRows = 128, kCols = 1024;
  constexpr uint32_t kCodes = 65536;
  constexpr float kOthers[] = {1, -2.5F, 0.003F, 100};
  const Activation f = activation(name);
  auto call = std::make_unique<NativeCall>();
  call->backward = backward;
  call->where = str(name, backward ? " backward " : " ", info(result).name);
  const auto made = [&](DType d, int64_t cols) -> Mat& {
    return *call->memory.emplace_back(std::make_unique<Mat>(d, kRows, cols));
  };
  Mat& x = made(DType::bf16, f.inputs * kCols);
  Mat& g = made(DType::bf16, kCols);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < kCols; ++c) {
      const auto code = static_cast<uint32_t>(r * kCols + c);
      const auto other = [&](uint32_t i) {
        return code < kCodes ? kOthers[i % 4] : kSpecials[i % std::size(kSpecials)];
      };
      x.set(r, c, decode(DType::bf16, code % kCodes));
      if (f.inputs == 2) x.set(r, kCols + c, other(code / 4));
      g.set(r, c, other(code));
    }
  const Mat& y = made(result, backward ? f.inputs * kCols : kCols);
  set_observer([&](const Step& s, const RunArgs& a, const Options&, const std::function<void()>&) {
    call->step = std::make_shared<Step>(s);
    call->in.assign(a.in.begin(), a.in.end());
    call->out.assign(a.out.begin(), a.out.end());
    call->parameters.assign(a.parameters.begin(), a.parameters.end());
  });
  if (backward)
    tenon::backward(f, {.grad = g.view(), .x = x.view(), .dx = y.view()}, {});
  else
    tenon::forward(f, {.x = x.view(), .y = y.view()}, {});
  set_observer({});
  return call;
}

void run_on_gpu(const NativeCall& call) {
  std::vector<std::unique_ptr<cuda::DeviceBuffer>> buffers;
  const auto uploaded = [&](std::vector<View> views) {
    for (View& v : views) {
      buffers.push_back(std::make_unique<cuda::DeviceBuffer>(
          static_cast<size_t>(v.rows * v.stride * info(v.dtype).bytes)));
      buffers.back()->from_host(v.data);
      v.data = buffers.back()->data();
    }
    return views;
  };
  const std::vector<View> in = uploaded(call.in);
  const size_t first = buffers.size();
  const std::vector<View> out = uploaded(call.out);
  RunArgs args = call.args();
  args.in = in;
  args.out = out;
  kernel_for(*call.step, Device::cuda).kernel->run(args);
  for (size_t i = 0; i < call.out.size(); ++i) buffers[first + i]->to_host(call.out[i].data);
}

// Infinite values have no bound, so strict precision defines which must stay infinite. Finite
// values may overflow if native formulas have other products.
void expect_infinities(const NativeCall& call) {
  const View &out = call.out[0], x = call.memory[0]->view(), g = call.memory[1]->view();
  const auto infinite = [&](int64_t i) {
    const int64_t row = i / out.cols, column = i % out.cols % g.cols;
    const auto at = [row](const View& v, int64_t c) {
      return std::isinf(decode(v.dtype, static_cast<const uint16_t*>(v.data)[row * v.stride + c]));
    };
    return call.backward ? at(g, column) : at(x, column) || at(x, x.cols - g.cols + column);
  };
  const auto values = [&] {
    std::vector<float> all;
    for (int64_t r = 0; r < out.rows; ++r)
      for (int64_t c = 0; c < out.cols; ++c)
        all.push_back(
            decode(out.dtype, static_cast<const uint16_t*>(out.data)[r * out.stride + c]));
    return all;
  };
  const std::vector<float> native = values();
  Step strict = *call.step;
  strict.precision = Precision::strict;
  kernel_for(strict, Device::cpu).kernel->run(call.args());
  const std::vector<float> expected = values();
  for (size_t i = 0; i < native.size(); ++i)
    if (std::isinf(expected[i]) && infinite(static_cast<int64_t>(i))) {
      ASSERT_EQ(native[i], expected[i]) << call.where << ", element " << i;
    }
}

// On a GPU with its approximations, else with exact functions instead. This finds errors in the
// formulas.
TEST(Cuda, NativeActivationsKeepTheirBoundForEveryNumber) {
  std::vector<std::unique_ptr<NativeCall>> calls;
  std::vector<std::string> names = activation_names();
  // For these formulas, zeros in place of the value hidden by a select would be wrong.
  for (const char* name : {"select(x < -1, 0, tanh(x))", "select(x < -1, 0, exp(min(x, 3)))",
                           "select(x < 1, 0, exp(min(x, 3)))", "max(x, -2)*sigmoid(x)"})
    names.emplace_back(name);
  // Quotients with and without conversion to products, guards with and without merging, slopes of
  // products with their own sigmoid, and values of parameters that the host computes.
  for (const char* name :
       {"x/3", "max(x, -1)/7", "max(x, -1)*clamp(x, -1, 5)/10", "(x/6)*(x/6)", "abs(x/6) + x/6",
        "x*(clamp(x, -4, 1) + 4)/6", "clamp(x, -p, p); p = 0.3", "clamp(x, -p, p); p = -2",
        "clamp(x, p, q); p = 1; q = -1", "x*sigmoid(c*x); c = 300", "x*sigmoid(c*x); c = 0.001",
        "x*sigmoid(c*x); c = -1.5", "p*x*sigmoid(x/(p + 1)); p = 3",
        "exp(min(p*x, 3))*(p - 1/p); p = 0.7", "clamped_swiglu(limit = 0.3, alpha = 40)",
        "clamped_swiglu(limit = 1e30, alpha = 1e-30, offset = -1)",
        "clamped_swiglu(limit = 3e38, alpha = 1e10)",
        // Slopes with other factors, signs and bounds.
        "max(x, -3)*sigmoid(2*(2*max(x, -3)))", "max(x, -3)*sigmoid(-2*max(x, -3))",
        "max(x, -1e38)*sigmoid(100*max(x, -1e38))", "max(x, -3)*sigmoid(1.7*max(x, -3))",
        "max(x, -128/p)*sigmoid(p*max(x, -128/p)); p = 1.5",
        "max(b, -9)*sigmoid(max(b, -9))*a*p; p = 1e-30",
        // Slopes between two bounds, alone and with others.
        "max(min(x, 5), -9)*sigmoid(max(min(x, 5), -9))",
        "max(min(x, 5), 1)*sigmoid(max(min(x, 5), 1))",
        "max(min(x, -5), -1)*sigmoid(max(min(x, -5), -1))",
        "max(min(x, p), -9/q)*sigmoid(q*max(min(x, p), -9/q)); p = 2; q = 1.5",
        "max(min(b, p), -9)*sigmoid(max(min(b, p), -9))*a; p = 3e38",
        // Almost slopes: squares of the sigmoid, sums, and other limits.
        "silu(x)*sigmoid(min(max(x, -128), 128))", "silu(x)*silu(x)",
        "max(x, -30)*sigmoid(min(max(x, -30), 30)) + sigmoid(min(max(x, -30), 30))*max(x, -30)",
        "sigmoid(min(max(x, -30), 30))*(max(x, -30) + max(x, -30))",
        "select(x > 20, 1, 0.1*x) + select(x > 20, 0, 1/(1 + exp(min(x, 20)))*exp(min(x, 20)))",
        "select(x > 20, 1, 0) + select(x > 20, 5, 1/(1 + exp(min(x, 20)))*exp(min(x, 20)))",
        "tanh(softplus(x))", "tanh(log1p(exp(x)))",
        "max(x, -2e11)*erfc(-1e-10*min(max(x, -2e11), 2e11))",
        "max(x, -1e14)*erfc(-0.7*min(max(x, -1e14), 1e14))",
        "max(x, -20)*erfc(-300*min(max(x, -20), 20))",
        // The sigmoid keeps a product finite.
        "a*1e38*max(b, -90)*sigmoid(3*max(b, -90))",
        "a*1e38*max(min(b, 5), -90)*sigmoid(3*max(min(b, 5), -90))",
        // The error budget of the function between two quotients is used once.
        "max(x/0.814954937, -5)*(x/0.81638509)/9 - 0.440996915",
        "max(x/1.50831211, -5)*(x/3.03507614)/9 - 0.054610882"})
    names.emplace_back(name);
  for (const std::string& name : names)
    for (const bool backward : {false, true})
      for (const DType d : {DType::bf16, DType::f16})
        if (chosen()) calls.push_back(native_call(name, backward, d));
  const bool gpu = !cuda::why_no_gpu();
  Emulator emulator(cuda::vector_skeletons());
  std::vector<std::unique_ptr<cuda::VectorProgram>> programs;
  for (const auto& call : calls) {
    ASSERT_EQ(cuda::VectorProgram::refusal(*call->step), "") << call->where;
    programs.push_back(std::make_unique<cuda::VectorProgram>(*call->step));
    ASSERT_TRUE(programs.back()->fits(call->args())) << call->where;
    emulator.add(programs.back()->text());
  }
  if (!gpu) emulator.compile();
  for (size_t i = 0; i < calls.size(); ++i) {
    if (gpu)
      run_on_gpu(*calls[i]);
    else
      for (const cuda::Launch& l : programs[i]->launches(calls[i]->args()))
        emulator.run(i, programs[i]->entries()[l.entry], l.blocks, l.down, l.threads,
                     l.arguments.data());
    const auto wrong = verify(*calls[i]->step, calls[i]->args());
    EXPECT_FALSE(wrong.has_value()) << calls[i]->where << ": " << *wrong;
    expect_infinities(*calls[i]);
  }
}

// Parameter values that overflow or have unexpected signs use another kernel.
TEST(Cuda, ParametersThatDoNotSuitTheLinesGoToAnotherKernel) {
  using Case = std::pair<const char*, bool>;
  for (const auto& [name, backward] :
       {Case{"clamped_swiglu(alpha = 2.4e38)", true}, Case{"x*sigmoid(p*x); p = 3e38", false},
        Case{"max(x, -128/p)*sigmoid(p*max(x, -128/p)); p = -1e10", true},
        Case{"max(min(x, p), -9/q)*sigmoid(q*max(min(x, p), -9/q)); p = -9; q = 2", true}}) {
    const auto call = native_call(name, backward, DType::bf16);
    EXPECT_FALSE(cuda::VectorProgram(*call->step).fits(call->args())) << name;
    // The formulas of that kernel, one element at a time.
    const std::string lines =
        cuda::native_lines(*call->step->graph, call->step->roots(), call->step->native_error());
    EXPECT_EQ(lines.find("in[" + std::to_string(call->step->loads.size())), std::string::npos);
  }
}

// Squares of squares have exponentially many factors.
TEST(Cuda, DeepProductsAreLoweredAtOnce) {
  Graph graph;
  Expr e = graph.load(0);
  for (int i = 0; i < 60; ++i) e = e * e;
  const uint32_t root = graph.id(1.0F + e / (e + 2.0F));
  EXPECT_NE(cuda::native_lines(graph, std::span(&root, 1), 0x1p-12), "");
}

// One block processes everything, with contiguous rows and with padded rows.
TEST(Cuda, AWalkSeesEveryVector) {
  StepBuilder build("amax", 24, Precision::native);
  build.store({Store::To::amax, 0, DType::f32, {}},
              build.load({Load::From::tile, 0, DType::bf16, {}}));
  Step step = build.finish();
  step.stores[0].join = true;
  const cuda::VectorProgram program(step);
  Emulator emulator(cuda::vector_skeletons());
  emulator.add(program.text());
  emulator.compile();
  constexpr int64_t kRows = 1500;  // 4500 vectors
  for (const int64_t stride : {24, 32}) {
    std::vector<uint16_t> x(kRows * stride, encode_ref(DType::bf16, -1));
    const View in{x.data(), DType::bf16, kRows, 24, stride};
    for (int64_t i = 0; i < kRows * 24; i += 361) {
      uint16_t& most = x[static_cast<size_t>(i / 24 * stride + i % 24)];
      most = static_cast<uint16_t>(encode_ref(DType::bf16, -3));
      float amax = 0;
      const View out = matrix(&amax, DType::f32, 1, 1);
      const RunArgs args{
          .rows = kRows, .in = std::span(&in, 1), .out = std::span(&out, 1), .parameters = {}};
      ASSERT_TRUE(program.fits(args));
      for (const cuda::Launch& l : program.launches(args)) {
        ASSERT_GT(l.per_multiprocessor, 0U);
        emulator.run(0, program.entries()[l.entry], 1, 1, l.threads, l.arguments.data());
      }
      EXPECT_EQ(amax, 3) << "element " << i << ", stride " << stride;
      most = static_cast<uint16_t>(encode_ref(DType::bf16, -1));
    }
  }
}

// A launch has at most 65535 rows of blocks. The next launch continues after them, and the last one
// includes the rows after the tiles.
TEST(Tiles, MayBeMoreThanOneLaunchHas) {
  constexpr int64_t kTiles = 70000, kBehind = 128, kRows = 16;
  TenonTileHead head;
  head.rows = head.whole = kTiles * kRows;
  head.last = (kTiles - 1) * kRows;
  const std::vector<cuda::Launch> all =
      cuda::launches_of_tiles(0, 3, kTiles + kBehind, kRows, 128, head, {}, {});
  ASSERT_EQ(all.size(), 2U);
  int64_t above = kTiles;  // tiles not yet launched
  for (const cuda::Launch& l : all) {
    TenonTileHead own;
    std::memcpy(&own, l.arguments.data(), sizeof own);
    EXPECT_EQ(own.last, (above - 1) * kRows);
    EXPECT_EQ(l.blocks, 3U);
    EXPECT_LE(l.down, 65535U);
    EXPECT_GT(above, 0);
    above -= l.down;
  }
  EXPECT_EQ(above, -kBehind);
}

// With a GPU a call runs. Without one it reports why and writes nothing.
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
