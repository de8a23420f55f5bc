// Tests of products against float64, of epilogues against the executor, and of bits for every
// split.
#include "backend/cpu/gemm.h"

#include <functional>

#include "backend/cpu/executor.h"
#include "backend/cpu/here.h"
#include "lazy/builder.h"
#include "support/formula.h"
#include "support/quantize_reference.h"
#include "support/support.h"
#include "support/verify.h"

namespace tenon::test {
namespace {

using support::call;
using From = Load::From;
using To = Store::To;
using cpu::GemmKernel;

// Runs with exactly the workspace that the kernel requests, with guard bytes.
void run(const Kernel& kernel, int64_t rows, const std::vector<View>& in,
         const std::vector<View>& out, const std::vector<float>& parameters = {},
         const uint64_t* random = nullptr) {
  const size_t bytes = kernel.workspace(rows);
  std::vector<uint8_t> memory(bytes + 192, Mat::kPoison);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const size_t start = 64 + (64 - address % 64) % 64;
  kernel.run({.rows = rows,
              .in = in,
              .out = out,
              .parameters = parameters,
              .random = random,
              .workspace = memory.data() + start,
              .stream = nullptr});
  for (size_t i = 0; i < memory.size(); ++i)
    if ((i < start || i >= start + bytes) && memory[i] != Mat::kPoison) {
      ADD_FAILURE() << "the workspace of " << bytes << " bytes overflows";
      return;
    }
}

// A kernel, and the first instruction set that has it.
struct Named {
  std::string isa;
  const GemmKernel& kernel;
};
std::vector<Named> kernels_of(const GemmKernel* cpu::Isa::*unit) {
  std::vector<Named> list;
  for (const cpu::Isa& isa : cpu::isas_here())
    if (isa.*unit && (list.empty() || &list.back().kernel != isa.*unit))
      list.push_back({std::string(isa.name), *(isa.*unit)});
  return list;
}
std::vector<Named> fp32_kernels() { return kernels_of(&cpu::Isa::fp32); }
std::vector<Named> bf16_kernels() { return kernels_of(&cpu::Isa::bf16); }

// The memory format of one operand of a product.
struct Form {
  DType dtype = DType::f32;
  Scaling scaling = Scaling::none;
  bool column = false;      // the columnwise encoding
  bool transposed = false;  // the product uses the transpose of the tensor
  bool swizzled = false;
  std::optional<bool> pow2 = {};
  [[nodiscard]] std::string text() const {
    return str(info(dtype).name, " ", info(scaling).name, column ? " col" : " row",
               transposed ? "^T" : "", swizzled ? " swizzled" : "", pow2 ? " exact" : "");
  }
};

// A tensor in a format, and its decoded values as the product reads them: rows x cols.
struct Side {
  Form form;
  int64_t rows = 0, cols = 0;
  std::vector<float> values;
  Memory codes, scales;

  [[nodiscard]] double at(int64_t r, int64_t c) const {
    return static_cast<double>(values[static_cast<size_t>(r * cols + c)]);
  }
  [[nodiscard]] Matrix matrix(uint32_t arg) const {
    return {.arg = arg,
            .format = {.dtype = form.dtype,
                       .scaling = form.scaling,
                       .power_of_two = form.pow2,
                       .swizzled = form.swizzled},
            .orientation = form.column ? Orientation::columnwise : Orientation::rowwise,
            .transposed = form.transposed};
  }
};

std::vector<float> turned(const std::vector<float>& v, int64_t rows, int64_t cols) {
  std::vector<float> out(v.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      out[static_cast<size_t>(c * rows + r)] = v[static_cast<size_t>(r * cols + c)];
  return out;
}

std::vector<float> numbers(size_t n, unsigned seed, bool specials) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> v(n);
  for (float& x : v)
    x = specials && random() % 97 == 0 ? kSpecials[random() % std::size(kSpecials)]
                                       : normal(random);
  return v;
}

// rows x cols is the shape in the product.
Side side(const Form& f, int64_t rows, int64_t cols, unsigned seed, int64_t pad = 0,
          size_t shift = 0, bool specials = false) {
  Side s{f, rows, cols, numbers(static_cast<size_t>(rows * cols), seed, specials), {}, {}};
  const int64_t m = f.transposed ? cols : rows;  // of the tensor
  const int64_t k = f.transposed ? rows : cols;
  std::vector<float> tensor = f.transposed ? turned(s.values, rows, cols) : s.values;
  const ref::Size size = ref::data_size(f.scaling, m, k, f.column);
  s.codes = Memory(f.dtype, size.rows, size.cols, pad, shift);
  if (f.scaling == Scaling::none) {
    for (float& v : tensor) v = rounded_ref(f.dtype, v);
    std::vector<uint8_t> bytes;
    for (const float v : f.column ? turned(tensor, m, k) : tensor) {
      const uint32_t code = encode_ref(f.dtype, v);
      const auto* from = reinterpret_cast<const uint8_t*>(&code);
      bytes.insert(bytes.end(), from, from + info(f.dtype).bytes);
    }
    s.codes.put(bytes.data());
  } else {
    const Spec spec{.dtype = f.dtype,
                    .mode = f.scaling,
                    .row = !f.column,
                    .column = f.column,
                    .pow2 = f.pow2,
                    .swizzled = f.swizzled,
                    .scale = 37.5F};
    const Quantised q = quantise_ref(spec, tensor, m, k);
    const SideBytes& bytes = f.column ? q.column : q.row;
    s.codes.put(bytes.data.data());
    const ref::Size scales = ref::scale_size(f.scaling, m, k, f.column);
    s.scales = Memory(f.scaling == Scaling::mxfp8 ? DType::e8m0 : DType::f32, scales.rows,
                      scales.cols, f.swizzled ? 0 : pad, shift);
    s.scales.put(bytes.scales.data());
    tensor = dequantise_ref(spec, q, m, k, f.column);
  }
  s.values = f.transposed ? turned(tensor, m, k) : tensor;
  return s;
}

// Inputs 0 to 3 are the two operands. The inputs of the epilogue follow.
std::vector<View> inputs(const Side& a, const Side& b) {
  return {a.codes.view(), a.scales.view(), b.codes.view(), b.scales.view()};
}

Step finish(StepBuilder& build, const Side& a, const Side& b, bool inner_is_rows = false) {
  Step step = build.finish();
  step.head = Gemm{a.matrix(0), b.matrix(2), b.cols, inner_is_rows ? 0 : a.cols};
  if (inner_is_rows) step.rows = a.rows;
  return step;
}

Step plain_step(const Side& a, const Side& b, Precision precision = Precision::strict) {
  StepBuilder build("plain", b.cols, precision);
  build.store({To::tile, 0, DType::f32, {}}, build.load({.from = From::product}));
  return finish(build, a, b);
}

Mat product(const Side& a, const Side& b, const GemmKernel& kernel,
            int64_t group_floats = cpu::kGroupFloats) {
  Mat c(DType::f32, a.rows, b.cols, 3, 1);
  const std::vector<View> in = inputs(a, b);
  run(*cpu::gemm_with(plain_step(a, b), kernel, group_floats), a.rows, in, {c.view()});
  EXPECT_TRUE(c.guards_hold());
  return c;
}

// Each term may have three roundings in addition to those of the sum: its scales and the product.
void expect_product(const Side& a, const Side& b, const Mat& c, const std::string& what) {
  constexpr double kUnit = 0x1p-24;
  const double factor = kUnit * static_cast<double>(a.cols + 6);
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t j = 0; j < b.cols; ++j) {
      double exact = 0;
      double magnitude = 0;  // sum of finite |terms|
      for (int64_t k = 0; k < a.cols; ++k) {
        const double term = a.at(r, k) * b.at(k, j);
        exact += term;
        if (std::isfinite(term)) magnitude += std::fabs(term);
      }
      const double got = c.at(r, j);
      if (magnitude > 0x1p127) continue;  // fp32 may have overflowed in a partial sum
      const bool right = std::isnan(exact) ? std::isnan(got)
                         : std::isinf(exact)
                             ? got == exact
                             : std::fabs(got - exact) <= factor * magnitude + 0x1p-120;
      ASSERT_TRUE(right) << what << ": (" << r << ", " << j << ") of " << a.rows << "x" << a.cols
                         << "x" << b.cols << " is " << got << ", exact " << exact << " with sum "
                         << magnitude;
    }
}

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{1, 1, 1},     {7, 33, 129},  {33, 7, 257},  {290, 65, 33},
                           {66, 130, 40}, {1, 257, 513}, {257, 1, 129}, {8, 31, 300}};

std::vector<Form> forms() {
  std::vector<Form> all;
  for (const bool transposed : {false, true}) {
    for (const DType d : kPlain)
      for (const bool column : {false, true}) all.push_back({d, Scaling::none, column, transposed});
    for (const Scaling s : kModes)
      for (const bool column : {false, true}) {
        all.push_back({column ? DType::e5m2 : DType::e4m3, s, column, transposed});
        if (s == Scaling::mxfp8)
          all.push_back({DType::e4m3, s, column, transposed, true});
        else if (!ref::single(s))
          all.push_back({DType::e4m3, s, column, transposed, false, false});
      }
  }
  return all;
}

TEST(Gemm, EveryFormatInEveryPlace) {
  const std::vector<Form> all = forms();
  const auto kernels = fp32_kernels();
  for (size_t i = 0; i < all.size(); ++i) {
    const Form& fa = all[i];
    const Form& fb = all[(i * 7 + 3) % all.size()];
    for (size_t z = 0; z < 3; ++z) {
      const Size s = kSizes[(i + 3 * z) % std::size(kSizes)];
      const Side a = side(fa, s.m, s.k, 1, static_cast<int64_t>(i % 3), i % 5);
      const Side b = side(fb, s.k, s.n, 2, static_cast<int64_t>(i % 2), i % 4);
      expect_product(a, b, product(a, b, kernels.back().kernel), fa.text() + " * " + fb.text());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Gemm, SpecialNumbersGoThrough) {
  for (const auto& [isa, kernel] : fp32_kernels())
    for (const Size& s : {Size{7, 33, 129}, Size{270, 40, 300}}) {
      const Side a = side({}, s.m, s.k, 5, 0, 0, true);
      const Side b = side({.transposed = true}, s.k, s.n, 6, 0, 0, true);
      expect_product(a, b, product(a, b, kernel), isa);
    }
}

// Every instruction set, number of threads, and split of rows and columns gives the same bits.
TEST(Gemm, BitsDependOnTheRowAndColumnAlone) {
  const Side a = side({DType::bf16}, 300, 523, 1);
  const Side b = side({DType::f32, Scaling::none, false, true}, 523, 1100, 2);
  const auto kernels = fp32_kernels();
  const Mat whole = product(a, b, kernels.back().kernel);
  const auto same = [&](const Mat& c, int64_t row, int64_t column, const std::string& what) {
    for (int64_t r = 0; r < c.rows(); ++r)
      for (int64_t j = 0; j < c.cols(); ++j)
        ASSERT_EQ(c.code(r, j), whole.code(row + r, column + j)) << what << " " << r << ", " << j;
  };
  for (const int threads : {1, 2, 7}) {
    const Threads scope(threads);
    same(product(a, b, kernels.back().kernel), 0, 0, str(threads, " threads"));
  }
  // Packs one block and one chunk at a time, and three.
  for (const int64_t group : {int64_t{1}, int64_t{600000}})
    same(product(a, b, kernels.back().kernel, group), 0, 0, str("groups of ", group));
  const auto rows_of = [&](int64_t first, int64_t n) {
    Side part = a;
    part.rows = n;
    part.codes = Memory(DType::bf16, n, a.cols);
    const std::vector<uint8_t> dense = a.codes.dense();
    part.codes.put(dense.data() + first * a.cols * 2);
    return part;
  };
  for (const auto& [first, n] : {std::pair<int64_t, int64_t>{0, 1}, {299, 1}, {17, 7}, {100, 65}})
    same(product(rows_of(first, n), b, kernels.back().kernel), first, 0, str(n, " rows"));
  const Side few = rows_of(40, 70);
  Side some = b;
  some.cols = 97;
  some.codes = Memory(DType::f32, 97, b.rows, 5, 3);
  some.codes.put(b.codes.dense().data());
  for (const auto& [isa, kernel] : kernels) same(product(few, some, kernel), 40, 0, isa);
}

// An epilogue after a product, and the same formula on the product in memory.
struct Body {
  int64_t cols = 0;
  std::function<void(StepBuilder&, From)> build;
  std::vector<View> more;  // inputs from index 4 on; with `in_place` then the first output
  std::vector<Memory> out;
  bool in_place = false;
  std::vector<float> parameters;
};

// Two steps that differ only in the source of the product must write the same bytes.
void expect_same(const Side& a, const Side& b, const Body& body, const GemmKernel& kernel,
                 Precision precision, const std::string& what) {
  const std::vector<Memory> twin = body.out;
  const Mat c = product(a, b, kernel);
  StepBuilder fused("fused", body.cols, precision);
  body.build(fused, From::product);
  StepBuilder apart("apart", body.cols, precision);
  body.build(apart, From::tile);
  std::vector<View> in = inputs(a, b);
  in.insert(in.end(), body.more.begin(), body.more.end());
  const std::array<uint64_t, 5> random{11, 12, 13, 14, static_cast<uint64_t>(body.cols)};
  std::vector<View> out;
  std::vector<View> expected;
  for (const Memory& m : body.out) out.push_back(m.view());
  for (const Memory& m : twin) expected.push_back(m.view());
  const Step step = finish(fused, a, b);
  if (body.in_place) in.push_back(out[0]);
  run(*cpu::gemm_with(step, kernel), a.rows, in, out, body.parameters, random.data());
  in[0] = c.view();
  if (body.in_place) in.back() = expected[0];
  // Native formulas differ between the JIT and the interpreter.
  const Step apart_step = apart.finish();
  Attempt map = cpu::make_jit(apart_step, cpu::here());
  if (std::holds_alternative<Refusal>(map)) map = cpu::make_executor(apart_step, cpu::here());
  run(*std::get<0>(map), a.rows, in, expected, body.parameters, random.data());
  for (size_t i = 0; i < out.size(); ++i)
    ASSERT_EQ(body.out[i].differs(twin[i].dense(), str(what, " output ", i)), "");
}

Memory filled(DType d, int64_t rows, int64_t cols, unsigned seed, int64_t pad = 0) {
  Memory m(d, rows, cols, pad, 1);
  std::vector<uint8_t> bytes;
  for (const float v : numbers(static_cast<size_t>(rows * cols), seed, false)) {
    const uint32_t code = encode_ref(d, v);
    const auto* from = reinterpret_cast<const uint8_t*>(&code);
    bytes.insert(bytes.end(), from, from + info(d).bytes);
  }
  m.put(bytes.data());
  return m;
}

constexpr Size kBodySizes[] = {{1, 31, 40}, {7, 520, 33}, {70, 96, 65}, {300, 1056, 70}};

// Bias, gelu, dropout, accumulation into the output, and every kind of sum.
TEST(Gemm, BodyIsTheExecutors) {
  for (const Size& s : kBodySizes)
    for (const int threads : {1, 2, 7}) {
      const Threads scope(threads);
      const Side a = side({DType::bf16}, s.m, s.k, 1, 1);
      const Side b = side({DType::e4m3, Scaling::block128x128, false, true}, s.k, s.n, 2);
      const Memory bias = filled(DType::bf16, 1, s.n, 3);
      const Memory column = filled(DType::f32, s.m, 1, 4);
      Body body{.cols = s.n,
                .build = {},
                .more = {bias.view(), column.view()},
                .out = {},
                .in_place = true,
                .parameters = {0.75F}};
      body.out = {filled(DType::f32, s.m, s.n, 5, 2), Memory(DType::bf16, s.m, s.n, 1),
                  Memory(DType::f32, 1, s.n),         Memory(DType::f32, s.m, 1),
                  Memory(DType::f32, 1, 1),           Memory(DType::f32, 1, 1)};
      body.build = [&](StepBuilder& step, From from) {
        const Expr p = step.load({.from = from, .arg = 0});
        const Expr held = step.load({.from = From::tile, .arg = 6});
        const Expr y =
            call("gelu", p + step.load({.from = From::row, .arg = 4, .dtype = DType::bf16}));
        const Expr z =
            y * step.load({.from = From::column, .arg = 5}) +
            step.load({.from = From::parameter}) * step.load({.from = From::random, .arg = 1});
        step.store({To::tile, 0, DType::f32, {}}, held + y);
        step.store({To::tile, 1, DType::bf16, {}}, z);
        step.store({To::column_sum, 2, DType::f32, {}}, z);
        step.store({To::row_sum, 3, DType::f32, {}}, y);
        step.store({To::amax, 4, DType::f32, {}}, y);
        if (s.n < 600) step.store({To::sum, 5, DType::f32, {}}, p);
      };
      expect_same(a, b, body, fp32_kernels().back().kernel, Precision::strict, "body");
      if (HasFatalFailure()) return;
    }
}

// The pre-activation in bf16 and the gated result in every encoding, from both halves of a product.
TEST(Gemm, GatedBodiesAreEncoded) {
  const auto kernels = fp32_kernels();
  for (const Gate gate : {Gate::stacked, Gate::swapped, Gate::by1, Gate::by8, Gate::by32})
    for (const Scaling mode : {Scaling::delayed, Scaling::mxfp8, Scaling::block1x128})
      for (const Size& s : {Size{7, 40, 33}, Size{70, 552, 20}, Size{290, 1056, 40}}) {
        const int64_t h = s.n;
        if (!fits(gate, h)) continue;
        const Side a = side({DType::f32}, s.m, s.k, 1);
        const Side b = side({DType::f16, Scaling::none, false, true}, s.k, 2 * h, 2);
        const Memory scale = filled(DType::f32, 1, 1, 9);
        std::array<ColumnMap, 2> map{};
        if (const int64_t k = interleave(gate))
          map = {{{k, 2 * k, 0}, {k, 2 * k, k}}};
        else
          map = {{{1, 1, gated_column(gate, h, 0, 0)}, {1, 1, gated_column(gate, h, 1, 0)}}};
        Body body{.cols = h, .build = {}, .more = {scale.view()}, .out = {}, .parameters = {}};
        body.build = [&](StepBuilder& step, From from) {
          const Expr x = step.load({.from = from, .arg = 0, .columns = map[0]});
          const Expr y = step.load({.from = from, .arg = 0, .columns = map[1]});
          step.store({To::tile, 0, DType::bf16, map[0]}, x);
          step.store({To::tile, 0, DType::bf16, map[1]}, y);
          Operand o(DType::e4m3);
          o.format.scaling = mode;
          o.columnwise = true;
          const Piece piece{call("swiglu", x, y), {}};
          step.store(o, 1, 4, h, std::span(&piece, 1));
        };
        body.out.emplace_back(DType::bf16, s.m, 2 * h, 1);
        for (const bool column : {false, true}) {
          const ref::Size data = ref::data_size(mode, s.m, h, column);
          const ref::Size scales = ref::scale_size(mode, s.m, h, column);
          body.out.emplace_back(DType::e4m3, data.rows, data.cols, 2);
          body.out.emplace_back(mode == Scaling::mxfp8 ? DType::e8m0 : DType::f32, scales.rows,
                                scales.cols);
        }
        body.out.emplace_back();
        expect_same(a, b, body, kernels.back().kernel, Precision::native,
                    str("gate ", static_cast<int>(gate), " ", info(mode).name, " ", s.m));
        if (HasFatalFailure()) return;
      }
}

// The gradient of a weight: dy^T·x. The inner size is the number of rows of the call, also 0.
TEST(Gemm, WeightGradientHasTheRowsInside) {
  for (const int64_t rows : {0, 1, 5, 300}) {
    const Side dy = side({DType::bf16, Scaling::none, false, true}, 33, rows, 1);
    const Side x = side({DType::bf16}, rows, 70, 2);
    StepBuilder build("dw", 70, Precision::strict);
    build.store({To::tile, 0, DType::f32, {}},
                build.load({.from = From::product}) + build.load({.from = From::tile, .arg = 4}));
    const Step step = finish(build, dy, x, true);
    const Memory held = filled(DType::f32, 33, 70, 3);
    const Memory dw = held;
    std::vector<View> in = inputs(dy, x);
    in.push_back(dw.view());
    run(*std::get<0>(cpu::make_gemm(step, cpu::here())), rows, in, {dw.view()});
    const std::vector<uint8_t> before = held.dense();
    const std::vector<uint8_t> after = dw.dense();
    for (int64_t r = 0; r < 33; ++r)
      for (int64_t c = 0; c < 70; ++c) {
        double exact = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < rows; ++k) {
          exact += dy.at(r, k) * x.at(k, c);
          magnitude += std::fabs(dy.at(r, k) * x.at(k, c));
        }
        float old = 0;
        float got = 0;
        std::memcpy(&old, before.data() + 4 * (r * 70 + c), 4);
        std::memcpy(&got, after.data() + 4 * (r * 70 + c), 4);
        ASSERT_NEAR(got, exact + old, 0x1p-22 * (magnitude + std::fabs(old)) * 4) << rows;
      }
  }
}

// The check of `tenon check`: correct results pass, a result with too large an error fails.
TEST(Gemm, VerifyBoundsProducts) {
  for (const Precision precision : {Precision::strict, Precision::native})
    for (const Form& fb :
         {Form{DType::bf16, Scaling::none, false, true}, Form{DType::e4m3, Scaling::delayed},
          Form{DType::e4m3, Scaling::mxfp8}}) {
      const Side a = side({DType::bf16}, 33, 65, 1);
      const Side b = side(fb, 65, 40, 2);
      StepBuilder build("verified", 20, precision);
      const Expr x = build.load({.from = From::product});
      const Expr y = build.load({.from = From::product, .columns = {1, 1, 20}});
      build.store({To::tile, 0, DType::f16, {}}, call("swiglu", x, y));
      build.store({To::tile, 1, DType::f32, {}}, x);
      build.store({To::column_sum, 2, DType::f32, {}}, y);
      const Step step = finish(build, a, b);
      Mat c(DType::f16, 33, 20);
      Mat p(DType::f32, 33, 20);
      const Mat sums(DType::f32, 1, 20);
      const std::vector<View> in = inputs(a, b);
      const std::vector<View> out{c.view(), p.view(), sums.view()};
      run(*std::get<0>(cpu::make_gemm(step, cpu::here())), 33, in, out);
      const RunArgs args{.rows = 33, .in = in, .out = out, .parameters = {}};
      EXPECT_EQ(verify(step, args), std::nullopt);
      p.set(32, 19, p.at(32, 19) + 0x1p-10F);
      EXPECT_NE(verify(step, args), std::nullopt);
    }
}

TEST(Gemm, NothingToDo) {
  for (const Size& s : {Size{0, 5, 7}, Size{3, 0, 7}, Size{0, 0, 0}, Size{300, 0, 4}}) {
    const Side a = side({}, s.m, s.k, 1);
    const Side b = side({}, s.k, s.n, 2);
    product(a, b, fp32_kernels().back().kernel);
  }
}

// Values for bf16 matrix units. Their products are exact, so the same bound holds.
TEST(Gemm, Bf16Units) {
  const std::vector<Form> all{{DType::bf16},
                              {DType::bf16, Scaling::none, true},
                              {DType::bf16, Scaling::none, false, true},
                              {DType::e4m3, Scaling::delayed},
                              {DType::e5m2, Scaling::current, true},
                              {DType::e4m3, Scaling::current, false, true},
                              {DType::e4m3, Scaling::delayed, true, true}};
  for (const auto& [isa, kernel] : bf16_kernels()) {
    for (size_t i = 0; i < all.size(); ++i)
      for (size_t j = 0; j < all.size(); ++j) {
        if (!chosen()) continue;
        const Size s = kSizes[(i + 3 * j) % std::size(kSizes)];
        const Side a = side(all[i], s.m, s.k, 1, static_cast<int64_t>(i % 3), i % 5);
        const Side b = side(all[j], s.k, s.n, 2, static_cast<int64_t>(j % 2), j % 4);
        expect_product(a, b, product(a, b, kernel),
                       str(isa, " ", all[i].text(), " * ", all[j].text()));
        if (HasFatalFailure()) return;
      }
    const Side a = side({DType::bf16}, 300, 1301, 1);
    const Side b = side({DType::bf16, Scaling::none, false, true}, 1301, 520, 2);
    const Mat whole = product(a, b, kernel);
    expect_product(a, b, whole, isa);
    Side first = a;
    first.rows = 7;
    const Mat few = product(first, b, kernel);
    EXPECT_TRUE(product(a, b, kernel, 1).same_bytes(whole));
    for (int64_t r = 0; r < 7; ++r)
      for (int64_t c = 0; c < b.cols; ++c) ASSERT_EQ(few.code(r, c), whole.code(r, c));
  }
}

}  // namespace
}  // namespace tenon::test
