// Tests of products with cuBLASLt against float64. Without a GPU, a fake library computes them on
// the host from the same descriptors. With a GPU, the real library is also tested.
#include "backend/cuda/cublaslt.h"

#include <algorithm>
#include <optional>

#include "backend/cuda/lt_form.h"
#include "backend/cuda/nvrtc.h"
#include "lazy/builder.h"
#include "runtime/execute.h"
#include "support/formula.h"
#include "support/gpu_graph.h"
#include "support/support.h"
#include "support/verify.h"

namespace tenon::test {
namespace {

using support::call;
using From = Load::From;
using To = Store::To;
using cuda::LtForm;

constexpr float kFactor = 0.75F;          // the parameter of every step
constexpr uint64_t kHost = ~uint64_t{0};  // no CUDA context

const cuda::LoadedLt& fake() {
  static const cuda::LoadedLt kFake = cuda::load_lt(cuda::Library::open(TENON_FAKE_CUBLASLT));
  return kFake;
}

RunArgs args_of(int64_t rows, std::span<const View> in, std::span<const View> out,
                void* workspace = nullptr, void* stream = nullptr) {
  return {.rows = rows,
          .in = in,
          .out = out,
          .parameters = {&kFactor, 1},
          .workspace = workspace,
          .stream = stream};
}

// The epilogue of a product.
enum class Body : uint8_t {
  none,
  rounded,
  bias,
  bias_first,
  add,
  accumulate,
  bias_add,
  scaled,
  scaled_add,
  gelu,
  swiglu,
  dbias
};
constexpr Body kBodies[] = {Body::none,       Body::rounded,    Body::bias,     Body::bias_first,
                            Body::add,        Body::accumulate, Body::bias_add, Body::scaled,
                            Body::scaled_add, Body::gelu,       Body::swiglu,   Body::dbias};
// Whether one call computes everything: loads have the dtype of the result, and the formula scales
// and adds.
bool whole(Body b) { return b < Body::gelu; }

struct Case {
  DType in = DType::f32, out = DType::f32;
  int64_t m = 0, n = 0, k = 0;
  bool turn_a = false, turn_b = false;
  bool columnwise = false;  // b is a transposed copy
  bool inner_is_rows = false;
  int64_t pad = 0;
  size_t shift = 0;  // elements
  Body body = Body::none;

  [[nodiscard]] std::string text() const {
    return str(info(in).name, " -> ", info(out).name, " ", m, "x", n, "x", k, turn_a ? " T" : " N",
               turn_b ? "T" : "N", columnwise ? " columnwise" : "",
               inner_is_rows ? " inner=rows" : "", " pad ", pad, " shift ", shift, " body ",
               static_cast<int>(body));
  }
};

// A step with host memory for all tensors. Inputs: a, b, bias, addend.
struct Problem {
  Step step;
  std::vector<Mat> in, out;
  int64_t rows = 0;  // of the call

  [[nodiscard]] static std::vector<View> views(const std::vector<Mat>& all) {
    std::vector<View> list;
    for (const Mat& m : all) list.push_back(m.view());
    return list;
  }
};

Problem problem(const Case& c) {
  const int64_t cols = c.body == Body::swiglu ? c.n / 2 : c.n;
  const auto shift = [&](DType d) { return c.shift * static_cast<size_t>(info(d).bytes); };
  const auto mat = [&](DType d, int64_t rows, int64_t width, unsigned seed, bool plain = false) {
    return Mat(d, rows, width, plain ? 0 : c.pad, plain ? 0 : shift(d)).fill(seed, false, 1);
  };
  const auto side = [&](int64_t rows, int64_t width, bool turned, unsigned seed) {
    return turned ? mat(c.in, width, rows, seed) : mat(c.in, rows, width, seed);
  };
  Problem p;
  p.in.push_back(side(c.m, c.k, c.turn_a, 1));
  p.in.push_back(side(c.k, c.n, c.turn_b != c.columnwise, 2));
  p.in.push_back(mat(c.out, 1, c.n, 3, true));
  p.in.push_back(mat(c.out, c.m, c.n, 4));
  p.rows = c.inner_is_rows ? c.k : c.m;

  StepBuilder build(c.text(), cols, Precision::native);
  const ColumnMap second{1, 1, c.body == Body::swiglu ? cols : 0};
  const Expr product = build.load({.from = From::product});
  const Expr other = build.load({.from = From::product, .columns = second});
  const Expr bias = build.load({.from = From::row, .arg = 2, .dtype = c.out});
  const Expr added = build.load({.from = From::tile, .arg = 3, .dtype = c.out});
  const Expr factor = build.load({.from = From::parameter});
  Expr value = product;
  if (c.body == Body::rounded) value = round(product, c.out);
  if (c.body == Body::bias) value = product + bias;
  if (c.body == Body::bias_first) value = bias + product;
  if (c.body == Body::add) value = product + added;
  if (c.body == Body::accumulate) value = added + product;
  if (c.body == Body::bias_add) value = (product + bias) + added;
  if (c.body == Body::scaled) value = product * factor;
  if (c.body == Body::scaled_add) value = factor * product + added;
  if (c.body == Body::gelu) value = call("gelu", product + bias);
  if (c.body == Body::swiglu) value = call("swiglu", product, other);
  if (c.body == Body::dbias) value = product * added;
  build.store({To::tile, 0, c.out, {}}, value);
  p.out.emplace_back(c.out, c.m, cols, c.pad, shift(c.out));
  if (c.body == Body::dbias) {
    build.store({To::column_sum, 1, DType::f32, {}}, value);
    p.out.emplace_back(DType::f32, 1, cols);
  }
  p.step = build.finish();
  const auto matrix = [&](uint32_t arg, bool transposed, bool columnwise) {
    return Matrix{.arg = arg,
                  .format = {.dtype = c.in},
                  .orientation = columnwise ? Orientation::columnwise : Orientation::rowwise,
                  .transposed = transposed};
  };
  p.step.head = Gemm{matrix(0, c.turn_a, false), matrix(1, c.turn_b, c.columnwise), c.n,
                     c.inner_is_rows ? 0 : c.k};
  if (c.inner_is_rows) p.step.rows = c.m;
  // The accumulated output is read and written in place. The reference reads the copy.
  if (c.body == Body::accumulate) p.out[0] = p.in[3];
  return p;
}

// Every combination of types, epilogues, layouts and alignments.
std::vector<Case> cases() {
  struct Size {
    int64_t m, n, k;
  };
  constexpr Size kSizes[] = {{64, 128, 96}, {1, 8, 8},   {33, 62, 7},  {128, 2, 40},
                             {7, 96, 130},  {40, 16, 1}, {96, 34, 24}, {72, 136, 264}};
  struct Types {
    DType in, out;
  };
  constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f16, DType::f16},
                              {DType::bf16, DType::bf16}, {DType::bf16, DType::f32},
                              {DType::f16, DType::f32},   {DType::f32, DType::bf16},
                              {DType::f16, DType::bf16}};
  std::vector<Case> all;
  size_t turn = 0;
  for (const Types t : kTypes)
    for (const Body body : kBodies)
      for (const int layout : {0, 1, 2, 3}) {
        const Size s = kSizes[turn % std::size(kSizes)];
        all.push_back({.in = t.in,
                       .out = t.out,
                       .m = s.m,
                       .n = s.n,
                       .k = s.k,
                       .turn_a = layout % 2 == 1,
                       .turn_b = layout >= 2,
                       .columnwise = turn % 5 == 2,
                       .inner_is_rows = turn % 7 == 3,
                       .pad = turn % 3 == 0   ? 8
                              : turn % 3 == 1 ? 0
                                              : 3,
                       .shift = turn % 4 == 3 ? 1U : 0U,
                       .body = body});
        ++turn;
      }
  return all;
}

bool pairs(const Case& c) { return c.out == c.in || c.out == DType::f32; }

// Host memory aligned to 256 bytes.
struct Aligned {
  explicit Aligned(size_t bytes) : memory(bytes + 2 * cuda::kLtAlignment, 0xcd) {}
  [[nodiscard]] std::byte* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<std::byte*>((at + 255) / 256 * 256);
  }
  std::vector<uint8_t> memory;
};

bool multiplied(const cuda::LtProduct& product) {
  const cuda::Lt& lt = fake().lt;
  const cuda::LtChoice choice = cuda::choose(lt, nullptr, kHost, product);
  Aligned workspace(choice.workspace);
  return choice.found && cuda::multiply(lt, nullptr, choice, product, workspace.data(), nullptr);
}

// Hopper aligns the FP8 products of an instruction to the largest one and keeps 13 bits of each.
constexpr double kLostByCodes = 0x1p-11;

template <class Case>
void expect_right(Problem& p, const Case& c, double lost = 0) {
  const std::vector<View> in = Problem::views(p.in), out = Problem::views(p.out);
  // A sum with a 16-bit result may round its product first.
  const auto wrong = verify_losing(LtForm(p.step).computed(), args_of(p.rows, in, out), lost);
  EXPECT_FALSE(wrong.has_value()) << c.text() << ": " << *wrong;
  for (const Mat& m : p.out) EXPECT_TRUE(m.guards_hold()) << c.text();
}

std::vector<View> run_views(const Problem& p, const Case& c) {
  std::vector<View> in = Problem::views(p.in);
  if (c.body == Body::accumulate) in[3] = p.out[0].view();
  return in;
}

TEST(CublasLt, LoadsAndSaysWhatIsMissing) {
  ASSERT_EQ(fake().why, "");
  EXPECT_EQ(fake().version, "13.1.2");
  EXPECT_NE(fake().path.find("cublaslt"), std::string::npos) << fake().path;
  const cuda::LoadedLt none = cuda::load_lt(cuda::Library::open("/no/such/libcublasLt.so.13"));
  for (const char* part : {"/no/such/libcublasLt.so.13", "nvidia-cublas", "TENON_CUBLASLT"})
    EXPECT_NE(none.why.find(part), std::string::npos) << none.why;
  const cuda::LoadedLt other = cuda::load_lt(cuda::Library::open("libm.so.6"));
  for (const char* part : {"cublasLtGetVersion", "cuBLAS 12"})
    EXPECT_NE(other.why.find(part), std::string::npos) << other.why;
}

TEST(CublasLt, OneProductDoesTheWholeStep) {
  ASSERT_EQ(fake().why, "");
  size_t done = 0;
  for (const Case& c : cases()) {
    Problem p = problem(c);
    const LtForm form(p.step);
    const bool both = c.body == Body::bias_add && c.out != DType::f32;
    EXPECT_EQ(form.is_whole(), whole(c.body) && pairs(c) && !both) << c.text();
    const std::vector<View> in = run_views(p, c), out = Problem::views(p.out);
    const auto product = form.whole(args_of(p.rows, in, out));
    EXPECT_EQ(product.has_value() || c.body == Body::bias || c.body == Body::bias_first,
              form.is_whole() || c.body == Body::bias || c.body == Body::bias_first)
        << c.text();
    if (!product) continue;
    ASSERT_TRUE(multiplied(*product)) << c.text();
    expect_right(p, c);
    ++done;
  }
  EXPECT_GT(done, 80U);
}

// The product in memory, then the epilogue with CPU kernels: the same two steps as on a device.
TEST(CublasLt, AnyBodyFollowsAProduct) {
  ASSERT_EQ(fake().why, "");
  size_t done = 0;
  for (const Case& c : cases()) {
    Problem p = problem(c);
    const Attempt attempt = cuda::make_cublaslt_split(p.step, named_target("sm_90a"));
    EXPECT_EQ(std::holds_alternative<Refusal>(attempt), LtForm(p.step).is_product()) << c.text();
    const auto* const split = std::get_if<Split>(&attempt);
    if (!split) continue;
    std::vector<View> in = run_views(p, c), out = Problem::views(p.out);
    in.resize(split->in + 1);
    out.resize(split->out + 1);
    RunArgs args = args_of(p.rows, in, out);
    const int64_t rows = p.step.body_rows(p.rows);
    Aligned memory(static_cast<size_t>(rows * split->stride) * sizeof(float));
    in.back() = out.back() = matrix(memory.data(), split->dtype, rows, split->stride);
    const auto product = LtForm(split->first).whole(args);
    ASSERT_TRUE(product && multiplied(*product)) << c.text();
    EXPECT_TRUE(split->second.is_map());
    args.rows = rows;
    execute(split->second, args, {});
    expect_right(p, c);
    ++done;
  }
  EXPECT_GT(done, 80U);
}

// FP8 operands: their encodings, tensor sizes, and the epilogue.
struct Codes {
  Format a, b;
  DType out = DType::bf16;
  int64_t m = 0, n = 0, k = 0;
  bool columnwise = false;  // both operands are transposed copies, as in a weight gradient
  Body body = Body::none;

  [[nodiscard]] std::string text() const {
    return str(info(a.dtype).name, " ", info(a.scaling).name, " * ", info(b.dtype).name, " ",
               info(b.scaling).name, " -> ", info(out).name, " ", m, "x", n, "x", k,
               columnwise ? " columnwise" : "", " body ", static_cast<int>(body));
  }
};

std::vector<Codes> codes_cases() {
  const Format e4{DType::e4m3, Scaling::delayed}, e5{DType::e5m2, Scaling::current};
  const Format fine{DType::e4m3, Scaling::block1x128}, coarse{DType::e4m3, Scaling::block128x128};
  struct Pair {
    Format a, b;
  };
  std::vector<Codes> all;
  size_t turn = 0;
  for (const Pair& p :
       {Pair{e4, e4}, Pair{e5, e4}, Pair{e4, e5}, Pair{fine, coarse}, Pair{fine, fine}})
    for (const Body body : {Body::none, Body::bias, Body::add, Body::bias_add, Body::gelu})
      for (const bool columnwise : {false, true}) {
        ++turn;
        if (columnwise && p.b == coarse) continue;  // weight gradients have no 128x128
        const int64_t k = turn % 3 ? 256 : 144;
        all.push_back({p.a, p.b,
                       turn % 4 == 1   ? DType::f32
                       : turn % 4 == 2 ? DType::f16
                                       : DType::bf16,
                       turn % 2 ? 48 : 144, turn % 5 ? 160 : 272, k, columnwise, body});
      }
  return all;
}

// Inputs: codes and scales of a, the same of b, bias, addend.
Problem problem(const Codes& c) {
  Problem p;
  const auto operand = [&](const Format& f, int64_t lines, unsigned seed) {
    // A transposed copy of a k x lines tensor has the codes of its transpose.
    const Orientation o = c.columnwise ? Orientation::columnwise : Orientation::rowwise;
    const int64_t rows = c.columnwise ? c.k : lines, cols = c.columnwise ? lines : c.k;
    const Mat x = Mat(DType::f32, rows, cols).fill(seed, false, 1);
    const Shape codes = f.data_shape(rows, cols, o), scales = f.scale_shape(rows, cols, o);
    const Mat data(f.dtype, codes.rows, codes.cols);
    const Mat inverse(DType::f32, scales.rows, scales.cols);
    Mat scale(DType::f32, 1, 1), amax(DType::f32, 1, 1);
    scale.set(0, 0, 2.5F);
    amax.set(0, 0, 0);
    const Encoding encoding{data.view(), inverse.view()};
    Tensor t(f, c.columnwise ? Encoding{} : encoding, c.columnwise ? encoding : Encoding{});
    if (f.scaling == Scaling::delayed) t.scale = scale.view();
    if (f.blocks(o).single()) t.amax = amax.view();
    tenon::quantize({.x = x.view(), .y = t});
    p.in.push_back(data);
    p.in.push_back(inverse);
  };
  operand(c.a, c.m, 1);
  operand(c.b, c.n, 2);
  p.in.push_back(Mat(c.out, 1, c.n).fill(3, false, 1));
  p.in.push_back(Mat(c.out, c.m, c.n).fill(4, false, 1));
  p.rows = c.columnwise ? c.k : c.m;
  StepBuilder build(c.text(), c.n, Precision::native);
  const Expr product = build.load({.from = From::product});
  const Expr bias = build.load({.from = From::row, .arg = 4, .dtype = c.out});
  const Expr added = build.load({.from = From::tile, .arg = 5, .dtype = c.out});
  Expr value = product;
  if (c.body == Body::bias) value = product + bias;
  if (c.body == Body::add) value = product + added;
  if (c.body == Body::bias_add) value = (product + bias) + added;
  if (c.body == Body::gelu) value = call("gelu", product + bias);
  build.store({To::tile, 0, c.out, {}}, value);
  p.out.emplace_back(c.out, c.m, c.n);
  p.step = build.finish();
  const Orientation o = c.columnwise ? Orientation::columnwise : Orientation::rowwise;
  p.step.head =
      Gemm{{0, c.a, o, c.columnwise}, {2, c.b, o, !c.columnwise}, c.n, c.columnwise ? 0 : c.k};
  if (c.columnwise) p.step.rows = c.m;
  return p;
}

TEST(CublasLt, MultipliesCodes) {
  ASSERT_EQ(fake().why, "");
  size_t done = 0;
  for (const Codes& c : codes_cases()) {
    Problem p = problem(c);
    EXPECT_EQ(LtForm::refusal(p.step, named_target("sm_90a")), "") << c.text();
    const LtForm form(p.step);
    const bool bias = c.body == Body::bias || c.body == Body::bias_add;
    const bool both = c.body == Body::bias_add && c.out != DType::f32;
    EXPECT_EQ(form.is_whole(), c.body != Body::gelu && !both && !(bias && c.out == DType::f32))
        << c.text();
    const std::vector<View> in = Problem::views(p.in), out = Problem::views(p.out);
    const auto product = form.whole(args_of(p.rows, in, out));
    if (!product) continue;
    ASSERT_TRUE(multiplied(*product)) << c.text();
    expect_right(p, c);
    ++done;
  }
  EXPECT_GT(done, 20U);
}

// Reports a reason for a misaligned bias and for a shape without a kernel, and does not run.
TEST(CublasLt, SaysWhatItDoesNotTake) {
  ASSERT_EQ(fake().why, "");
  Case c{.in = DType::bf16, .out = DType::f32, .m = 8, .n = 16, .k = 8, .body = Body::bias};
  Problem p = problem(c);
  const LtForm form(p.step);
  std::vector<View> in = Problem::views(p.in);
  const std::vector<View> out = Problem::views(p.out);
  in[2].data = reinterpret_cast<void*>(uintptr_t{0x1010});
  EXPECT_TRUE(form.whole(args_of(p.rows, in, out)).has_value());
  in[2].data = reinterpret_cast<void*>(uintptr_t{0x1008});
  EXPECT_FALSE(form.whole(args_of(p.rows, in, out)).has_value());

  c.m = 77;
  c.body = Body::none;
  const Problem q = problem(c);
  const std::vector<View> from = Problem::views(q.in), to = Problem::views(q.out);
  const auto product = LtForm(q.step).whole(args_of(q.rows, from, to));
  ASSERT_TRUE(product.has_value());
  EXPECT_FALSE(cuda::choose(fake().lt, nullptr, kHost, *product).found);

  c.m = 8;
  Problem odd = problem(c);
  std::vector<View> at = Problem::views(odd.in), into = Problem::views(odd.out);
  at[0].data = static_cast<std::byte*>(at[0].data) + 1;
  const auto apart = LtForm(odd.step).whole(args_of(odd.rows, at, into));
  ASSERT_TRUE(apart.has_value());
  EXPECT_FALSE(cuda::choose(fake().lt, nullptr, kHost, *apart).found) << "elements at odd bytes";
}

// A result inside of a wider tensor, and a residual in another tensor.
TEST(CublasLt, ColumnsOfATensorAreWrittenInPlace) {
  ASSERT_EQ(fake().why, "");
  const int64_t m = 12, n = 10, k = 9;
  const Mat a = Mat(DType::f32, m, k).fill(1), b = Mat(DType::f32, k, n).fill(2);
  const Mat c = Mat(DType::f32, m, n + 5).fill(3);
  const Mat d(DType::f32, m, n + 7);
  StepBuilder build("slices", n, Precision::native);
  const Expr held = build.load({From::tile, 2, DType::f32, {1, 1, 5}});
  build.store({To::tile, 0, DType::f32, {1, 1, 3}}, build.load({.from = From::product}) + held);
  Step step = build.finish();
  step.head = Gemm{{.arg = 0}, {.arg = 1}, n, k};
  const std::vector<View> in{a.view(), b.view(), c.view()}, out{d.view()};
  const auto product = LtForm(step).whole(args_of(m, in, out));
  ASSERT_TRUE(product.has_value());
  ASSERT_TRUE(multiplied(*product));
  const auto wrong = verify(step, args_of(m, in, out));
  EXPECT_FALSE(wrong.has_value()) << *wrong;
  for (int64_t r = 0; r < m; ++r)
    for (const int64_t j : {int64_t{0}, int64_t{2}, n + 3, n + 6})
      EXPECT_EQ(d.code(r, j), 0xa5a5a5a5U) << r << ", " << j;
}

TEST(CublasLt, RefusesWithTheReason) {
  const Case plain{.in = DType::bf16, .out = DType::bf16, .m = 8, .n = 8, .k = 8};
  Target target = named_target("sm_90a");
  const auto expect = [&](const std::function<void(Step&)>& change, const char* part) {
    Step step = problem(plain).step;
    change(step);
    const Attempt attempt = cuda::make_cublaslt(step, target);
    ASSERT_TRUE(std::holds_alternative<Refusal>(attempt)) << part;
    const std::string& why = std::get<Refusal>(attempt).why;
    EXPECT_NE(why.find(part), std::string::npos) << why;
  };
  expect([](Step& s) { s.head = Map{}; }, "map head");
  expect([](Step& s) { s.precision = Precision::strict; }, "strict");
  expect(
      [](Step& s) {
        std::get<Gemm>(s.head).b.format = {DType::e4m3, Scaling::delayed};
      },
      "e4m3 delayed");
  const auto codes = [](Step& s, const Format& a, const Format& b, bool transposed) {
    auto& g = std::get<Gemm>(s.head);
    g.a.format = a;
    g.b.format = b;
    g.b.transposed = transposed;
  };
  const Format e4{DType::e4m3, Scaling::delayed}, e5{DType::e5m2, Scaling::delayed};
  const Format mx{DType::e4m3, Scaling::mxfp8}, fine{DType::e4m3, Scaling::block1x128};
  expect([&](Step& s) { codes(s, e5, e5, true); }, "e5m2");
  expect([&](Step& s) { codes(s, mx, mx, true); }, "mxfp8");
  expect([&](Step& s) { codes(s, e4, fine, true); }, "block1x128");
  expect([&](Step& s) { codes(s, e4, e4, false); }, "inner dimension");
  target = named_target("sm_80");
  expect([&](Step& s) { codes(s, e4, e4, true); }, "sm_89");
  target = named_target("sm_100a");
  expect([&](Step& s) { codes(s, fine, fine, true); }, "sm_90");
  target = named_target("sm_90a");
  expect([](Step& s) { std::get<Gemm>(s.head).a.format.dtype = DType::f16; }, "f16 and bf16");
  target.cublaslt = 0;
  expect([](Step&) {}, "nvidia-cublas");
}

// A machine that only compiles has no cuBLASLt. The texts are those for the target.
TEST(CublasLt, TextsOfBodiesNeedNoLibrary) {
  Case c{.in = DType::bf16, .out = DType::bf16, .m = 64, .n = 128, .k = 96, .body = Body::gelu};
  const Step step = problem(c).step;
  const Chosen chosen = kernel_for(step, named_target("sm_100a"));
  EXPECT_EQ(chosen.maker, "cublaslt");
  const std::vector<std::string> texts = chosen.kernel->texts();
  EXPECT_TRUE(std::ranges::any_of(texts, [](const std::string& text) {
    return text.find("tenon_vector_kernel") != std::string::npos;
  }));
  Step strict = step;
  strict.precision = Precision::strict;
  EXPECT_EQ(kernel_for(strict, named_target("sm_100a")).maker, "plain");
}

// The tests below need a GPU.
class CublasLtOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    for (const auto& why : {cuda::why_no_gpu(), cuda::why_no_nvrtc()})
      if (why) GTEST_SKIP() << *why;
    if (!cuda::cublaslt().why.empty()) FAIL() << cuda::cublaslt().why;
  }

  // Copies of the tensors of a problem on the device, with the same alignment modulo 64.
  struct OnDevice {
    std::vector<std::unique_ptr<cuda::DeviceBuffer>> buffers;
    std::vector<View> in, out;

    View upload(const Mat& m) {
      View v = m.view();
      const size_t bytes = size_of(v), shift = shift_of(v);
      std::vector<uint8_t> host(bytes + shift);
      std::memcpy(host.data() + shift, v.data, bytes);
      buffers.push_back(std::make_unique<cuda::DeviceBuffer>(host.size()));
      buffers.back()->from_host(host.data());
      v.data = static_cast<uint8_t*>(buffers.back()->data()) + shift;
      return v;
    }
    // Copies the results back, including the padding between rows.
    void fetch(const Problem& p) const {
      for (size_t i = 0; i < p.out.size(); ++i) {
        const View v = p.out[i].view();
        const cuda::DeviceBuffer& from = *buffers[p.in.size() + i];
        std::vector<uint8_t> host(from.size());
        from.to_host(host.data());
        std::memcpy(v.data, host.data() + shift_of(v), size_of(v));
      }
    }
    static size_t shift_of(const View& v) { return reinterpret_cast<uintptr_t>(v.data) % 16; }
    static size_t size_of(const View& v) {
      return static_cast<size_t>(((v.rows - 1) * v.stride + v.cols) * info(v.dtype).bytes);
    }
  };
  static OnDevice upload(const Problem& p) {
    OnDevice d;
    for (const Mat& m : p.in) d.in.push_back(d.upload(m));
    for (const Mat& m : p.out) d.out.push_back(d.upload(m));
    return d;
  }
  static OnDevice upload(const Problem& p, const Case& c) {
    OnDevice d = upload(p);
    if (c.body == Body::accumulate) d.in[3] = d.out[0];
    return d;
  }
};

TEST_F(CublasLtOnGpu, StepsAreRight) {
  for (const Case& c : cases()) {
    Problem p = problem(c);
    OnDevice d = upload(p, c);
    const Chosen chosen = kernel_for(p.step, Device::cuda);
    EXPECT_TRUE(chosen.maker == "cublaslt" || chosen.maker == "gemm") << c.text();
    chosen.kernel->run(args_of(p.rows, d.in, d.out));
    d.fetch(p);
    expect_right(p, c);
  }
}

// cuBLASLt multiplies FP8 codes without decoding. The bound is that of Hopper's accumulators.
TEST_F(CublasLtOnGpu, CodesAreRight) {
  for (const Codes& c : codes_cases()) {
    Problem p = problem(c);
    OnDevice d = upload(p);
    const Chosen chosen = kernel_for(p.step, Device::cuda);
    const RunArgs args = args_of(p.rows, d.in, d.out);
    const std::string_view maker = chosen.kernel->way(args).maker;
    EXPECT_EQ(maker, "cublaslt") << c.text();
    chosen.kernel->run(args);
    d.fetch(p);
    expect_right(p, c, kLostByCodes);
  }
}

// Dense, aligned products must have a kernel. Otherwise all tests would use the slow fallback.
TEST_F(CublasLtOnGpu, TakesDenseProducts) {
  const cuda::Lt& lt = cuda::cublaslt().lt;
  const cuda::CurrentContext context;
  cuda::LtHandle handle = nullptr;
  ASSERT_EQ(lt.create(&handle), 0);
  for (const Case& c : cases()) {
    const bool dense = c.pad != 3 && c.shift == 0;
    const bool even = c.n % 8 == 0 && c.k % 8 == 0 && (c.m % 8 == 0 || !c.turn_a);
    if (!dense || !even) continue;
    Problem p = problem(c);
    OnDevice d = upload(p, c);
    const LtForm form(p.step);
    const RunArgs args = args_of(p.rows, d.in, d.out);
    const Attempt attempt = cuda::make_cublaslt_split(p.step, named_target("sm_90a"));
    if (const auto* const split = std::get_if<Split>(&attempt)) {
      std::vector<View> out = d.out;
      out.resize(split->out + 1);
      out.back() = matrix(nullptr, split->dtype, p.step.body_rows(p.rows), split->stride);
      const auto first = LtForm(split->first).whole(args_of(p.rows, d.in, out));
      EXPECT_TRUE(first && cuda::choose(lt, handle, context.id(), *first).found) << c.text();
    }
    const auto product = c.in == c.out ? form.whole(args) : std::nullopt;
    EXPECT_TRUE(!product || cuda::choose(lt, handle, context.id(), *product).found) << c.text();
  }
  lt.destroy(handle);
}

// With a workspace of the requested size, without a workspace, and with zero rows.
TEST_F(CublasLtOnGpu, WorkspaceIsEnoughAndNoRowsAreFine) {
  for (const Body body : {Body::none, Body::bias, Body::gelu, Body::dbias}) {
    Case c{.in = DType::bf16, .out = DType::bf16, .m = 130, .n = 72, .k = 64, .body = body};
    Problem p = problem(c);
    OnDevice d = upload(p, c);
    const Chosen chosen = kernel_for(p.step, Device::cuda);
    const size_t bytes = chosen.kernel->workspace(p.rows);
    cuda::DeviceBuffer workspace(bytes + 64 + 64);
    std::vector<uint8_t> poison(workspace.size(), Mat::kPoison);
    workspace.from_host(poison.data());
    chosen.kernel->run(args_of(p.rows, d.in, d.out, static_cast<uint8_t*>(workspace.data()) + 64));
    d.fetch(p);
    expect_right(p, c);
    workspace.to_host(poison.data());
    EXPECT_TRUE(std::all_of(poison.end() - 64, poison.end(), [](uint8_t b) {
      return b == Mat::kPoison;
    })) << c.text();
    // Sums of zero rows are zero.
    chosen.kernel->run(args_of(0, d.in, d.out));
    d.fetch(p);
    for (int64_t j = 0; body == Body::dbias && j < c.n; ++j) EXPECT_EQ(p.out[1].at(0, j), 0.0F);
  }
}

// A captured step runs with the graph, on the current contents of memory.
TEST_F(CublasLtOnGpu, StepsAreCaptured) {
  const cuda::Driver& driver = cuda::driver();
  const cuda::CurrentContext context;
  for (const Body body : {Body::bias, Body::accumulate, Body::gelu, Body::dbias}) {
    const Case c{.in = DType::f16, .out = DType::f16, .m = 64, .n = 128, .k = 96, .body = body};
    Problem p = problem(c);
    OnDevice d = upload(p, c);
    const Chosen chosen = kernel_for(p.step, Device::cuda);
    // cuBLASLt loads a kernel at its first run. Not every driver supports this during capture.
    const OnDevice warm = upload(p, c);
    chosen.kernel->run(args_of(p.rows, warm.in, warm.out));
    cuda::Stream stream = nullptr;
    cuda::StreamGraph graph = nullptr;
    cuda::GraphExec made = nullptr;
    constexpr unsigned kNonBlocking = 1;
    constexpr int kThreadLocal = 1;
    cuda::check(driver.stream_create(&stream, kNonBlocking), "making a stream");
    cuda::check(driver.stream_begin_capture(stream, kThreadLocal), "beginning a capture");
    chosen.kernel->run(args_of(p.rows, d.in, d.out, nullptr, stream));
    cuda::check(driver.stream_end_capture(stream, &graph), "ending a capture");
    cuda::check(driver.graph_instantiate(&made, graph, 0), "making a graph");
    d.fetch(p);
    EXPECT_TRUE(body == Body::accumulate || p.out[0].untouched()) << c.text();
    cuda::check(driver.graph_launch(made, stream), "launching a graph");
    cuda::check(driver.stream_synchronize(stream), "waiting for a graph");
    d.fetch(p);
    expect_right(p, c);
    driver.graph_exec_destroy(made);
    driver.graph_destroy(graph);
    driver.stream_destroy(stream);
  }
}

// For a bias that is not a vector, or odd addresses, the call uses a fallback with the same
// workspace.
TEST_F(CublasLtOnGpu, EveryWayFitsTheWorkspace) {
  struct Odd {
    Body body;
    size_t input, shift;
  };
  for (const auto& [body, input, shift] : {Odd{Body::bias, 0, 0}, Odd{Body::bias, 2, 8},
                                           Odd{Body::bias, 0, 1}, Odd{Body::gelu, 1, 1}}) {
    const Case c{.in = DType::bf16, .out = DType::f32, .m = 64, .n = 128, .k = 96, .body = body};
    SCOPED_TRACE(str(c.text(), ", input ", input, " + ", shift));
    Problem p = problem(c);
    Mat& odd = p.in[input];
    odd = Mat(odd.dtype(), odd.rows(), odd.cols(), 0, shift).fill(9, false, 1);
    const Chosen chosen = kernel_for(p.step, Device::cuda);
    const cuda::DeviceBuffer workspace(chosen.kernel->workspace(p.rows));
    const OnDevice warm = upload(p, c);
    chosen.kernel->run(args_of(p.rows, warm.in, warm.out, workspace.data()));
    const OnDevice d = upload(p, c);
    const GpuStream stream;
    const GpuGraph graph(stream, [&] {
      chosen.kernel->run(args_of(p.rows, d.in, d.out, workspace.data(), stream.get()));
    });
    EXPECT_FALSE(graph.allocates());
    graph.replay();
    d.fetch(p);
    expect_right(p, c);
  }
}

}  // namespace
}  // namespace tenon::test
