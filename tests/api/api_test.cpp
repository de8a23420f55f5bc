// Tests of the C++ API against float64 formulas and plain loops, and tests of invalid calls.
#include <cstdlib>
#include <functional>

#include "choice/backends.h"
#include "lazy/builder.h"
#include "runtime/execute.h"
#include "step/split.h"
#include "support/support.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tenon::test {
namespace {

// The relative error of one rounding to the format.
Real unit(DType d) { return d == DType::f32 ? 0x1p-24L : d == DType::f16 ? 0x1p-11L : 0x1p-8L; }

// For |x| < 6 the error of every built-in is at most this many fp32 units of its largest term.
constexpr Real kUnits = 96;

void expect_near(float got, Real exact, Real size, DType d, const std::string& what) {
  // Subnormals of f16 are multiples of 2^-24.
  const Real slack = kUnits * 0x1p-24L * size + (d == DType::f32 ? 0 : unit(d) * std::fabs(exact)) +
                     (d == DType::f16 ? 0x1p-25L : 0);
  if (!(std::fabs(got - exact) <= slack))
    ADD_FAILURE() << what << ": got " << got << ", exact " << static_cast<double>(exact)
                  << ", allowed " << static_cast<double>(slack);
}

Real derivative(const Hand& f, Real a, Real b, bool of_b) {
  constexpr Real h = 1e-6L;
  return of_b ? (f(a, b + h) - f(a, b - h)) / (2 * h) : (f(a + h, b) - f(a - h, b)) / (2 * h);
}

// Moves a value away from kinks (0, ±2, ±3), so that difference quotients are valid.
float away(float v) {
  for (const float kink : {0.0F, 2.0F, -2.0F, 3.0F, -3.0F})
    if (std::fabs(v - kink) < 0.05F) return kink + 0.125F;
  return std::fmod(v, 5.5F);
}

// Tests forward and backward of one row. `turn` selects dtypes, layout, bias and scale.
void check(const Row& row, bool is_scaled, size_t turn, int64_t m = 9, int64_t h = 32) {
  const auto dtype = [&](size_t i) { return kPlain[(turn + i) % 3]; };
  const Gate gate = row.inputs == 2 ? kGates[turn % 6] : Gate::separate;
  const bool apart = row.inputs == 2 && gate == Gate::separate;
  const bool packed = row.inputs == 2 && !apart;
  const bool biased = turn % 3 != 0;
  const int64_t wide = packed ? 2 * h : h;
  const int64_t bias_wide = row.inputs * h;
  Mat x(dtype(0), m, wide, turn % 2, turn % 4), b(dtype(1), m, h), bias(dtype(2), 1, bias_wide),
      scale(dtype(1), m, 1), grad(dtype(2), m, h, 1);
  x.fill(1), b.fill(2), bias.fill(3, false, 0.5F), scale.fill(4), grad.fill(5);
  // The sums x + bias must not be near kinks. Powers of two make them exact in every dtype.
  for (int64_t c = 0; c < bias_wide; ++c) bias.set(0, c, biased ? (c % 2 ? 0.5F : -0.25F) : 0.0F);
  const auto column = [&](int half, int64_t c) {
    return packed ? gated_column(gate, h, half, c) : c;
  };
  const auto bias_at = [&](int half, int64_t c) {
    return bias.at(0, row.inputs == 1 ? c : apart ? half * h + c : gated_column(gate, h, half, c));
  };
  for (int64_t r = 0; r < m; ++r)
    for (int half = 0; half < row.inputs; ++half)
      for (int64_t c = 0; c < h; ++c) {
        Mat& from = half && apart ? b : x;
        const float target = away(std::round(from.at(r, column(half, c)) * 16) / 16);
        from.set(r, column(half, c), target - bias_at(half, c));
      }
  const Activation f = is_scaled ? scaled(activation(row.act)) : activation(row.act);
  const View no;
  Mat y(dtype(1), m, h), dx(dtype(2), m, wide, 2), db(dtype(0), m, h),
      dbias(dtype(0), 1, bias_wide), dscale(dtype(2), m, 1), amax(DType::f32, 1, 1);
  const Layout layout = packed ? layout_of(gate) : Layout{};
  forward(f,
          {.x = x.view(),
           .b = apart ? b.view() : no,
           .bias = biased ? bias.view() : no,
           .scale = is_scaled ? scale.view() : no,
           .y = y.view(),
           .layout = layout},
          kStrict);
  backward(f,
           {.grad = grad.view(),
            .x = x.view(),
            .b = apart ? b.view() : no,
            .bias = biased ? bias.view() : no,
            .scale = is_scaled ? scale.view() : no,
            .dx = dx.view(),
            .db = apart ? db.view() : no,
            .dbias = dbias.view(),
            .dscale = is_scaled ? dscale.view() : no,
            .amax = amax.view(),
            .layout = layout},
           kStrict);
  for (const Mat* out : {&y, &dx, &db, &dbias, &dscale, &amax}) EXPECT_TRUE(out->guards_hold());
  std::vector<Real> sums(static_cast<size_t>(bias_wide)), sizes(static_cast<size_t>(bias_wide));
  Real most = 0;
  for (int64_t r = 0; r < m; ++r) {
    Real row_sum = 0, row_size = 0;
    const Real s = is_scaled ? scale.at(r, 0) : 1;
    for (int64_t c = 0; c < h; ++c) {
      const std::string where = str(row.act, " turn ", turn, " (", r, ", ", c, ")");
      const Real va = Real(x.at(r, column(0, c))) + bias_at(0, c);
      const Real vb =
          row.inputs == 2 ? Real((apart ? b : x).at(r, column(1, c))) + bias_at(1, c) : 0;
      const Real value = row.f(va, vb), g = grad.at(r, c);
      const Real size = (1 + std::fabs(va)) * (1 + std::fabs(vb)) * (1 + std::fabs(s));
      expect_near(y.at(r, c), value * s, std::fabs(value * s) + 1e-3L * size, y.dtype(), where);
      row_sum += g * value, row_size += std::fabs(g) * size;
      for (int half = 0; half < row.inputs; ++half) {
        const Real d = g * s * derivative(row.f, va, vb, half == 1);
        const Mat& to = half && apart ? db : dx;
        const Real extent = std::fabs(g) * size * 2;
        expect_near(to.at(r, column(half, c)), d, extent, to.dtype(), "d " + where);
        const auto at = static_cast<size_t>(row.inputs == 1 ? c
                                            : apart         ? half * h + c
                                                            : gated_column(gate, h, half, c));
        sums[at] += d, sizes[at] += extent;
        most = std::max(most, std::fabs(d));
      }
    }
    if (is_scaled)
      expect_near(dscale.at(r, 0), row_sum, row_size, dscale.dtype(), str(row.act, " dscale ", r));
  }
  for (size_t c = 0; c < sums.size(); ++c)
    expect_near(dbias.at(0, static_cast<int64_t>(c)), sums[c], sizes[c], dbias.dtype(),
                str(row.act, " turn ", turn, " dbias ", c));
  expect_near(amax.at(0, 0), most, 40 * (1 + most), DType::f32, str(row.act, " amax"));
}

TEST(Api, EveryActivationAgainstFloat64) {
  size_t turn = 0;
  for (const Row& row : rows())
    for (int k = 0; k < 6; ++k) {
      check(row, false, turn++);
      if (HasFailure()) return;
    }
}

TEST(Api, ScaledFormsAgainstFloat64) {
  size_t turn = 1;
  for (const Row& row : rows()) {
    check(row, true, turn, 5, 64);
    turn += 5;
    if (HasFailure()) return;
  }
}

TEST(Api, DerivativesAtKinks) {
  const auto slope = [](const char* act, float at) {
    Mat x(DType::f32, 1, 1), g(DType::f32, 1, 1), dx(DType::f32, 1, 1);
    x.set(0, 0, at), g.set(0, 0, 1);
    backward(activation(act), {.grad = g.view(), .x = x.view(), .dx = dx.view()});
    return dx.at(0, 0);
  };
  EXPECT_EQ(slope("relu", 0), 0.0F);
  EXPECT_EQ(slope("relu", 0x1p-149F), 1.0F);
  EXPECT_EQ(slope("abs(x)", 0), 0.0F);
  EXPECT_EQ(slope("leaky_relu", 0), 0.01F);
  EXPECT_EQ(slope("max(x, 1)", 1), 1.0F);
  EXPECT_EQ(slope("max(1, x)", 1), 0.0F);
  EXPECT_EQ(slope("min(x, 1)", 1), 1.0F);
  EXPECT_EQ(slope("min(1, x)", 1), 0.0F);
}

TEST(Api, ARunTimeActivationFromAFunctionWithParameters) {
  define({.name = "api_mine",
          .inputs = 1,
          .parameters = {{"k", 2.0F, 0.5F, 8.0F}},
          .body = [](const Args& in) { return in.x * tanh(in["k"] * in.x); },
          .aliases = {}});
  const Row plain{"api_mine(k=0.75)", 1, [](Real x, Real) { return x * std::tanh(0.75L * x); }};
  const Row gate{"gated(api_mine)", 2, [](Real a, Real b) { return a * std::tanh(2 * a) * b; }};
  for (size_t turn = 0; turn < 6; ++turn) check(plain, turn % 2, turn), check(gate, false, turn);
  expect_error([] { activation("api_mine(k=9)"); }, Code::invalid_argument, {"api_mine", "k = 9"});
}

// eager: one fused call equals op-by-op calls with the chain's dtype between them.
TEST(Api, EagerEqualsOpByOp) {
  const Fused add = fuse([](Expr x, Expr b) { return x + b; });
  for (const DType d : {DType::bf16, DType::f16, DType::f32})
    for (const char* act : {"gelu", "mish", "srelu"}) {
      const Mat x = Mat(d, 67, 41).fill(1), bias = Mat(d, 1, 41).fill(2),
                g = Mat(d, 67, 41).fill(3);
      const Mat y(d, 67, 41), dx(d, 67, 41), dbias(DType::f32, 1, 41);
      const Activation f = activation(act);
      forward(f, {.x = x.view(), .bias = bias.view(), .y = y.view()}, kEager);
      backward(f,
               {.grad = g.view(),
                .x = x.view(),
                .bias = bias.view(),
                .dx = dx.view(),
                .dbias = dbias.view()},
               kEager);
      const Mat z(d, 67, 41), y2(d, 67, 41), dz(d, 67, 41);
      add.forward({x.view(), bias.view()}, z.view(), kStrict);
      forward(f, {.x = z.view(), .y = y2.view()}, kStrict);
      backward(f, {.grad = g.view(), .x = z.view(), .dx = dz.view()}, kStrict);
      EXPECT_TRUE(y.same_bytes(y2)) << act << " " << info(d).name;
      EXPECT_TRUE(dx.same_bytes(dz)) << act << " " << info(d).name;
      for (int64_t c = 0; c < 41; ++c) {
        std::vector<float> column;
        for (int64_t r = 0; r < 67; ++r) column.push_back(dz.at(r, c));
        expect_element(dbias, 0, c, tree(column), act);
      }
    }
}

TEST(Api, FusedFunctionsAgainstPlainLoops) {
  const int64_t m = 37, k = 19;
  const Mat x = Mat(DType::f32, m, k).fill(1), row = Mat(DType::f32, 1, k).fill(2),
            col = Mat(DType::f32, m, 1).fill(3), one = Mat(DType::f32, 1, 1).fill(4),
            g = Mat(DType::f32, m, k).fill(5);
  const Mat y(DType::f32, m, k), dx(DType::f32, m, k), drow(DType::f32, 1, k),
      dcol(DType::f32, m, 1), done(DType::f32, 1, 1);
  const std::vector<std::string> names{"x", "row", "col", "one"};
  const Fused by_text = fuse_text("x*row + col*one", names);
  const Fused by_code = fuse([](Expr a, Expr b, Expr c, Expr d) { return a * b + c * d; });
  for (const Fused* f : {&by_text, &by_code}) {
    f->forward({x.view(), row.view(), col.view(), one.view()}, y.view());
    f->backward({x.view(), row.view(), col.view(), one.view()}, g.view(),
                {dx.view(), drow.view(), dcol.view(), done.view()});
    std::vector<float> total;
    for (int64_t r = 0; r < m; ++r) {
      std::vector<float> line;
      for (int64_t c = 0; c < k; ++c) {
        expect_element(y, r, c, x.at(r, c) * row.at(0, c) + col.at(r, 0) * one.at(0, 0), "y");
        expect_element(dx, r, c, g.at(r, c) * row.at(0, c), "dx");
        line.push_back(g.at(r, c) * one.at(0, 0));
        total.push_back(g.at(r, c) * col.at(r, 0));
      }
      expect_element(dcol, r, 0, tree(line), "dcol");
    }
    for (int64_t c = 0; c < k; ++c) {
      std::vector<float> column;
      for (int64_t r = 0; r < m; ++r) column.push_back(g.at(r, c) * x.at(r, c));
      expect_element(drow, 0, c, tree(column), "drow");
    }
    expect_element(done, 0, 0, tree(total), "done");
  }
  // One, two and three arguments. Gradients that are not requested are omitted.
  fuse([](Expr a) { return a * a; }).forward({x.view()}, y.view());
  expect_element(y, 3, 4, x.at(3, 4) * x.at(3, 4), "one argument");
  const Fused two = fuse([](Expr a, Expr b) { return a - b; });
  two.backward({x.view(), one.view()}, g.view(), {View{}, done.view()});
  std::vector<float> negative;
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < k; ++c) negative.push_back(-g.at(r, c));
  expect_element(done, 0, 0, tree(negative), "two arguments");
  fuse([](Expr a, Expr b, Expr c) {
    return a / b + c;
  }).forward({x.view(), col.view(), row.view()}, y.view());
  expect_element(y, 5, 6, x.at(5, 6) / col.at(5, 0) + row.at(0, 6), "three arguments");
  const std::vector<View> shapes{matrix(nullptr, DType::bf16, m, k)};
  fuse([](Expr a) { return a * a; }).warmup(shapes, shapes[0]);
}

TEST(Api, NamedFunctions) {
  const int64_t m = 33, k = 17;
  const Mat x = Mat(DType::f32, m, k).fill(1), bias = Mat(DType::f32, 1, k).fill(2),
            g = Mat(DType::f32, m, k).fill(3), zero = Mat(DType::f32, 1, k).fill(0, false, 0);
  for (const Row& row : rows()) {
    const std::string act = row.act;
    if (act != "gelu" && act != "silu" && act != "relu" && act != "qgelu" && act != "srelu")
      continue;
    const Mat y(DType::f32, m, k), yb(DType::f32, m, k), d(DType::f32, m, k), db(DType::f32, m, k),
        dbias(DType::f32, 1, k);
    run(act, {x.view()}, {y.view()});
    run("bias_" + act, {x.view(), bias.view()}, {yb.view()});
    run("d" + act, {g.view(), x.view()}, {d.view()});
    run("bgrad_d" + act, {g.view(), x.view(), bias.view()}, {dbias.view(), db.view()});
    for (int64_t c = 0; c < k; ++c) {
      std::vector<float> column;
      for (int64_t r = 0; r < m; ++r) {
        const Real v = x.at(r, c), w = x.at(r, c) + bias.at(0, c), s = std::fabs(g.at(r, c));
        expect_near(y.at(r, c), row.f(v, 0), 1 + v * v, DType::f32, act);
        expect_near(yb.at(r, c), row.f(w, 0), 1 + w * w, DType::f32, "bias_" + act);
        expect_near(d.at(r, c), g.at(r, c) * derivative(row.f, v, 0, false), s * (1 + v * v),
                    DType::f32, "d" + act);
        expect_near(db.at(r, c), g.at(r, c) * derivative(row.f, w, 0, false), s * (1 + w * w),
                    DType::f32, "bgrad_d" + act);
        column.push_back(db.at(r, c));
      }
      expect_element(dbias, 0, c, tree(column), "dbias");
    }
  }
  expect_error([&] { run("gelo", {x.view()}, {x.view()}); }, Code::invalid_argument,
               {"gelo", "did you mean 'gelu'"});
  expect_error(
      [&] {
        run("gelu", {x.view(), x.view()}, {x.view()});
      },
      Code::invalid_argument, {"gelu", "2 inputs", "(x -> y)"});
  expect_error([&] { run("bias_swiglu", {x.view()}, {x.view()}); }, Code::invalid_argument,
               {"bias_swiglu"});
}

TEST(Api, L2NormalizationAgainstFloat64) {
  const int64_t m = 11, k = 1031;
  const Mat x = Mat(DType::f32, m, k).fill(1), g = Mat(DType::f32, m, k).fill(2);
  const Mat y(DType::f32, m, k), y2(DType::f32, m, k), r(DType::f32, m, 1), dx(DType::f32, m, k);
  run("l2normalization", {x.view()}, {y.view()});
  run("l2normalization_fwd", {x.view()}, {y2.view(), r.view()});
  run("l2normalization_bwd", {g.view(), x.view(), r.view()}, {dx.view()});
  EXPECT_TRUE(y.same_bytes(y2));
  for (int64_t i = 0; i < m; ++i) {
    Real square = 0, product = 0;
    for (int64_t c = 0; c < k; ++c)
      square += Real(x.at(i, c)) * x.at(i, c), product += Real(x.at(i, c)) * g.at(i, c);
    const Real root = 1 / std::sqrt(square + 1e-6F);
    expect_near(r.at(i, 0), root, root, DType::f32, "r");
    for (int64_t c = 0; c < k; ++c) {
      const Real v = x.at(i, c), s = g.at(i, c);
      expect_near(y.at(i, c), v * root, std::fabs(v * root), DType::f32, "l2");
      expect_near(dx.at(i, c), root * (s - v * root * root * product),
                  root * (std::fabs(s) + std::fabs(v) * root), DType::f32, "l2 bwd");
    }
  }
}

TEST(Api, LaterCallsFindTheirStep) {
  const Mat x = Mat(DType::f32, 3, 24).fill(1), g = Mat(DType::f32, 3, 24).fill(2);
  const Mat y(DType::f32, 3, 24), r = Mat(DType::f32, 3, 1).fill(3);
  const Activation f = activation("gelu");
  const Fused square("square", 1, [](std::span<const Expr> in) { return in[0] * in[0]; });
  Random state{.seed = 1, .columns = 24};
  const std::array<std::function<void()>, 6> calls{
      [&] { forward(f, {.x = x.view(), .y = y.view()}); },
      [&] { backward(f, {.grad = g.view(), .x = x.view(), .dx = y.view()}); },
      [&] { square.forward(std::array{x.view()}, y.view()); },
      [&] { bias_dropout_add({.x = x.view(), .y = y.view(), .p = 0.5, .random = &state}); },
      [&] { l2_normalization(x.view(), y.view(), r.view()); },
      [&] { l2_normalization_backward(g.view(), x.view(), r.view(), y.view()); }};
  // The graphs stay alive, so that a step that is built again has a graph at another address.
  std::vector<std::shared_ptr<const Graph>> graphs;
  set_observer([&](const Step& step, const RunArgs&, const Options&, const auto& run) {
    graphs.push_back(step.graph);
    run();
  });
  for (const auto& call : calls) {
    call();
    call();
  }
  set_observer({});
  ASSERT_EQ(graphs.size(), 2 * calls.size());
  for (size_t i = 0; i < graphs.size(); i += 2) EXPECT_EQ(graphs[i], graphs[i + 1]) << i / 2;
}

// The variable is read once, so each value needs its own process.
TEST(ApiDeathTest, TheLogHasALineForEachStep) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run_with = [](const char* value) {
    const Mat x = Mat(DType::bf16, 8, 16).fill(1), y(DType::bf16, 8, 16);
    setenv("TENON_LOG", value, 1);
    forward(activation("silu"), {.x = x.view(), .y = y.view()});
    run("l2normalization", {x.view()}, {y.view()});
    std::exit(0);
  };
  EXPECT_EXIT(run_with("1"), ::testing::ExitedWithCode(0),
              "^tenon: map silu [^\n]* rows=8 maker=(jit|executor) bytes=512 "
              "time_us=[^\n]*\ntenon: [^\n]*\n$");
  EXPECT_EXIT(run_with("0"), ::testing::ExitedWithCode(0), "^$");
}

// The two steps of a split call also write and read the memory between them.
TEST(ApiDeathTest, TheLogCountsTheBytesOfBothSteps) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  StepBuilder build("square", 8, Precision::native);
  const Expr product = build.load({.from = Load::From::product});
  build.store({}, product * product);
  Step step = build.finish();
  step.head = Gemm{{.arg = 0}, {.arg = 1}, 8, 3};
  const Split split = split_after_product(step, [](const Step&, DType) { return false; });
  const Way way{.maker = "halves",
                .halves = std::make_shared<const Way::Halves>(
                    Way::Halves{split, kernel_for(split.first, Device::cpu).kernel,
                                kernel_for(split.second, Device::cpu).kernel})};
  const Chosen chosen{
      std::make_shared<const Choice>(step, backend_for(Device::cpu), std::vector{way},
                                     std::vector<Choice::Refused>{}),
      way.maker};
  const auto logged = [&] {
    const Mat a = Mat(DType::f32, 5, 3).fill(1), b = Mat(DType::f32, 3, 8).fill(2);
    const Mat y(DType::f32, 5, 8);
    const std::vector<View> in{a.view(), b.view()}, out{y.view()};
    setenv("TENON_LOG", "1", 1);
    execute(step, chosen, {.rows = 5, .in = in, .out = out, .parameters = {}}, {});
    std::exit(0);
  };
  // a, b, and a product that is written, read, squared and written.
  EXPECT_EXIT(logged(), ::testing::ExitedWithCode(0),
              str("^tenon: gemm square [^\n]* maker=halves bytes=", 4 * (15 + 24 + 3 * 40), " "));
}

#if defined(__x86_64__)
// Parsing and constant folding use IEEE arithmetic in any rounding mode of the caller.
TEST(Api, ForeignRoundingModesChangeNothing) {
  const Mat x = Mat(DType::f32, 9, 33).fill(1);
  const auto result = [&](unsigned mode) {
    const Mat y(DType::f32, 9, 33);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(mode);
    const Activation f = activation("x*(-1/3) + x*(-1/7) - 0.1");
    forward(f, {.x = x.view(), .y = y.view()}, kStrict);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & ~0x3fU, mode & ~0x3fU);
    return y;
  };
  EXPECT_TRUE(result(0x1f80U).same_bytes(result(0x1f80U | 0x8040U | 0x4000U)));
}
#endif

// Invalid calls must not change these outputs.
struct Bad {
  Mat x = Mat(DType::f32, 6, 8).fill(1), g = Mat(DType::f32, 6, 8).fill(2),
      half = Mat(DType::f32, 6, 4).fill(3), row = Mat(DType::f32, 1, 8).fill(4),
      column = Mat(DType::f32, 6, 1).fill(5);
  Mat y{DType::f32, 6, 8}, y4{DType::f32, 6, 4}, dx{DType::f32, 6, 8}, db{DType::f32, 6, 4},
      dbias{DType::f32, 1, 8}, dscale{DType::f32, 6, 1}, amax{DType::f32, 1, 1};

  void fails(const char* act, const Forward& call, std::initializer_list<std::string_view> parts,
             Code code = Code::invalid_argument) const {
    expect_error([&] { forward(activation(act), call); }, code, parts);
    untouched();
  }
  void fails(const char* act, const Backward& call, std::initializer_list<std::string_view> parts,
             Code code = Code::invalid_argument) const {
    expect_error([&] { backward(activation(act), call); }, code, parts);
    untouched();
  }
  void untouched() const {
    for (const Mat* m : {&y, &y4, &dx, &db, &dbias, &dscale, &amax})
      EXPECT_TRUE(m->untouched()) << "an output was written";
  }
};

View cut(View v, int64_t rows, int64_t cols) {
  v.rows = rows, v.cols = cols;
  return v;
}

TEST(ApiErrors, NamesParametersAndFormulas) {
  const auto bad = [](const std::string& text, std::initializer_list<std::string_view> parts) {
    expect_error([&] { activation(text); }, Code::invalid_argument, parts);
  };
  bad("gelo", {"'gelo'", "not known", "did you mean 'gelu'", "tenon list"});
  bad("", {"empty"});
  bad("clamped_swiglu(limit=0)", {"clamped_swiglu", "limit = 0", "outside"});
  bad("clamped_swiglu(limit=-1)", {"limit = -1"});
  bad("clamped_swiglu(alpha=inf)", {"alpha = inf"});
  bad("situglu(beta1=0)", {"beta1 = 0"});
  bad("elu(alpha=nan)", {"alpha = nan"});
  bad("elu(beta=1)", {"elu", "no parameter 'beta'", "alpha"});
  bad("relu(slope=1)", {"relu", "no parameter 'slope'", "none"});
  bad("elu(alpha=1e99)", {"alpha", "1e99", "fp32"});
  bad("gated(swiglu)", {"gated(swiglu)", "unary"});
  bad("scaled(scaled(relu))", {"scaled already"});
  bad("x + q", {"line 1, column 5", "'q'", "q = <number>"});
  bad("x + a", {"mixes x with a or b"});
  bad(std::string(5000, 'x'), {"5000 bytes", "4096"});
  bad("x" + std::string(3000, '+'), {"column"});
  bad(std::string(80, '(') + "x" + std::string(80, ')'), {"64 levels"});
  std::string wide = "x";
  for (int i = 0; i < 600; ++i) wide += "+" + std::to_string(i);
  bad(wide, {"512 nodes"});
  Activation out_of_range = activation("clamped_swiglu");
  out_of_range.parameters[0].value = -1;
  const Bad b;
  expect_error([&] { forward(out_of_range, {.x = b.x.view(), .y = b.y4.view()}); },
               Code::invalid_argument, {"limit = -1", "outside"});
  b.untouched();
  expect_error([&] { forward(Activation{}, {.x = b.x.view(), .y = b.y.view()}); },
               Code::invalid_argument, {"no formula"});
  expect_error([] { define("gelu", "x"); }, Code::invalid_argument, {"gelu", "built in"});
  expect_error([] { define("exp", "x"); }, Code::invalid_argument, {"exp", "word"});
  expect_error([] { define("9lives", "x"); }, Code::invalid_argument, {"9lives", "not a name"});
}

TEST(ApiErrors, ArityShapesAndLayouts) {
  const Bad b;
  const View x = b.x.view(), y = b.y.view(), y4 = b.y4.view();
  b.fails("swiglu", Forward{.x = cut(x, 6, 7), .y = cut(y, 6, 3)}, {"swiglu", "7 columns", "even"});
  b.fails("relu", Forward{.x = x, .b = x, .y = y}, {"relu", "b is given", "gated(relu)"});
  b.fails("relu", Forward{.x = x, .y = y, .layout = Layout::swapped()}, {"relu", "layout"});
  b.fails("swiglu", Forward{.x = x, .y = y4, .layout = Layout::interleaved(3)},
          {"interleaved(3)", "divisible by 3"});
  b.fails("swiglu", Forward{.x = x, .y = y4, .layout = Layout::interleaved(0)}, {"at least 1"});
  b.fails("swiglu",
          Forward{.x = b.half.view(), .b = b.half.view(), .y = y4, .layout = Layout::swapped()},
          {"layout", "two tensors"});
  b.fails("swiglu", Forward{.x = x, .y = y}, {"y is 6x8", "must be 6x4"});
  b.fails("swiglu", Forward{.x = x, .b = b.half.view(), .y = y}, {"b is 6x4", "6x8"});
  b.fails("relu", Forward{.x = x, .y = cut(y, 5, 8)}, {"y is 5x8", "must be 6x8"});
  b.fails("relu", Forward{.x = x, .bias = cut(b.row.view(), 1, 7), .y = y},
          {"bias is 1x7", "must be 1x8"});
  b.fails("relu", Forward{.x = x, .scale = b.column.view(), .y = y}, {"scale is given", "scaled("});
  b.fails("scaled(relu)", Forward{.x = x, .y = y}, {"needs scale"});
  b.fails("scaled(relu)", Forward{.x = x, .scale = cut(b.column.view(), 5, 1), .y = y},
          {"scale is 5x1", "6x1"});
  b.fails("relu", Forward{.x = x, .y = y, .amax = cut(b.dbias.view(), 1, 2)}, {"amax is 1x2"});
  const Mat half(DType::f16, 1, 1);
  b.fails("relu", Forward{.x = x, .y = y, .amax = half.view()}, {"amax is f16", "f32"});

  const View g = b.g.view(), dx = b.dx.view();
  b.fails("relu", Backward{.grad = g, .x = x}, {"relu backward", "no output"});
  b.fails("relu", Backward{.grad = cut(g, 6, 7), .x = x, .dx = dx}, {"grad is 6x7", "6x8"});
  b.fails("relu", Backward{.grad = g, .x = x, .dx = cut(dx, 6, 7)}, {"dx is 6x7"});
  b.fails("swiglu", Backward{.grad = cut(g, 6, 4), .x = x, .dx = dx, .db = b.db.view()},
          {"db is given", "dx holds both"});
  b.fails("relu", Backward{.grad = g, .x = x, .dx = dx, .dbias = cut(b.dbias.view(), 1, 7)},
          {"dbias is 1x7"});
  b.fails("relu", Backward{.grad = g, .x = x, .dx = dx, .dscale = b.dscale.view()},
          {"dscale is given", "scaled("});
  b.fails("scaled(relu)",
          Backward{.grad = g,
                   .x = x,
                   .scale = b.column.view(),
                   .dx = dx,
                   .dscale = cut(b.dscale.view(), 5, 1)},
          {"dscale is 5x1"});
}

TEST(ApiErrors, Views) {
  const Bad b;
  const View y = b.y.view();
  const auto x = [&](auto change) {
    View v = b.x.view();
    change(v);
    return Forward{.x = v, .y = y};
  };
  b.fails("relu", x([](View& v) { v.data = nullptr; }), {"x is 6x8", "null"});
  b.fails("relu", x([](View& v) { v.rows = -1; }), {"x is -1x8", "negative"});
  b.fails("relu", x([](View& v) { v.cols = -8; }), {"-8", "negative"});
  b.fails("relu", x([](View& v) { v.stride = 7; }), {"stride 7", "8 columns", "at least 8"});
  b.fails("relu", x([](View& v) { v.dtype = DType::e4m3; }), {"x is e4m3", "f32, f16 or bf16"},
          Code::unsupported);
  b.fails("relu", x([](View& v) { v.dtype = static_cast<DType>(77); }), {"77", "dtype"});
  b.fails("relu", x([](View& v) { v.rows = INT64_MAX; }), {"does not fit"});
  b.fails("relu", x([](View& v) { v.stride = INT64_MAX / 2; }), {"does not fit"});
  b.fails("relu", x([](View& v) { v.rows = 1, v.cols = INT64_MAX; }), {"x"});
  b.fails("relu", Forward{.x = b.x.view(), .y = View{nullptr, DType::f32, 6, 8, 8}}, {"y", "null"});
}

TEST(ApiErrors, OptionsThatDoNotExist) {
  std::vector<float> x(4, 1), y(4, 7);
  const auto view = [](std::vector<float>& v) { return matrix(v.data(), DType::f32, 2, 2); };
  const auto f = activation("relu");
  EXPECT_THROW(forward(f, {.x = view(x), .y = view(y)}, {.device = static_cast<Device>(7)}), Error);
  EXPECT_THROW(forward(f, {.x = view(x), .y = view(y)}, {.precision = static_cast<Precision>(7)}),
               Error);
  EXPECT_THROW(forward(activation("glu"), {.x = view(x),
                                           .y = matrix(y.data(), DType::f32, 2, 1),
                                           .layout = {static_cast<Layout::Kind>(9), 1}}),
               Error);
  EXPECT_THROW(fuse_text("tanh", {}), Error);
  Activation changed = activation("x*p; p = 2");
  changed.parameters.clear();
  EXPECT_THROW(forward(changed, {.x = view(x), .y = view(y)}), Error);
  EXPECT_EQ(y, std::vector<float>(4, 7));
}

TEST(ApiErrors, Overlaps) {
  Mat big(DType::f32, 12, 32);
  big.fill(9);
  const Mat before = big;
  const auto at = [&](int64_t r, int64_t c, int64_t rows, int64_t cols) {
    return matrix(static_cast<float*>(big.view().data) + r * 32 + c, DType::f32, rows, cols, 32);
  };
  const auto bad = [&](auto call, std::initializer_list<std::string_view> parts) {
    expect_error(call, Code::invalid_argument, parts);
    EXPECT_TRUE(big.same_bytes(before));
  };
  const Activation f = activation("relu");
  const View x = at(0, 0, 6, 8);
  bad([&] { forward(f, {.x = x, .y = at(0, 4, 6, 8)}); }, {"y overlaps", "x"});
  bad([&] { forward(f, {.x = x, .y = at(1, 0, 6, 8)}); }, {"y overlaps"});
  bad([&] { forward(f, {.x = x, .y = at(5, 7, 6, 8)}); }, {"y overlaps"});
  bad([&] { forward(f, {.x = x, .bias = at(7, 0, 1, 8), .y = at(6, 0, 6, 8)}); }, {"bias"});
  bad([&] { forward(f, {.x = x, .y = at(0, 8, 6, 8), .amax = at(0, 9, 1, 1)}); }, {"y and amax"});
  bad([&] { forward(f, {.x = x, .y = at(0, 8, 6, 8), .amax = at(0, 0, 1, 1)}); }, {"amax", "x"});
  const View same_bytes_other_type = matrix(x.data, DType::bf16, 6, 8, 64);
  bad([&] { forward(f, {.x = x, .y = same_bytes_other_type}); }, {"y overlaps"});
  bad(
      [&] {
        backward(f,
                 {.grad = at(6, 0, 6, 8), .x = x, .dx = at(0, 16, 6, 8), .dbias = at(2, 16, 1, 8)});
      },
      {"dx and dbias"});
  const Activation gate = activation("swiglu");
  bad([&] { forward(gate, {.x = x, .y = at(0, 0, 6, 4)}); }, {"y overlaps"});
  const Fused two = fuse([](Expr a, Expr r) { return a + r; });
  bad([&] { two.forward({x, at(0, 0, 1, 8)}, x); }, {"y", "argument 1"});
  bad(
      [&] {
        two.backward({x, at(9, 0, 1, 8)}, at(0, 8, 6, 8), {at(0, 16, 6, 8), at(3, 16, 1, 8)});
      },
      {"gradient 0", "gradient 1"});
  // Adjacent regions of one matrix do not overlap. Inputs may share memory.
  forward(f, {.x = x, .y = at(0, 8, 6, 8), .amax = at(9, 0, 1, 1)});
  two.forward({x, at(0, 0, 1, 8)}, at(0, 24, 6, 8));
  for (int64_t r = 0; r < 6; ++r)
    for (int64_t c = 0; c < 8; ++c) {
      expect_element(big, r, 8 + c, std::max(0.0F, before.at(r, c)), "relu");
      expect_element(big, r, 24 + c, before.at(r, c) + before.at(0, c), "sum");
    }
}

// r is written before the last read of x, so r and x must not overlap, not even as one column.
TEST(ApiErrors, L2Normalization) {
  Mat x(DType::f32, 4, 1);
  x.fill(1);
  const Mat before = x, y(DType::f32, 4, 1), r(DType::bf16, 4, 1), short_r(DType::f32, 3, 1);
  const auto bad = [&](auto call, std::initializer_list<std::string_view> parts) {
    expect_error(call, Code::invalid_argument, parts);
    EXPECT_TRUE(x.same_bytes(before) && y.untouched() && r.untouched() && short_r.untouched());
  };
  bad([&] { l2_normalization(x.view(), y.view(), r.view()); }, {"r is bf16", "f32"});
  bad([&] { l2_normalization(x.view(), y.view(), short_r.view()); }, {"r is 3x1"});
  bad([&] { l2_normalization(x.view(), y.view(), {}, -1); }, {"eps = -1"});
  bad([&] { l2_normalization(x.view(), y.view(), {}, kNan); }, {"eps"});
  bad([&] { l2_normalization(x.view(), y.view(), x.view()); }, {"r", "x"});
}

TEST(ApiErrors, FusedFunctions) {
  const Bad b;
  const Fused two = fuse([](Expr x, Expr r) { return x * r; }, "mine");
  const View x = b.x.view(), y = b.y.view();
  const auto bad = [&](auto call, std::initializer_list<std::string_view> parts) {
    expect_error(call, Code::invalid_argument, parts);
    b.untouched();
  };
  bad([&] { two.forward({x}, y); }, {"mine", "1 arguments", "takes 2"});
  bad([&] { two.forward({x, cut(x, 2, 8)}, y); }, {"argument 1 is 2x8", "1x8", "6x1", "1x1"});
  bad([&] { two.backward({x, x}, b.g.view(), {b.dx.view()}); }, {"1 gradients", "2 arguments"});
  bad(
      [&] {
        two.backward({x, b.row.view()}, b.g.view(), {View{}, b.dx.view()});
      },
      {"gradient 1 is 6x8", "1x8"});
  const std::vector<std::string> twice{"x", "x"}, word{"exp"};
  bad([&] { fuse_text("x", twice); }, {"two arguments", "'x'"});
  bad([&] { fuse_text("exp", word); }, {"'exp'"});
  bad([&] { Fused("none", 1, nullptr); }, {"no function"});
  bad([&] { Fused("none", 0, [](std::span<const Expr>) { return Expr(1); }); }, {"0 arguments"});
}

}  // namespace
}  // namespace tenon::test
