// Tests of the tile executor against plain loops: every load, store and split, with exact bits.
#include <bit>
#include <functional>
#include <limits>
#include <random>

#include "backend/cpu/isa.h"
#include "backend/cpu/program.h"
#include "lazy/builder.h"
#include "lower/single_activation.h"
#include "runtime/execute.h"
#include "support/support.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tenon::test {
namespace {

using From = Load::From;
using To = Store::To;

// Runs the kernel with exactly the workspace that it requests, with guard bytes.
void run(const Step& step, int64_t rows, std::vector<View> in, std::vector<View> out,
         std::vector<float> parameters = {}) {
  const Chosen chosen = kernel_for(step, Device::cpu);
  const size_t bytes = chosen.kernel->workspace(rows);
  std::vector<uint8_t> memory(bytes + 192, Mat::kPoison);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const size_t start = 64 + (64 - address % 64) % 64;
  chosen.kernel->run({.rows = rows,
                      .in = in,
                      .out = out,
                      .parameters = parameters,
                      .workspace = memory.data() + start,
                      .stream = nullptr});
  for (size_t i = 0; i < memory.size(); ++i)
    if ((i < start || i >= start + bytes) && memory[i] != Mat::kPoison) {
      ADD_FAILURE() << step.name << ": the workspace of " << bytes << " bytes overflows";
      return;
    }
}

struct Size {
  int64_t rows, cols;
};
constexpr Size kSizes[] = {{0, 13}, {3, 0},     {0, 0},   {1, 1},   {7, 13},   {127, 129},
                           {5, 32}, {31, 1031}, {9, 512}, {3, 513}, {2, 4160}, {3, 9001}};

std::array<ColumnMap, 2> maps(Gate g, int64_t h) {
  if (const int64_t k = interleave(g)) return {{{k, 2 * k, 0}, {k, 2 * k, k}}};
  if (g == Gate::separate) return {};
  return {{{1, 1, gated_column(g, h, 0, 0)}, {1, 1, gated_column(g, h, 1, 0)}}};
}

// Both halves and all broadcast loads in one formula of exactly rounded functions.
void check_loads(Size s, Gate gate, DType dtype, int64_t pad, size_t shift) {
  const auto [rows, h] = s;
  const bool apart = gate == Gate::separate;
  const auto map = maps(gate, h);
  StepBuilder build("loads", h, Precision::strict);
  const Expr a = build.load({From::tile, 0, dtype, map[0]});
  const Expr b = build.load({From::tile, apart ? 1U : 0U, dtype, map[1]});
  const Expr p = build.load({From::row, 2, dtype, map[0]});
  const Expr q = build.load({From::row, apart ? 3U : 2U, dtype, map[1]});
  const Expr column = build.load({From::column, 4, dtype, {}});
  const Expr scalar = build.load({From::scalar, 5, dtype, {}});
  const Expr parameter = build.load({From::parameter, 1, DType::f32, {}});
  build.store({To::tile, 0, DType::f32, {}}, (a + p) * column - (b + q) * (scalar + parameter));
  const Step step = build.finish();

  const int64_t wide = apart ? h : 2 * h;
  std::vector<Mat> in;
  in.push_back(Mat(dtype, rows, wide, pad, shift).fill(1, true));
  in.push_back(Mat(dtype, rows, h, pad + 1, shift).fill(2, true));
  in.push_back(Mat(dtype, 1, wide, pad, shift).fill(3));
  in.push_back(Mat(dtype, 1, h, pad, shift).fill(4));
  in.push_back(Mat(dtype, rows, 1, pad, shift).fill(5));
  in.push_back(Mat(dtype, 1, 1, 0, shift).fill(6));
  std::vector<View> views;
  for (const Mat& m : in) views.push_back(m.view());
  const std::vector<float> parameters{kNan, 0.75F};
  for (const int threads : {1, 2, 7}) {
    const Threads scope(threads);
    Mat y(DType::f32, rows, h, pad, shift);
    run(step, rows, views, {y.view()}, parameters);
    ASSERT_TRUE(y.guards_hold());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < h; ++c) {
        const int64_t ca = apart ? c : gated_column(gate, h, 0, c);
        const int64_t cb = apart ? c : gated_column(gate, h, 1, c);
        const float left = (in[0].at(r, ca) + in[2].at(0, ca)) * in[4].at(r, 0);
        const float right =
            ((apart ? in[1] : in[0]).at(r, cb) + (apart ? in[3] : in[2]).at(0, cb)) *
            (in[5].at(0, 0) + parameters[1]);
        expect_element(y, r, c, left - right, "y");
      }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Executor, EveryLoadInEveryLayoutAndPlace) {
  for (const Size& s : kSizes)
    for (const Gate gate : kGates)
      for (const DType d : kPlain) {
        if (!fits(gate, s.cols)) continue;
        SCOPED_TRACE(str(s.rows, "x", s.cols, " gate ", static_cast<int>(gate), " ", info(d).name));
        check_loads(s, gate, d, s.rows % 3, static_cast<size_t>(s.cols % 4));
        if (HasFailure()) return;
      }
}

// Every store in one pass. `a` and `b` are exactly rounded, so all results are known.
struct AllStores {
  Step step;
  std::vector<Mat> out;
};
AllStores all_stores(Size s, Gate gate, DType dtype, int64_t pad, size_t shift) {
  const auto [rows, h] = s;
  const bool apart = gate == Gate::separate;
  const auto map = maps(gate, h);
  StepBuilder build("stores", h, Precision::strict);
  const Expr x = build.load({From::tile, 0, DType::f32, {}});
  const Expr g = build.load({From::tile, 1, dtype, {}});
  const Expr a = x * g;
  const Expr b = x - g;
  build.store({To::tile, 0, DType::f32, {}}, a);
  build.store({To::tile, 1, DType::f16, {}}, a);
  build.store({To::tile, 2, DType::bf16, {}}, b);
  build.store({To::tile, 3, dtype, map[0]}, a);
  build.store({To::tile, apart ? 4U : 3U, dtype, map[1]}, b);
  build.store({To::column_sum, 5, dtype, map[0]}, a);
  build.store({To::column_sum, apart ? 6U : 5U, dtype, map[1]}, b);
  build.store({To::row_sum, 7, dtype, {}}, a);
  build.store({To::row_sum, 8, DType::f32, {}}, b);
  build.store({To::sum, 9, DType::f32, {}}, a);
  build.store({To::amax, 10, DType::f32, {}}, a);
  build.store({To::amax, 11, DType::f32, {}}, b);
  AllStores all{build.finish(), {}};
  const int64_t wide = apart ? h : 2 * h;
  all.out.emplace_back(DType::f32, rows, h, pad, shift);
  all.out.emplace_back(DType::f16, rows, h, pad, shift);
  all.out.emplace_back(DType::bf16, rows, h, pad, shift);
  for (const int64_t r : {rows, int64_t{1}}) {
    all.out.emplace_back(dtype, r, wide, pad, shift);
    all.out.emplace_back(dtype, r, h, pad, shift);
  }
  all.out.emplace_back(dtype, rows, 1, pad, shift);
  all.out.emplace_back(DType::f32, rows, 1, pad, shift);
  for (int i = 0; i < 3; ++i) all.out.emplace_back(DType::f32, 1, 1, 0, shift);
  return all;
}

uint32_t largest(const std::vector<float>& v) {
  uint32_t most = 0;
  for (const float f : v) most = std::max(most, bits(f) & 0x7fffffffU);
  return most;
}

void check_stores(Size s, Gate gate, DType dtype, int64_t pad, size_t shift) {
  const auto [rows, h] = s;
  const bool apart = gate == Gate::separate;
  const Mat x = Mat(DType::f32, rows, h, pad, shift).fill(11, rows % 2 == 1);
  const Mat g = Mat(dtype, rows, h, pad, shift).fill(12);
  std::vector<float> a, b;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < h; ++c) {
      a.push_back(x.at(r, c) * g.at(r, c));
      b.push_back(x.at(r, c) - g.at(r, c));
    }
  const auto row = [&](const std::vector<float>& v, int64_t r) {
    return tree({v.begin() + r * h, v.begin() + (r + 1) * h});
  };
  const auto column = [&](const std::vector<float>& v, int64_t c) {
    std::vector<float> list;
    for (int64_t r = 0; r < rows; ++r) list.push_back(v[static_cast<size_t>(r * h + c)]);
    return tree(list);
  };
  for (const int threads : {1, 2, 7}) {
    const Threads scope(threads);
    AllStores all = all_stores(s, gate, dtype, pad, shift);
    const std::vector<Mat>& out = all.out;
    std::vector<View> views;
    for (const Mat& m : out) views.push_back(m.view());
    run(all.step, rows, {x.view(), g.view()}, views);
    for (const Mat& m : out) ASSERT_TRUE(m.guards_hold());
    for (int64_t c = 0; c < h; ++c) {
      const int64_t ca = apart ? c : gated_column(gate, h, 0, c);
      const int64_t cb = apart ? c : gated_column(gate, h, 1, c);
      for (int64_t r = 0; r < rows; ++r) {
        const auto i = static_cast<size_t>(r * h + c);
        for (size_t k = 0; k < 2; ++k) expect_element(out[k], r, c, a[i], "tile");
        expect_element(out[2], r, c, b[i], "tile bf16");
        expect_element(out[3], r, ca, a[i], "half a");
        expect_element(out[apart ? 4 : 3], r, cb, b[i], "half b");
      }
      expect_element(out[5], 0, ca, column(a, c), "column sum a");
      expect_element(out[apart ? 6 : 5], 0, cb, column(b, c), "column sum b");
    }
    for (int64_t r = 0; r < rows; ++r) {
      expect_element(out[7], r, 0, row(a, r), "row sum a");
      expect_element(out[8], r, 0, row(b, r), "row sum b");
    }
    expect_element(out[9], 0, 0, tree(a), "sum");
    EXPECT_EQ(out[10].code(0, 0), largest(a));
    EXPECT_EQ(out[11].code(0, 0), largest(b));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Executor, EveryStoreInEveryLayoutAndPlace) {
  size_t at = 0;
  for (const Size& s : kSizes)
    for (const Gate gate : kGates) {
      if (!fits(gate, s.cols)) continue;
      const DType d = kPlain[at++ % 3];
      SCOPED_TRACE(str(s.rows, "x", s.cols, " gate ", static_cast<int>(gate), " ", info(d).name));
      check_stores(s, gate, d, s.cols % 3, static_cast<size_t>(s.rows % 4));
      if (HasFailure()) return;
    }
}

// column_sum, row_sum and sum of x, and their outputs.
Step sums_of_x(int64_t cols) {
  StepBuilder build("sums", cols, Precision::strict);
  const Expr x = build.load({From::tile, 0, DType::f32, {}});
  build.store({To::column_sum, 0, DType::f32, {}}, x);
  build.store({To::row_sum, 1, DType::f32, {}}, x);
  build.store({To::sum, 2, DType::f32, {}}, x);
  return build.finish();
}

void check_sums(const Mat& x) {
  const int64_t rows = x.rows(), cols = x.cols();
  Mat by_column(DType::f32, 1, cols), by_row(DType::f32, rows, 1), total(DType::f32, 1, 1);
  run(sums_of_x(cols), rows, {x.view()}, {by_column.view(), by_row.view(), total.view()});
  std::vector<std::vector<float>> columns(static_cast<size_t>(cols));
  std::vector<float> all;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<float> line;
    for (int64_t c = 0; c < cols; ++c) {
      line.push_back(x.at(r, c));
      columns[static_cast<size_t>(c)].push_back(x.at(r, c));
    }
    all.insert(all.end(), line.begin(), line.end());
    EXPECT_EQ(by_row.code(r, 0), bits(tree(line))) << "row " << r;
  }
  for (int64_t c = 0; c < cols; ++c)
    EXPECT_EQ(by_column.code(0, c), bits(tree(columns[static_cast<size_t>(c)]))) << "column " << c;
  EXPECT_EQ(total.code(0, 0), bits(tree(all)));
}

TEST(Executor, SumsAreTheAdjacentPairTree) {
  std::vector<int64_t> lengths{127, 128, 129, 1000, 4097};
  for (int64_t n = 0; n <= 70; ++n) lengths.push_back(n);
  for (const int64_t n : lengths)
    for (const int threads : {1, 2, 7}) {
      const Threads scope(threads);
      SCOPED_TRACE(str("length ", n, ", threads ", threads));
      check_sums(Mat(DType::f32, n, 3).fill(21));
      check_sums(Mat(DType::f32, 2, n, 1, 2).fill(22));
      if (HasFailure()) return;
    }
  check_sums(Mat(DType::f32, 129, 1031).fill(23));
  check_sums(Mat(DType::f32, 5, 12289).fill(24));
}

TEST(Executor, EmptyAndNegativeZeroSums) {
  for (const Size s : {Size{1, 1}, Size{1, 600}, Size{33, 1}, Size{5, 13}}) {
    Mat x(DType::f32, s.rows, s.cols);
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t c = 0; c < s.cols; ++c) x.set(r, c, -0.0F);
    check_sums(x);  // -0 + -0 is -0, so padding with +0 would be detected
  }
  Mat sums(DType::f32, 1, 4), rows(DType::f32, 3, 1), total(DType::f32, 1, 1);
  run(sums_of_x(4), 0, {matrix(nullptr, DType::f32, 0, 4)},
      {sums.view(), matrix(nullptr, DType::f32, 0, 1), total.view()});
  for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(sums.code(0, c), 0U);
  EXPECT_EQ(total.code(0, 0), 0U);
  run(sums_of_x(0), 3, {matrix(nullptr, DType::f32, 3, 0)},
      {matrix(nullptr, DType::f32, 1, 0), rows.view(), total.view()});
  for (int64_t r = 0; r < 3; ++r) EXPECT_EQ(rows.code(r, 0), 0U);
}

// Two scalar loads in one call, each with its own gradient.
TEST(Executor, SeveralTotalSumsStayApart) {
  const Mat x = Mat(DType::f32, 37, 41).fill(31);
  StepBuilder build("two sums", 41, Precision::strict);
  const Expr v = build.load({From::tile, 0, DType::f32, {}});
  build.store({To::sum, 0, DType::f32, {}}, v);
  build.store({To::sum, 1, DType::f32, {}}, v * v);
  Mat first(DType::f32, 1, 1), second(DType::f32, 1, 1);
  run(build.finish(), 37, {x.view()}, {first.view(), second.view()});
  std::vector<float> values, squares;
  for (int64_t r = 0; r < 37; ++r)
    for (int64_t c = 0; c < 41; ++c) {
      values.push_back(x.at(r, c));
      squares.push_back(x.at(r, c) * x.at(r, c));
    }
  EXPECT_EQ(first.code(0, 0), bits(tree(values)));
  EXPECT_EQ(second.code(0, 0), bits(tree(squares)));
}

TEST(Executor, RowsMaySplitOverCalls) {
  for (const Size s : {Size{70, 13}, Size{11, 1031}, Size{6, 4160}}) {
    const Mat x = Mat(DType::f32, s.rows, s.cols, 1).fill(41);
    const Mat g = Mat(DType::bf16, s.rows, s.cols).fill(42);
    StepBuilder build("split", s.cols, Precision::strict);
    const Expr v = sigmoid(build.load({From::tile, 0, DType::f32, {}})) *
                   build.load({From::tile, 1, DType::bf16, {}});
    build.store({To::tile, 0, DType::f32, {}}, v);
    build.store({To::row_sum, 1, DType::f32, {}}, v);
    build.store({To::amax, 2, DType::f32, {}}, v);
    build.store({To::column_sum, 3, DType::f32, {}}, v);
    const Step step = build.finish();
    const auto part = [&](int64_t first, int64_t n, const Mat& y, const Mat& sums, const Mat& amax,
                          const Mat& columns) {
      run(step, n, {x.rows_from(first, n), g.rows_from(first, n)},
          {y.rows_from(first, n), sums.rows_from(first, n), amax.view(), columns.view()});
    };
    Mat y(DType::f32, s.rows, s.cols), sums(DType::f32, s.rows, 1), most(DType::f32, 1, 1),
        columns(DType::f32, 1, s.cols);
    part(0, s.rows, y, sums, most, columns);
    for (int64_t k = 0; k <= s.rows; ++k) {
      Mat y2(DType::f32, s.rows, s.cols), sums2(DType::f32, s.rows, 1), m1(DType::f32, 1, 1),
          m2(DType::f32, 1, 1), c1(DType::f32, 1, s.cols), c2(DType::f32, 1, s.cols);
      part(0, k, y2, sums2, m1, c1);
      part(k, s.rows - k, y2, sums2, m2, c2);
      EXPECT_TRUE(y.same_bytes(y2)) << "split at " << k;
      EXPECT_TRUE(sums.same_bytes(sums2)) << "split at " << k;
      EXPECT_EQ(most.code(0, 0), std::max(m1.code(0, 0), m2.code(0, 0)));
      const bool subtree = k > 0 && std::has_single_bit(static_cast<uint64_t>(k));
      if (!subtree || s.rows - k > k || k == s.rows) continue;
      for (int64_t c = 0; c < s.cols; ++c)
        EXPECT_EQ(columns.code(0, c), bits(c1.at(0, c) + c2.at(0, c))) << "split at " << k;
    }
  }
}

TEST(Executor, AmaxIsAnIntegerMaximum) {
  StepBuilder build("amax", 3, Precision::native);
  build.store({To::amax, 0, DType::f32, {}}, build.load({From::tile, 0, DType::f32, {}}));
  const Step step = build.finish();
  const auto amax = [&](std::vector<float> values) {
    Mat x(DType::f32, static_cast<int64_t>(values.size()) / 3, 3), out(DType::f32, 1, 1);
    for (size_t i = 0; i < values.size(); ++i)
      x.set(static_cast<int64_t>(i / 3), static_cast<int64_t>(i % 3), values[i]);
    run(step, x.rows(), {x.view()}, {out.view()});
    return out.code(0, 0);
  };
  EXPECT_EQ(amax({}), 0U);
  EXPECT_EQ(amax({-0.0F, 0.0F, -0.0F}), 0U);
  EXPECT_EQ(amax({-0x1p-149F, 0, 0}), 1U);
  EXPECT_EQ(amax({1, -2, 1.5F}), bits(2.0F));
  EXPECT_EQ(amax({1, -kInf, 0x1.fffffep127F}), bits(kInf));
  EXPECT_EQ(amax({-kInf, from_bits(0xffc00123U), kInf}), 0x7fc00123U);
}

#if defined(__x86_64__)
std::vector<float> operands(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> v;
  for (int i = 0; i < 20000; ++i) v.push_back(from_bits(random()));
  for (int i = 0; i < 20000; ++i) v.push_back(std::normal_distribution<float>(0, 5)(random));
  for (int i = 0; i < 400; ++i) v.push_back(kSpecials[random() % std::size(kSpecials)]);
  return v;
}

TEST(Executor, EveryInstructionSetHasTheSameBits) {
  const std::vector<float> in[4] = {operands(1), operands(2), operands(3), operands(4)};
  const float* pointers[4] = {in[0].data(), in[1].data(), in[2].data(), in[3].data()};
  const size_t n = in[0].size();
  const auto compare = [&](const char* what, size_t which, auto loop) {
    std::vector<float> expected(n, 0.0F), got(n, 0.0F);
    loop(*cpu::isas_here()[0].loops, expected.data());
    for (const cpu::Isa& isa : cpu::isas_here()) {
      loop(*isa.loops, got.data());
      for (size_t i = 0; i < n; ++i)
        if (!equal(expected[i], got[i])) {
          ADD_FAILURE() << what << " " << which << " at " << in[0][i] << ": " << isa.name
                        << " gives " << got[i] << ", baseline " << expected[i];
          break;
        }
    }
  };
  for (size_t w = 0; w < kWords.size(); ++w)
    if (kWords[w].arity >= 1 && kWords[w].arity <= 3 && static_cast<Word>(w) != Word::round)
      compare("word", w, [&](const cpu::Loops& t, float* out) { t.strict[w](out, pointers, n); });
  for (size_t r = 0; r < kRels.size(); ++r)
    compare("select", r, [&](const cpu::Loops& t, float* out) { t.select[r](out, pointers, n); });
  for (size_t d = 0; d < kDTypes.size(); ++d) {
    compare("round", d, [&](const cpu::Loops& t, float* out) { t.round[d](out, pointers, n); });
    for (const int64_t stride : {1, 3})
      compare("store and load", d, [&](const cpu::Loops& t, float* out) {
        std::vector<uint8_t> codes(n * 12 + 1);
        t.store[d](codes.data() + 1, stride, pointers[0], n);
        cpu::isas_here()[0].loops->load[d](out, codes.data() + 1, stride, n / 2);
        t.load[d](out + n / 2, codes.data() + 1, stride, n / 2);
      });
  }
  compare("add_pairs", 0,
          [&](const cpu::Loops& t, float* out) { t.add_pairs(out, pointers[0], n / 2); });
  compare("max_bits", 0, [&](const cpu::Loops& t, float* out) {
    for (size_t i = 0; i < 100; ++i) out[i] = from_bits(t.max_bits(pointers[1] + i * 5, i) & ~1U);
  });
}

// Runs a compiled program on one tile.
std::vector<float> interpret(const Step& step, const cpu::Loops& loops, const Mat& x,
                             const Mat& g) {
  const cpu::LoopProgram p = cpu::compile(step, loops);
  std::vector<std::vector<float>> slots(p.slots, std::vector<float>(cpu::kTile));
  for (const auto& [slot, value] : p.constants) slots[slot].assign(cpu::kTile, value);
  for (size_t i = 0; i < step.loads.size(); ++i)
    for (size_t c = 0; c < cpu::kTile; ++c)
      slots[i][c] = step.loads[i].from == From::parameter ? 0.5F
                    : step.loads[i].arg == ActivationArgs::grad
                        ? g.at(0, static_cast<int64_t>(c))
                        : x.at(step.loads[i].columns.offset ? 1 : 0, static_cast<int64_t>(c));
  for (const auto* list : {&p.once, &p.phases.back().tile})
    for (const cpu::Instruction& i : *list) {
      const float* in[4] = {};
      for (int k = 0; k < i.arity; ++k) in[k] = slots[i.in[static_cast<size_t>(k)]].data();
      i.loop(slots[i.out].data(), in, cpu::kTile);
    }
  std::vector<float> result;
  for (const uint32_t r : p.results) result.insert(result.end(), slots[r].begin(), slots[r].end());
  return result;
}

TEST(Executor, EveryInstructionSetRunsEveryActivationToTheSameBits) {
  const Mat x = Mat(DType::f32, 2, cpu::kTile).fill(51, true, 4);
  const Mat g = Mat(DType::f32, 1, cpu::kTile).fill(52);
  for (const std::string& name : activation_names()) {
    ActivationForm form;
    form.backward = true;
    form.cols = cpu::kTile;
    form.precision = Precision::strict;
    form.grad = form.y = DType::f32;
    const Step step = activation_step(activation(name), form);
    const std::vector<float> expected = interpret(step, *cpu::isas_here()[0].loops, x, g);
    for (const cpu::Isa& isa : cpu::isas_here()) {
      const std::vector<float> got = interpret(step, *isa.loops, x, g);
      size_t wrong = 0;
      for (size_t i = 0; i < got.size(); ++i) wrong += !equal(expected[i], got[i]);
      EXPECT_EQ(wrong, 0U) << name << " " << isa.name;
    }
  }
}

// With multipliers of every power of two, for values over all exponents with ties, zeros and
// subnormals, next to blocks that the rounded loops must refuse.
TEST(Executor, RoundedValuesGiveTheCodesOfTheirScales) {
  constexpr size_t kCols = 256 + 40;
  for (const cpu::Isa& isa : cpu::isas_here())
    for (const DType d : {DType::e4m3, DType::e5m2}) {
      const cpu::RoundedLoops& rounded = isa.loops->rounded[index(d)];
      if (!rounded.round) continue;
      const Format format{.dtype = d, .scaling = Scaling::mxfp8};
      std::mt19937 random(1);
      size_t quick = 0;
      for (int turn = 0; turn < 4000; ++turn) {
        const size_t width = turn % 2 == 0 ? 1 : 32, blocks = cdiv(kCols, width);
        // Exponents from `low` on, less than 40 apart: some codes are subnormal or 0.
        const auto low = static_cast<uint32_t>(random() % 218);
        std::vector<float> values(kCols);
        for (float& v : values) {
          const uint32_t r = random(), mantissa = random() & (r % 3 == 0 ? 0x7fffffU : 0x780000U);
          const uint32_t bits = (low + r / 3 % 38) << 23 | mantissa;
          v = std::bit_cast<float>(r % 11 == 0 ? 0 : bits) * (r % 2 == 0 ? 1.0F : -1.0F);
        }
        if (turn % 50 == 7) values[turn % kCols] = std::numeric_limits<float>::infinity();
        if (turn % 50 == 8) values[turn % kCols] = std::numeric_limits<float>::quiet_NaN();
        if (turn % 100 > 90)
          for (float& v : values) v *= 0x1p-60F;
        // A column has the maximum of several rows.
        std::vector<uint32_t> most(blocks), inverses(blocks);
        std::vector<float> scales(blocks);
        for (size_t i = 0; i < kCols; ++i) {
          const auto bits = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU;
          most[i / width] = std::max(most[i / width], bits);
        }
        for (size_t b = 0; width == 1 && b < blocks; ++b)
          most[b] = std::max(most[b], std::bit_cast<uint32_t>(values[b / 8 * 8]) & 0x7fffffffU);
        isa.loops->scales(format, most.data(), blocks, scales.data(), inverses.data());
        std::vector<uint16_t> bits(kCols), offsets(kCols);
        if (!rounded.offsets(offsets.data(), inverses.data(), most.data(), blocks, width)) continue;
        ++quick;
        rounded.round(bits.data(), values.data(), kCols);
        std::vector<uint8_t> expected(kCols), got(kCols + 1, 0xa5);
        if (width == 1)
          isa.loops->store_scales[index(d)](expected.data(), values.data(), kCols, scales.data(),
                                            false);
        else
          isa.loops->store_blocks[index(d)](expected.data(), values.data(), kCols, width,
                                            scales.data(), false);
        rounded.store(got.data(), bits.data(), offsets.data(), values.data(), scales.data(), kCols,
                      width, false);
        EXPECT_EQ(got.back(), 0xa5);
        got.pop_back();
        ASSERT_EQ(got, expected) << isa.name << " " << info(d).name << " turn " << turn;
      }
      EXPECT_GT(quick, 2000) << isa.name;
    }
}

TEST(Executor, ForeignRoundingModesChangeNothing) {
  constexpr unsigned kOdd = 0x1f80U | 0x8000U | 0x0040U | 0x4000U;  // FTZ, DAZ, round up
  const Mat x = Mat(DType::f32, 33, 9001).fill(61, false, 0x1p-60F);
  // Products are subnormal and differences round, so the sums detect every flush and rounding.
  const Mat g = Mat(DType::f32, 33, 9001).fill(62, false, 0x1p-70F);
  const auto results = [&](unsigned mode) {
    AllStores all = all_stores({33, 9001}, Gate::separate, DType::f32, 0, 0);
    std::vector<View> views;
    for (const Mat& m : all.out) views.push_back(m.view());
    const Chosen chosen = kernel_for(all.step, Device::cpu);
    const std::vector<View> in{x.view(), g.view()};
    const unsigned before = _mm_getcsr();
    _mm_setcsr(mode);
    execute(all.step, chosen, {.rows = 33, .in = in, .out = views, .parameters = {}}, {});
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & ~0x3fU, mode & ~0x3fU) << "the caller's mode is not restored";
    return std::move(all.out);
  };
  for (const int threads : {1, 2}) {
    const Threads scope(threads);
    const std::vector<Mat> expected = results(0x1f80U);
    const std::vector<Mat> got = results(kOdd);
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(expected[i].same_bytes(got[i])) << "store " << i << ", threads " << threads;
  }
}
#endif

// Outputs that alias inputs exactly: for each element, all loads come before all stores.
TEST(Executor, InPlaceUnary) {
  for (const Size& s : kSizes)
    for (const DType d : kPlain)
      for (const uint32_t target : {0U, 1U}) {  // in place of x, in place of grad
        Mat m[2] = {Mat(d, s.rows, s.cols, 2, 1).fill(71), Mat(d, s.rows, s.cols, 1, 3).fill(72)};
        const Mat x = m[0], g = m[1];
        StepBuilder build("in place", s.cols, Precision::strict);
        const Expr a = build.load({From::tile, 0, d, {}});
        const Expr b = build.load({From::tile, 1, d, {}});
        build.store({To::tile, 0, d, {}}, a * b + a);
        run(build.finish(), s.rows, {m[0].view(), m[1].view()}, {m[target].view()});
        EXPECT_TRUE(m[0].guards_hold() && m[1].guards_hold());
        EXPECT_TRUE(m[1 - target].same_bytes(target ? x : g)) << "the other input changed";
        for (int64_t r = 0; r < s.rows; ++r)
          for (int64_t c = 0; c < s.cols; ++c)
            expect_element(m[target], r, c, x.at(r, c) * g.at(r, c) + x.at(r, c), "in place");
        if (HasFailure()) return;
      }
}

TEST(Executor, InPlaceGatedInEveryLayout) {
  for (const Size& s : kSizes)
    for (const Gate gate : kGates) {
      if (gate == Gate::separate || !fits(gate, s.cols)) continue;
      const Threads scope(s.rows % 2 ? 7 : 2);
      const auto map = maps(gate, s.cols);
      Mat x = Mat(DType::bf16, s.rows, 2 * s.cols, 3, 1).fill(81);
      const Mat before = x, g = Mat(DType::f32, s.rows, s.cols).fill(82);
      StepBuilder build("gated in place", s.cols, Precision::strict);
      const Expr a = build.load({From::tile, 0, DType::bf16, map[0]});
      const Expr b = build.load({From::tile, 0, DType::bf16, map[1]});
      const Expr seed = build.load({From::tile, 1, DType::f32, {}});
      build.store({To::tile, 0, DType::bf16, map[0]}, seed * b);
      build.store({To::tile, 0, DType::bf16, map[1]}, seed * a);
      run(build.finish(), s.rows, {x.view(), g.view()}, {x.view()});
      EXPECT_TRUE(x.guards_hold());
      for (int64_t r = 0; r < s.rows; ++r)
        for (int64_t c = 0; c < s.cols; ++c) {
          const int64_t ca = gated_column(gate, s.cols, 0, c);
          const int64_t cb = gated_column(gate, s.cols, 1, c);
          expect_element(x, r, ca, g.at(r, c) * before.at(r, cb), "da");
          expect_element(x, r, cb, g.at(r, c) * before.at(r, ca), "db");
        }
      if (HasFailure()) return;
    }
}

}  // namespace
}  // namespace tenon::test
