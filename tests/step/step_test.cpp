// Tests of steps: key, text, bytes, precision, and which makers accept them.
#include "step/step.h"

#include <fstream>
#include <functional>
#include <set>

#include "choice/backends.h"
#include "lazy/builder.h"
#include "lower/single_activation.h"
#include "lower/single_dropout.h"
#include "lower/single_fuse.h"
#include "lower/single_norm.h"
#include "runtime/execute.h"
#include "support/support.h"

namespace tenon::test {
namespace {

using From = Load::From;
using To = Store::To;

// A small step with all properties that may differ.
struct Recipe {
  std::string name = "step";
  int64_t cols = 12;
  Precision precision = Precision::native;
  Load load = {From::tile, 0, DType::bf16, {}};
  Store store = {To::tile, 0, DType::bf16, {}, 0};
  std::function<Expr(Expr, Expr)> f = [](Expr x, Expr p) { return sigmoid(p * x) + 1.0F; };

  [[nodiscard]] Step make() const {
    StepBuilder build(name, cols, precision);
    const Expr x = build.load(load);
    const Expr p = build.load({From::parameter, 0, DType::f32, {}});
    build.store(store, f(x, p));
    return build.finish();
  }
};

TEST(Step, KeysDifferWhereKernelsDiffer) {
  std::vector<std::pair<const char*, std::function<void(Recipe&)>>> changes{
      {"nothing", [](Recipe&) {}},
      {"columns", [](Recipe& r) { r.cols = 13; }},
      {"precision", [](Recipe& r) { r.precision = Precision::strict; }},
      {"load's dtype", [](Recipe& r) { r.load.dtype = DType::f16; }},
      {"load's kind", [](Recipe& r) { r.load.from = From::row; }},
      {"load's column kind", [](Recipe& r) { r.load.from = From::column; }},
      {"load's argument", [](Recipe& r) { r.load.arg = 1; }},
      {"load's block",
       [](Recipe& r) {
         r.load.columns = {8, 16, 0};
       }},
      {"load's stride",
       [](Recipe& r) {
         r.load.columns = {8, 24, 0};
       }},
      {"load's offset",
       [](Recipe& r) {
         r.load.columns = {8, 16, 8};
       }},
      {"store's dtype", [](Recipe& r) { r.store.dtype = DType::f32; }},
      {"store's kind", [](Recipe& r) { r.store.to = To::column_sum; }},
      {"store's other kind", [](Recipe& r) { r.store.to = To::amax; }},
      {"store's argument", [](Recipe& r) { r.store.arg = 2; }},
      {"store's map",
       [](Recipe& r) {
         r.store.columns = {1, 1, 12};
       }},
      {"a word", [](Recipe& r) { r.f = [](Expr x, Expr p) { return tanh(p * x) + 1.0F; }; }},
      {"a constant", [](Recipe& r) { r.f = [](Expr x, Expr p) { return sigmoid(p * x) + 2.0F; }; }},
      {"a constant's sign",
       [](Recipe& r) { r.f = [](Expr x, Expr p) { return max(p * x, 0.0F); }; }},
      {"a constant's other sign",
       [](Recipe& r) { r.f = [](Expr x, Expr p) { return max(p * x, -0.0F); }; }},
      {"operands", [](Recipe& r) { r.f = [](Expr x, Expr p) { return x - p; }; }},
      {"operands' order", [](Recipe& r) { r.f = [](Expr x, Expr p) { return p - x; }; }},
      {"<", [](Recipe& r) { r.f = [](Expr x, Expr p) { return select(x < p, x, p); }; }},
      {"<=", [](Recipe& r) { r.f = [](Expr x, Expr p) { return select(x <= p, x, p); }; }},
      {"branches", [](Recipe& r) { r.f = [](Expr x, Expr p) { return select(x < p, p, x); }; }},
      {"round f16",
       [](Recipe& r) { r.f = [](Expr x, Expr p) { return round(x * p, DType::f16); }; }},
      {"round bf16",
       [](Recipe& r) { r.f = [](Expr x, Expr p) { return round(x * p, DType::bf16); }; }},
  };
  std::set<std::string> keys;
  for (const auto& [what, change] : changes) {
    Recipe recipe;
    change(recipe);
    const std::string key = recipe.make().key();
    EXPECT_TRUE(keys.insert(key).second) << what << " changes nothing in " << key;
    EXPECT_EQ(key, recipe.make().key()) << what;
  }
}

TEST(Step, KeysDifferWhereEncodersDiffer) {
  const std::vector<std::function<void(Operand&)>> changes{
      [](Operand&) {},
      [](Operand& o) { o.format.dtype = DType::e5m2; },
      [](Operand& o) { o.format.scaling = Scaling::block128x128; },
      [](Operand& o) { o.format.scaling = Scaling::mxfp8; },
      [](Operand& o) { o.format.scaling = Scaling::mxfp8, o.format.swizzled = true; },
      [](Operand& o) { o.format.eps = 1e-3F; },
      [](Operand& o) { o.format.eps = 2e-3F; },
      [](Operand& o) { o.format.power_of_two = false; },
      [](Operand& o) { o.columnwise = true; },
      [](Operand& o) { o.columnwise = true, o.rowwise = false; },
      [](Operand& o) { o.counts = true; },
  };
  std::set<std::string> keys;
  for (const auto& change : changes)
    for (const bool input : {false, true}) {
      Operand o;
      o.format = {.dtype = DType::e4m3, .scaling = Scaling::block1x128};
      change(o);
      if (input && (o.counts || (o.columnwise && o.rowwise))) continue;  // not readable
      StepBuilder build("encoders", 256, Precision::strict);
      const Expr x = input ? build.load(o, 0, {}) : build.load({From::tile, 0, DType::f32});
      const Piece piece{x, {}};
      if (input)
        build.store({To::tile, 0, DType::f32}, x);
      else
        build.store(o, 0, 9, 256, std::span(&piece, 1));
      EXPECT_TRUE(keys.insert(build.finish().key()).second) << keys.size();
    }
}

TEST(Step, LoadsThatNoStoreNeedsAreLeftOut) {
  StepBuilder build("unused", 8, Precision::strict);
  build.load({From::tile, 0, DType::f32});
  const Expr y = build.load({From::tile, 1, DType::bf16});
  build.load({From::row, 2, DType::f32});
  const Expr z = build.load({From::column, 3, DType::f16});
  build.store({To::tile, 0, DType::f32}, y * z);
  const Step step = build.finish();
  ASSERT_EQ(step.loads.size(), 2U);
  EXPECT_EQ(step.loads[0].arg, 1U);
  EXPECT_EQ(step.loads[1].arg, 3U);
  EXPECT_EQ(step.bytes(4), 32 * 2 + 4 * 2 + 32 * 4);
}

TEST(Step, KeysAreEqualWhereKernelsAreEqual) {
  Recipe other;
  other.name = "another name";
  EXPECT_EQ(Recipe().make().key(), other.make().key());

  // The same formula, with nodes created in another order, and with unused nodes.
  const auto build = [](bool reversed) {
    StepBuilder b("order", 5, Precision::strict);
    const Expr x = b.load({From::tile, 0, DType::f32, {}});
    const Expr y = b.load({From::tile, 1, DType::f32, {}});
    Expr left, right;
    if (reversed) {
      (void)(exp(y) / (x + 3.0F));
      right = tanh(y);
      left = sigmoid(x);
    } else {
      left = sigmoid(x);
      right = tanh(y);
    }
    b.store({To::tile, 0, DType::f32, {}}, left * right);
    return b.finish().key();
  };
  EXPECT_EQ(build(false), build(true));
}

ActivationForm form(bool backward) {
  ActivationForm f;
  f.backward = backward;
  f.cols = 96;
  f.x = DType::bf16;
  f.y = DType::bf16;
  if (backward) f.grad = DType::bf16;
  return f;
}

Step step_of(const char* act, const ActivationForm& form) {
  return activation_step(activation(act), form);
}

Operand operand(const Format& f, bool rowwise, bool columnwise) {
  Operand o;
  o.format = f;
  o.rowwise = rowwise;
  o.columnwise = columnwise;
  return o;
}

std::vector<Step> described() {
  std::vector<Step> steps;
  steps.push_back(step_of("gelu", form(false)));
  steps.push_back(step_of("gelu", form(true)));
  ActivationForm gated = form(true);
  gated.layout = Layout::interleaved(32);
  gated.bias = gated.dbias = DType::f32;
  gated.precision = Precision::strict;
  steps.push_back(step_of("swiglu", gated));
  ActivationForm swapped = form(false);
  swapped.layout = Layout::swapped();
  swapped.amax = DType::f32;
  steps.push_back(step_of("gated(elu)", swapped));
  ActivationForm separate = form(true);
  separate.separate = true;
  separate.b = separate.db = DType::f16;
  separate.scale = separate.dscale = DType::f16;
  separate.bias = separate.dbias = DType::f16;
  separate.rounding = Rounding::eager;
  steps.push_back(step_of("scaled(glu)", separate));
  FuseForm fuse{.name = "axpy",
                .f = [](std::span<const Expr> in) { return in[0] * in[1] + in[2] * in[3]; },
                .arguments = {{From::tile, DType::f16, DType::f16},
                              {From::row, DType::f32, DType::f32},
                              {From::column, DType::f32, DType::f32},
                              {From::scalar, DType::f32, DType::f32}},
                .grad = DType::f16,
                .cols = 7};
  steps.push_back(fuse_step(fuse));
  NormForm norm;
  norm.cols = 64;
  norm.x = norm.grad = DType::bf16;
  norm.y = DType::bf16;
  norm.gamma = norm.dgamma = DType::f32;
  norm.rstdev = true;
  steps.push_back(norm_step(norm));
  steps.push_back(norm_backward_step(norm));
  // Both encodings of a gated gradient, its bias gradient and its counts. Then the first pass of
  // `current`.
  ActivationForm mx = form(true);
  mx.y = operand({.dtype = DType::e5m2, .scaling = Scaling::mxfp8, .swizzled = true}, true, true);
  mx.y->counts = true;
  mx.dbias = DType::bf16;
  steps.push_back(step_of("swiglu", mx));
  ActivationForm current = form(false);
  current.y = operand({.dtype = DType::e4m3, .scaling = Scaling::current, .eps = 0.5F}, true, true);
  current.y_amax = current.amax_only = true;
  steps.push_back(step_of("gelu", current));
  current.y_amax = current.amax_only = false;
  steps.push_back(step_of("gelu", current));
  // A columnwise encoded input. A delayed output with its amax.
  ActivationForm delayed = form(false);
  delayed.x = operand({.dtype = DType::e4m3, .scaling = Scaling::block1x128}, false, true);
  delayed.y = operand({.dtype = DType::e4m3, .scaling = Scaling::delayed}, true, false);
  delayed.y_amax = true;
  steps.push_back(step_of("relu", delayed));
  steps.push_back(dropout_step({.cols = 64,
                                .x = DType::bf16,
                                .bias = DType::bf16,
                                .residual = DType::f32,
                                .y = DType::bf16}));
  steps.push_back(dropout_backward_step(
      {.cols = 64, .x = DType::bf16, .bias = DType::f16, .residual = {}, .y = DType::bf16}));
  return steps;
}

TEST(Step, DescribesItselfAsInTheGoldenFile) {
  std::ifstream file(TENON_GOLDEN_DIR "/steps.txt");
  ASSERT_TRUE(file) << "tests/golden/steps.txt is missing";
  std::string expected, actual, line;
  while (std::getline(file, line)) expected += line + "\n";
  for (const Step& s : described()) actual += s.describe() + "\n";
  EXPECT_EQ(expected, actual) << "if this is meant, tests/golden/steps.txt becomes:\n" << actual;
}

TEST(Step, CountsEachInputAndOutputOnce) {
  StepBuilder build("bytes", 10, Precision::native);
  const Expr x =
      build.load({From::tile, 0, DType::bf16, {}}) + build.load({From::row, 1, DType::f32, {}}) +
      build.load({From::column, 2, DType::f16, {}}) + build.load({From::scalar, 3, DType::f32, {}});
  build.store({To::tile, 0, DType::f16, {}}, x);
  build.store({To::column_sum, 1, DType::f32, {}}, x);
  build.store({To::row_sum, 2, DType::bf16, {}}, x);
  build.store({To::sum, 3, DType::f32, {}}, x);
  build.store({To::amax, 4, DType::f32, {}}, x);
  const Step step = build.finish();
  EXPECT_EQ(step.bytes(7), 70 * 2 + 10 * 4 + 7 * 2 + 4 + 70 * 2 + 10 * 4 + 7 * 2 + 4 + 4);
  EXPECT_EQ(step.bytes(0), 10 * 4 + 4 + 10 * 4 + 4 + 4);
}

TEST(Step, NativeIsStrictWhereF32IsKept) {
  const auto precision = [](std::initializer_list<std::pair<To, DType>> stores, Precision asked) {
    StepBuilder build("precision", 4, asked);
    const Expr x = build.load({From::tile, 0, DType::bf16, {}});
    for (const auto& [to, dtype] : stores) build.store({to, 0, dtype, {}}, exp(x));
    return build.finish().effective_precision();
  };
  constexpr auto kNative = Precision::native, kStrict = Precision::strict;
  EXPECT_EQ(precision({{To::tile, DType::bf16}}, kNative), kNative);
  EXPECT_EQ(precision({{To::tile, DType::f16}}, kNative), kNative);
  EXPECT_EQ(precision({{To::tile, DType::f32}}, kNative), kStrict);
  EXPECT_EQ(precision({{To::tile, DType::bf16}}, kStrict), kStrict);
  EXPECT_EQ(precision({{To::tile, DType::bf16}, {To::amax, DType::f32}}, kNative), kNative);
  // A separate amax must have the precision of the values that a call with the same options
  // encodes.
  EXPECT_EQ(precision({{To::amax, DType::f32}}, kNative), kNative);
  EXPECT_EQ(precision({{To::tile, DType::bf16}, {To::column_sum, DType::f32}}, kNative), kStrict);
  EXPECT_EQ(precision({{To::column_sum, DType::bf16}, {To::row_sum, DType::f16}}, kNative),
            kNative);
}

TEST(Step, NativeF32HasStrictBitsOnlyBesideCodes) {
  const auto strict_bits = [](DType stored, bool codes, Precision asked) {
    StepBuilder build("bits", 32, asked);
    const Expr y = exp(build.load({From::tile, 0, DType::f32, {}}));
    build.store({To::tile, 0, stored, {}}, y);
    if (codes) build.store({To::encoded, 0, DType::e4m3, {}}, y);
    Step step = build.finish();
    if (codes)
      step.encoders.push_back(
          {.format = {DType::e4m3, Scaling::mxfp8}, .cols = 32, .rowwise = true});
    return step.strict_bits();
  };
  constexpr auto kNative = Precision::native, kStrict = Precision::strict;
  EXPECT_TRUE(strict_bits(DType::f32, false, kStrict));
  EXPECT_TRUE(strict_bits(DType::bf16, true, kStrict));
  EXPECT_FALSE(strict_bits(DType::bf16, true, kNative));
  EXPECT_FALSE(strict_bits(DType::f32, false, kNative));
  EXPECT_TRUE(strict_bits(DType::f32, true, kNative));
}

TEST(Step, TheNullBackendTakesAllAndRunsNothing) {
  for (const Step& step : described()) {
    const Chosen chosen = kernel_for(step, Device::null);
    EXPECT_EQ(chosen.maker, "nothing");
    EXPECT_EQ(chosen.kernel->workspace(1000), 0U);
  }
  const Mat x = Mat(DType::f32, 3, 4).fill(1);
  const Mat y(DType::f32, 3, 4);
  forward(activation("gelu"), {.x = x.view(), .y = y.view()}, {.device = Device::null});
  EXPECT_TRUE(y.untouched());
}

TEST(Step, EveryBackendIsFoundByItsDevice) {
  for (const Device d : {Device::cpu, Device::cuda, Device::null}) {
    EXPECT_EQ(backend_for(d).device, d);
    EXPECT_EQ(backend_for(d).name, kDevices[static_cast<size_t>(d)]);
    EXPECT_FALSE(backend_for(d).makers.empty());
  }
  expect_error([] { backend_for(static_cast<Device>(9)); }, Code::unsupported, {"device 9"});
}

TEST(Step, AKernelIsMadeOnce) {
  const Step step = Recipe().make();
  EXPECT_EQ(kernel_for(step, Device::cpu).kernel, kernel_for(Recipe().make(), Device::cpu).kernel);
  EXPECT_NE(kernel_for(step, Device::cpu).kernel, kernel_for(step, Device::null).kernel);
}

TEST(Target, IsARowOfOneTable) {
  const Target& h200 = named_target("sm_90a");
  EXPECT_EQ(&h200, &named_target("sm_90a"));
  EXPECT_EQ(h200.device, Device::cuda);
  EXPECT_EQ(h200.sm, 90);
  EXPECT_TRUE(h200.sm_features);
  EXPECT_EQ(h200.processors, 132);
  EXPECT_FALSE(named_target("sm_80").sm_features);
  EXPECT_EQ(named_target("amx").isa, "amx");
  for (const Device d : {Device::cpu, Device::cuda, Device::null})
    EXPECT_EQ(backend_for(d).here().device, d);
  expect_error(
      [] { named_target("sm_91"); }, Code::invalid_argument,
      {"sm_91", "baseline", "avx2", "avx512", "amx", "sm_80", "sm_90a", "sm_100a", "sm_120a"});
}

TEST(Choice, ACallTakesTheFirstWayThatFits) {
  StepBuilder build("twice", 64, Precision::native);
  build.store({To::tile, 0, DType::bf16, {}}, build.load({From::tile, 0, DType::bf16, {}}) * 2.0F);
  const Chosen chosen = kernel_for(build.finish(), named_target("sm_90a"));
  EXPECT_EQ(chosen.maker, "vector map");
  alignas(64) static std::array<std::byte, 4096> memory;
  const auto maker = [&](size_t shift) {
    const View v = matrix(memory.data() + shift, DType::bf16, 4, 64);
    return chosen.kernel->way({.rows = 4, .in = {&v, 1}, .out = {&v, 1}, .parameters = {}}).maker;
  };
  EXPECT_EQ(maker(0), "vector map");
  EXPECT_EQ(maker(2), "flat map");
}

// A maker may give two ways: calls of whole tiles have a separate, shorter text.
TEST(Choice, RowsThatFillTilesHaveTheirOwnText) {
  StepBuilder build("sum", 64, Precision::native);
  build.store({To::column_sum, 0, DType::f32, {}}, build.load({From::tile, 0, DType::bf16, {}}));
  const Chosen chosen = kernel_for(build.finish(), named_target("sm_90a"));
  const auto* const memory = reinterpret_cast<std::byte*>(uintptr_t{1} << 20);  // not read
  const auto text = [&](int64_t rows) {
    const View in = matrix(memory, DType::bf16, rows, 64), out = matrix(memory, DType::f32, 1, 64);
    const RunArgs call{.rows = rows, .in = {&in, 1}, .out = {&out, 1}, .parameters = {}};
    EXPECT_EQ(chosen.kernel->way(call).maker, "tiled map");
    const std::vector<std::string> texts = chosen.kernel->texts_for(call);
    EXPECT_EQ(texts.size(), 1U);
    return texts[0];
  };
  EXPECT_EQ(text(128), text(256));
  EXPECT_EQ(text(100), text(200));
  EXPECT_LT(text(128).find("kWholeRows = true"), text(128).size());
  EXPECT_LT(text(100).find("kWholeRows = false"), text(100).size());
}

Step product_step(Precision precision, DType dtype, int64_t cols) {
  StepBuilder build("product", cols, precision);
  const Expr p = build.load({.from = From::product});
  build.store({To::tile, 0, DType::bf16, {}}, max(p, 0.0F));
  Step step = build.finish();
  const Format bf16{.dtype = DType::bf16};
  step.head = Gemm{.a = {.arg = 0, .format = bf16},
                   .b = {.arg = 2, .format = bf16, .transposed = true},
                   .cols = cols,
                   .inner = 256};
  step.dtype = dtype;
  return step;
}

// In native precision, the value between two steps has the dtype of the chain.
TEST(Choice, ASplitKeepsTheProductInTheChainsDtype) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Step step = product_step(Precision::native, dtype, 512);
    const Chosen chosen = kernel_for(step, named_target("sm_100a"));
    EXPECT_EQ(chosen.maker, "cublaslt");
    ASSERT_EQ(chosen.kernel->ways().size(), 1U);
    const Way& way = chosen.kernel->ways()[0];
    ASSERT_TRUE(way.halves);
    const Split& split = way.halves->split;
    EXPECT_EQ(split.dtype, dtype);
    EXPECT_EQ(split.stride, 512);
    EXPECT_TRUE(split.first.gemm());
    EXPECT_TRUE(split.second.is_map());
    EXPECT_EQ(way.halves->first->ways()[0].maker, "cublaslt");
    EXPECT_EQ(way.halves->second->ways()[0].maker, "vector map");
    EXPECT_GE(chosen.kernel->workspace(100), static_cast<size_t>(100 * 512 * info(dtype).bytes));
  }
  // Strict defines the order of the additions of a product. Libraries do not guarantee an order.
  EXPECT_EQ(
      kernel_for(product_step(Precision::strict, DType::bf16, 512), named_target("sm_100a")).maker,
      "plain");
}

// Codes with power-of-two scales are exact in bf16. Other operands are cast to the chain's dtype.
TEST(Choice, EncodedOperandsAreDecodedBeforeTheProduct) {
  struct Case {
    Format a, b;
    DType chain, decoded;
    size_t times;
  };
  const Format mx{.dtype = DType::e4m3, .scaling = Scaling::mxfp8};
  const Format f32{.dtype = DType::f32}, f16{.dtype = DType::f16}, bf16{.dtype = DType::bf16};
  for (const Case& c :
       {Case{mx, mx, DType::f32, DType::bf16, 2}, Case{mx, bf16, DType::bf16, DType::bf16, 1},
        Case{f16, f32, DType::f16, DType::f16, 1}, Case{bf16, f32, DType::f32, DType::f32, 1}}) {
    Step step = product_step(Precision::native, c.chain, 512);
    auto& gemm = std::get<Gemm>(step.head);
    gemm.a.format = c.a;
    gemm.b.format = c.b;
    const Target& target = named_target("sm_90a");
    const Chosen chosen = kernel_for(step, target);
    EXPECT_EQ(chosen.maker, "decode");
    const Choice* choice = chosen.kernel.get();
    for (size_t i = 0; i < c.times; ++i) {
      ASSERT_TRUE(choice->ways()[0].halves);
      const Way::Halves& halves = *choice->ways()[0].halves;
      const Split& split = halves.split;
      EXPECT_TRUE(split.first.is_map());
      EXPECT_EQ(split.dtype, c.decoded);
      EXPECT_EQ(halves.first->ways()[0].maker, "vector map");
      // The rows of the weight are fixed. The rows of the input are those of the call.
      const bool weight = i == 1 || c.a == Format{.dtype = c.decoded};
      EXPECT_EQ(halves.between(100), weight ? 512 : 100);
      EXPECT_EQ(halves.rows(split.second, 100), 100);
      choice = halves.second.get();
    }
    EXPECT_NE(choice->ways()[0].maker, "decode");
    EXPECT_NE(choice->ways()[0].maker, "plain");
  }
  Step step = product_step(Precision::strict, DType::bf16, 512);
  std::get<Gemm>(step.head).a.format = mx;
  EXPECT_EQ(kernel_for(step, named_target("sm_90a")).maker, "plain");
}

TEST(Choice, FewRowsGoToTheNextWay) {
  const Step step = product_step(Precision::native, DType::bf16, 4096);
  const Chosen chosen = kernel_for(step, named_target("sm_90a"));
  EXPECT_EQ(chosen.maker, "gemm");
  const auto* const memory = reinterpret_cast<std::byte*>(uintptr_t{1} << 20);  // not read
  const auto way = [&](int64_t rows) {
    const std::vector<View> in{
        matrix(memory, DType::bf16, rows, 256), {}, matrix(memory, DType::bf16, 4096, 256)};
    const View out = matrix(memory, DType::bf16, rows, 4096);
    return chosen.kernel->way({.rows = rows, .in = in, .out = {&out, 1}, .parameters = {}}).maker;
  };
  const int64_t least = chosen.kernel->ways()[0].least_rows;
  EXPECT_GE(least, 128);
  EXPECT_EQ(way(least), "gemm");
  EXPECT_EQ(way(least - 1), "cublaslt");
}

TEST(Step, ARefusalOfAllMakersNamesOpDeviceAndReason) {
  StepBuilder build("my op", 8, Precision::native);
  Expr sum = build.load({From::tile, 0, DType::f32, {}});
  for (uint32_t i = 1; i < 200; ++i) sum = sum + build.load({From::tile, i, DType::f32, {}});
  build.store({To::tile, 0, DType::f32, {}}, sum);
  expect_error([&] { kernel_for(build.finish(), Device::cuda); }, Code::unsupported,
               {"my op", "cuda", "flat map", "plain", "201 loads and stores", "cpu"});
}

}  // namespace
}  // namespace tenon::test
