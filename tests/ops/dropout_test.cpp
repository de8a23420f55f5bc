// Tests of bias, dropout and residual add against an independent implementation of the
// specification.
#include <unistd.h>

#include <array>
#include <barrier>
#include <cstdio>
#include <limits>
#include <thread>

#include "backend/cpu/isa.h"
#include "core/philox.h"
#include "lower/single_dropout.h"
#include "runtime/execute.h"
#include "support/support.h"
#include "support/verify.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tenon::test {
namespace {

constexpr uint64_t kBig = uint64_t{1} << 40;

// Philox as in Random123: the key changes before every round except the first.
using Block = std::array<uint32_t, 4>;
Block philox_ref(Block c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    if (round > 0) key = {key[0] + 0x9E3779B9U, key[1] + 0xBB67AE85U};
    const uint64_t left = uint64_t{c[0]} * 0xD2511F53U, right = uint64_t{c[2]} * 0xCD9E8D57U;
    c = {static_cast<uint32_t>(right >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(right),
         static_cast<uint32_t>(left >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(left)};
  }
  return c;
}

uint32_t lo(uint64_t v) { return static_cast<uint32_t>(v & 0xffffffffU); }
uint32_t hi(uint64_t v) { return static_cast<uint32_t>(v >> 32); }

uint32_t draw(uint64_t seed, uint64_t offset, uint64_t i) {
  const Block w = philox_ref({lo(i / 8), hi(i / 8), lo(offset), hi(offset)}, {lo(seed), hi(seed)});
  return (w[i % 8 / 2] >> (16 * (i % 2))) & 0xffffU;
}
uint32_t draw(const Random& s, int64_t r, int64_t c) {
  const uint64_t row = s.row0 + static_cast<uint64_t>(r);
  return draw(s.seed, s.offset, row * s.columns + s.col0 + static_cast<uint64_t>(c));
}

// T with floor and comparison, the scale with one fp32 division.
struct Rule {
  uint32_t t = 0;
  float scale = 1;
  explicit Rule(double p) {
    const double v = 65536 * p, whole = std::floor(v), rest = v - whole;
    t = static_cast<uint32_t>(whole);
    if (rest > 0.5 || (rest == 0.5 && t % 2 == 1)) ++t;
    if (t < 65536) scale = 65536.0F / static_cast<float>(65536 - t);
  }
  [[nodiscard]] float operator()(const Random& s, int64_t r, int64_t c, float v) const {
    return draw(s, r, c) >= t ? v * scale : 0.0F;
  }
};

std::array<uint64_t, 5> words(const Random& s) {
  return {s.seed, s.offset, s.row0, s.col0, s.columns};
}

// A call with matrices. Null ones are omitted.
struct Call {
  const Mat* x = nullptr;
  const Mat* bias = nullptr;
  const Mat* residual = nullptr;
  const Mat* y = nullptr;
  double p = 0.5;
  bool training = true;

  [[nodiscard]] BiasDropoutAdd with(Random* s) const {
    const auto view = [](const Mat* m) { return m ? m->view() : View{}; };
    return {view(x), view(bias), view(residual), view(y), p, training, s};
  }
  // One element in fp32, with rounding between ops if eager.
  [[nodiscard]] float exact(const Random& s, bool eager, int64_t r, int64_t c) const {
    const auto between = [&](float v) { return eager ? rounded_ref(x->dtype(), v) : v; };
    float v = x->at(r, c);
    if (bias) v = between(v + bias->at(0, c));
    if (training) v = between(Rule(p)(s, r, c, v));
    if (residual) v = between(residual->at(r, c) + v);
    return v;
  }
};

// Runs the call and checks every bit, the guard bytes and the state.
void check(const Call& call, Random state, const Options& options, const std::string& what) {
  const Random before = state;
  bias_dropout_add(call.with(&state), options);
  const bool eager = options.rounding == Rounding::eager;
  for (int64_t r = 0; r < call.y->rows(); ++r)
    for (int64_t c = 0; c < call.y->cols(); ++c)
      expect_element(*call.y, r, c, call.exact(before, eager, r, c), what);
  EXPECT_TRUE(call.y->guards_hold()) << what;
  Random expected = before;
  expected.offset += call.training ? 1 : 0;
  EXPECT_EQ(words(state), words(expected)) << what;
}

Mat filled(DType d, int64_t rows, int64_t cols, float value) {
  Mat m(d, rows, cols);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) m.set(r, c, value);
  return m;
}

const std::vector<Random>& states() {
  static const std::vector<Random> kStates{
      {.seed = 0, .offset = 0, .columns = 20000},
      {.seed = 1, .offset = 2, .row0 = 3, .col0 = 5, .columns = 20001},
      {.seed = 0x123456789abcdef0U, .offset = 0xfedcba9876543210U, .col0 = 1, .columns = 12345},
      {.seed = kBig + 7, .offset = 3 * kBig, .row0 = kBig, .col0 = 11, .columns = 10011},
      // The low word of the counter overflows: i ÷ 8 exceeds 2^32.
      {.seed = 42, .offset = 1, .row0 = (uint64_t{1} << 35) / 10007, .col0 = 6, .columns = 10007},
      {.seed = ~uint64_t{0}, .offset = ~uint64_t{0}, .row0 = 0, .col0 = kBig, .columns = 3 * kBig},
      // The index wraps at 2^64.
      {.seed = 6, .offset = 1, .row0 = ~uint64_t{0} / 10007, .columns = 10007},
  };
  return kStates;
}

TEST(Philox, KnownAnswers) {
  struct Known {
    Block counter;
    std::array<uint32_t, 2> key;
    Block words;
  };
  constexpr uint32_t kAll = ~0U;
  const Known list[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}},
      {{kAll, kAll, kAll, kAll},
       {kAll, kAll},
       {0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}},
      {{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U},
       {0xa4093822U, 0x299f31d0U},
       {0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}},
  };
  for (const Known& k : list) {
    EXPECT_EQ(philox_ref(k.counter, k.key), k.words);
    const auto join = [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; };
    const RandomWords w = philox(join(k.key[0], k.key[1]), join(k.counter[0], k.counter[1]),
                                 join(k.counter[2], k.counter[3]));
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(w.w[i], k.words[i]);
  }
}

TEST(Philox, EveryInstructionSetDrawsTheSame) {
  constexpr uint64_t kCarry = (uint64_t{1} << 32) - 5;
  for (const cpu::Isa& isa : cpu::isas_here())
    for (const uint64_t key : {uint64_t{0}, uint64_t{0x0123456789abcdef}, ~uint64_t{0}})
      for (const uint64_t first : {uint64_t{0}, kCarry, 77 * kBig + 3})
        for (const uint64_t high : {uint64_t{1}, 5 * kBig, ~uint64_t{0}})
          for (const size_t blocks : {1U, 2U, 3U, 7U, 8U, 15U, 16U, 17U, 65U}) {
            std::vector<float> out(8 * blocks + 1, -1);
            isa.loops->random(out.data(), key, first, high, blocks);
            for (size_t i = 0; i < 8 * blocks; ++i)
              ASSERT_EQ(out[i], static_cast<float>(draw(key, high, 8 * first + i)))
                  << isa.name << " " << blocks << " blocks, number " << i;
            EXPECT_EQ(out.back(), -1) << isa.name;
          }
}

TEST(Dropout, MasksAreTheSpecifications) {
  constexpr int64_t kShapes[][2] = {{1, 1},   {1, 7},  {9, 1},    {3, 8},    {5, 9},    {171, 3},
                                    {67, 33}, {2, 85}, {4, 256},  {3, 257},  {2, 511},  {3, 512},
                                    {2, 513}, {9, 73}, {1031, 1}, {1, 4097}, {2, 10000}};
  constexpr double kShares[] = {0.5, 0.1, 0.9};
  size_t turn = 0;
  for (const auto& [m, k] : kShapes)
    for (const Random& s : states()) {
      const Mat x = filled(DType::f32, m, k, 1), y(kPlain[turn % 3], m, k);
      check({.x = &x, .y = &y, .p = kShares[turn % 3]}, s, kStrict, str(m, "x", k, " ", turn));
      ++turn;
      if (HasFailure()) return;
    }
}

// Tests both sides of the comparison, with thresholds equal to drawn numbers.
TEST(Dropout, TheThresholdItselfIsKept) {
  const Random s{.seed = 5, .offset = 6, .columns = 64};
  const Mat x = filled(DType::f32, 1, 64, 1), y(DType::f32, 1, 64);
  for (int64_t c = 0; c < 64; ++c) {
    const uint32_t u = draw(s, 0, c);
    for (const uint32_t t : {u, u + 1}) {
      Random state = s;
      bias_dropout_add({.x = x.view(), .y = y.view(), .p = t / 65536.0, .random = &state});
      if (t == u)
        EXPECT_EQ(y.at(0, c), 65536.0F / static_cast<float>(65536 - t));
      else
        EXPECT_EQ(bits(y.at(0, c)), 0U);
    }
  }
}

// T = round-half-even(65536·p): results 0 and 65536, and ties.
TEST(Dropout, Thresholds) {
  constexpr double kUnit = 1.0 / 65536;
  const double below = std::nextafter(1.0, 0.0);
  const struct {
    double p;
    uint32_t t;
  } list[] = {{0, 0},
              {-0.0, 0},
              {5e-324, 0},
              {0.5 * kUnit, 0},
              {std::nextafter(0.5 * kUnit, 1), 1},
              {kUnit, 1},
              {1.5 * kUnit, 2},
              {2.5 * kUnit, 2},
              {std::nextafter(2.5 * kUnit, 1), 3},
              {3.5 * kUnit, 4},
              {0.001, 66},
              {0.1, 6554},
              {1.0 / 3, 21845},
              {0.5, 32768},
              {0.9, 58982},
              {1 - kUnit, 65535},
              {1 - 1.5 * kUnit, 65534},
              {1 - 0.5 * kUnit, 65536},
              {std::nextafter(1 - 0.5 * kUnit, 0), 65535},
              {below, 65536},
              {1, 65536}};
  for (const auto& [p, t] : list) {
    EXPECT_EQ(Rule(p).t, t) << p;
    const DropoutRule rule = dropout_rule(p);
    EXPECT_EQ(rule.threshold, static_cast<float>(t)) << p;
    EXPECT_TRUE(t == 65536 || rule.scale == Rule(p).scale) << p;
    const Mat x = Mat(DType::f32, 3, 211).fill(1), y(DType::f32, 3, 211);
    check({.x = &x, .y = &y, .p = p}, states()[1], kStrict, str("p = ", p));
  }
  for (uint32_t t = 0; t < 65536; ++t) {
    const DropoutRule rule = dropout_rule(t * kUnit);
    ASSERT_TRUE(rule.threshold == static_cast<float>(t) &&
                rule.scale == 65536.0F / static_cast<float>(65536 - t))
        << t;
  }
}

TEST(Dropout, NothingIsKeptForOneAndEverythingForZero) {
  for (const DType d : kPlain)
    for (const Options& options : {kStrict, kEager, Options{}}) {
      const Mat x = Mat(d, 7, 90).fill(1, true), residual = Mat(d, 7, 90).fill(2, true),
                bias = Mat(d, 1, 90).fill(3, true), y(d, 7, 90), z(d, 7, 90);
      Random s{.seed = 3, .columns = 90};
      bias_dropout_add({.x = x.view(), .bias = bias.view(), .y = y.view(), .p = 1, .random = &s},
                       options);
      bias_dropout_add({.x = x.view(),
                        .bias = bias.view(),
                        .residual = residual.view(),
                        .y = z.view(),
                        .p = 1,
                        .random = &s},
                       options);
      for (int64_t r = 0; r < 7; ++r)
        for (int64_t c = 0; c < 90; ++c) {
          ASSERT_EQ(y.code(r, c), 0U) << r << ", " << c;
          ASSERT_TRUE(equal(z.at(r, c), residual.at(r, c) + 0.0F)) << r << ", " << c;
        }
      bias_dropout_add({.x = x.view(), .y = y.view(), .p = 0, .random = &s}, options);
      const Mat dx(d, 7, 90), dbias(DType::f32, 1, 90);
      bias_dropout_add_backward(
          {.grad = x.view(), .dx = dx.view(), .dbias = dbias.view(), .p = 1, .random = &s},
          options);
      for (int64_t r = 0; r < 7; ++r)
        for (int64_t c = 0; c < 90; ++c) {
          ASSERT_TRUE(equal(y.at(r, c), x.at(r, c))) << r << ", " << c;
          ASSERT_EQ(dx.code(r, c), 0U) << r << ", " << c;
          ASSERT_EQ(dbias.code(0, c), 0U) << c;
        }
    }
}

// All results: forward, dx, dbias, dresidual, for one dtype.
struct Results {
  Mat y, dx, dbias, dresidual;
  [[nodiscard]] bool same(const Results& o) const {
    return y.same_bytes(o.y) && dx.same_bytes(o.dx) && dbias.same_bytes(o.dbias) &&
           dresidual.same_bytes(o.dresidual);
  }
};
Results everything(DType d, int64_t m, int64_t k, const Random& state, unsigned seed = 1) {
  Results out{Mat(d, m, k), Mat(d, m, k), Mat(DType::f32, 1, k), Mat(d, m, k)};
  const Mat x = Mat(d, m, k).fill(seed), bias = Mat(d, 1, k).fill(seed + 1),
            residual = Mat(d, m, k).fill(seed + 2), g = Mat(d, m, k).fill(seed + 3);
  Random s = state;
  bias_dropout_add({.x = x.view(),
                    .bias = bias.view(),
                    .residual = residual.view(),
                    .y = out.y.view(),
                    .p = 0.3,
                    .random = &s});
  bias_dropout_add_backward({.grad = g.view(),
                             .dx = out.dx.view(),
                             .dbias = out.dbias.view(),
                             .dresidual = out.dresidual.view(),
                             .p = 0.3,
                             .random = &state});
  return out;
}

TEST(Dropout, ThreadsAndCutsOfTheWorkChangeNothing) {
  constexpr int64_t kShapes[][2] = {{2000, 129}, {40, 4700}, {9001, 7}};
  for (const auto& [m, k] : kShapes) {
    const auto result = [m = m, k = k] { return everything(DType::bf16, m, k, states()[1]); };
    set_threads(1);
    const Results one = result();
    for (const int n : {2, 7}) {
      const Threads some(n);
      EXPECT_TRUE(result().same(one)) << n << " threads, " << m << "x" << k;
    }
    set_parallel_for([](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
      for (int64_t i = n; i > 0; --i) body(i - 1, i);
    });
    EXPECT_TRUE(result().same(one)) << m << "x" << k;
    set_parallel_for({});
  }
}

// Every shard of a tensor draws the same bits as the whole tensor.
TEST(Dropout, PiecesDrawWhatTheWholeDraws) {
  constexpr int64_t kRows = 70, kCols = 1100;
  constexpr int64_t kRowCuts[][4] = {{0, 70, 70, 70}, {0, 1, 32, 70}, {0, 33, 64, 70}};
  constexpr int64_t kColCuts[][4] = {
      {0, 1100, 1100, 1100}, {0, 3, 512, 1100}, {0, 519, 1099, 1100}};
  for (const Random& whole : states()) {
    const Mat x = Mat(DType::bf16, kRows, kCols).fill(1), y(DType::bf16, kRows, kCols),
              dx(DType::bf16, kRows, kCols);
    Random s = whole;
    bias_dropout_add({.x = x.view(), .y = y.view(), .p = 0.4, .random = &s});
    bias_dropout_add_backward({.grad = x.view(), .dx = dx.view(), .p = 0.4, .random = &whole});
    EXPECT_TRUE(dx.same_bytes(y));
    for (const auto& rows : kRowCuts)
      for (const auto& cols : kColCuts) {
        const Mat z(DType::bf16, kRows, kCols), dz(DType::bf16, kRows, kCols);
        for (int i = 0; i < 3; ++i)
          for (int j = 0; j < 3; ++j) {
            const auto piece = [&](const Mat& m) {
              return matrix(static_cast<uint16_t*>(m.view().data) + rows[i] * kCols + cols[j],
                            DType::bf16, rows[i + 1] - rows[i], cols[j + 1] - cols[j], kCols);
            };
            Random part = whole;
            part.row0 += static_cast<uint64_t>(rows[i]);
            part.col0 += static_cast<uint64_t>(cols[j]);
            bias_dropout_add_backward(
                {.grad = piece(x), .dx = piece(dz), .p = 0.4, .random = &part});
            bias_dropout_add({.x = piece(x), .y = piece(z), .p = 0.4, .random = &part});
          }
        EXPECT_TRUE(z.same_bytes(y) && dz.same_bytes(y));
      }
  }
}

// Prints a digest for this instruction set. The next test runs it in other processes.
TEST(Dropout, DISABLED_Digest) {
  uint64_t digest = 0xcbf29ce484222325U;
  for (const DType d : kPlain)
    for (const Random& s : states()) {
      const Results all = everything(d, 35, 1033, s);
      for (const Mat* m : {&all.y, &all.dx, &all.dbias, &all.dresidual})
        for (int64_t r = 0; r < m->rows(); ++r)
          for (int64_t c = 0; c < m->cols(); ++c)
            digest = (digest ^ m->code(r, c)) * 0x100000001b3U;
    }
  const std::string isa(cpu::isa_here().name);
  std::printf("digest %s %016llx\n", isa.c_str(), static_cast<unsigned long long>(digest));
}

#if defined(__x86_64__)
TEST(Dropout, EveryInstructionSetGivesTheSameBits) {
  std::array<char, 4096> path{};
  ASSERT_GT(readlink("/proc/self/exe", path.data(), path.size() - 1), 0);
  std::string first;
  for (const cpu::Isa& row : cpu::isas_here()) {
    const std::string isa(row.name);
    const std::string command =
        str("TENON_ISA=", isa, " '", path.data(),
            "' --gtest_filter=Dropout.DISABLED_Digest --gtest_also_run_disabled_tests");
    FILE* child = popen(command.c_str(), "r");
    ASSERT_NE(child, nullptr);
    std::string digest;
    std::array<char, 512> line{};
    const std::string start = str("digest ", isa, " ");
    while (std::fgets(line.data(), line.size(), child))
      if (std::string_view(line.data()).starts_with(start)) digest = line.data() + start.size();
    EXPECT_EQ(pclose(child), 0) << isa;
    EXPECT_NE(digest, "") << isa;
    if (first.empty()) first = digest;
    EXPECT_EQ(digest, first) << isa;
  }
}

// The threshold is also computed in IEEE arithmetic, in any rounding mode of the caller.
TEST(Dropout, ForeignRoundingModesChangeNothing) {
  const Mat x = Mat(DType::f32, 9, 133).fill(1), bias = Mat(DType::f32, 1, 133).fill(2);
  const auto result = [&](unsigned mode, double p) {
    const Mat y(DType::f32, 9, 133);
    Random s = states()[2];
    const unsigned before = _mm_getcsr();
    _mm_setcsr(mode);
    bias_dropout_add({.x = x.view(), .bias = bias.view(), .y = y.view(), .p = p, .random = &s},
                     kStrict);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & ~0x3fU, mode & ~0x3fU);
    return y;
  };
  for (const double p : {0.1, 0.3, 1.5 / 65536, 1 - 0.4 / 65536})
    for (const unsigned mode : {0x8040U, 0x2000U, 0x4000U, 0x6000U})
      EXPECT_TRUE(result(0x1f80U, p).same_bytes(result(0x1f80U | mode, p))) << p << " " << mode;
}
#endif

TEST(Dropout, TheOffsetMovesOnByOneInTrainingOnly) {
  const Mat x = Mat(DType::bf16, 5, 40).fill(1);
  Random s{.seed = 9, .offset = kBig - 1, .columns = 40};
  std::vector<Mat> seen;
  for (uint64_t i = 0; i < 4; ++i) {
    const Random saved = s;
    const Mat y(DType::bf16, 5, 40), dx(DType::bf16, 5, 40);
    bias_dropout_add({.x = x.view(), .y = y.view(), .p = 0.5, .random = &s});
    EXPECT_EQ(s.offset, kBig + i);
    bias_dropout_add({.x = x.view(), .y = dx.view(), .p = 0.5, .training = false, .random = &s});
    EXPECT_EQ(s.offset, kBig + i);
    bias_dropout_add_backward({.grad = x.view(), .dx = dx.view(), .p = 0.5, .random = &saved});
    bias_dropout_add_backward({.grad = x.view(), .dx = dx.view(), .p = 0.5, .random = &saved});
    EXPECT_TRUE(dx.same_bytes(y));
    EXPECT_EQ(saved.offset, kBig + i - 1);
    for (const Mat& other : seen) EXPECT_FALSE(y.same_bytes(other));
    seen.push_back(y);
  }
  EXPECT_EQ(words(s), (std::array<uint64_t, 5>{9, kBig + 3, 0, 0, 40}));
}

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kManyRows = 400;
#else
constexpr int64_t kManyRows = 10000;
#endif

TEST(Dropout, TheKeptShareOfManyElements) {
  constexpr int64_t kCols = 10001, kPiece = 200;
  const struct {
    double p;
    DType d;
  } list[] = {{0.001, DType::bf16}, {0.1, DType::f16}, {0.5, DType::bf16}, {0.9, DType::f16}};
  uint64_t seed = 2024;
  for (const auto& [p, d] : list) {
    const std::vector<uint16_t> x(kPiece * kCols, static_cast<uint16_t>(encode_ref(d, 1)));
    std::vector<uint16_t> y(x.size());
    Random s{.seed = seed++, .columns = kCols};
    uint64_t kept = 0;
    for (int64_t row = 0; row < kManyRows; row += kPiece) {
      s.row0 = static_cast<uint64_t>(row), s.offset = 17;
      bias_dropout_add({.x = matrix(x.data(), d, kPiece, kCols),
                        .y = matrix(y.data(), d, kPiece, kCols),
                        .p = p,
                        .random = &s});
      for (const uint16_t v : y) kept += v != 0;
    }
    const double n = kManyRows * kCols, q = 1 - Rule(p).t / 65536.0;
    const double sigma = std::sqrt(q * (1 - q) / n), share = static_cast<double>(kept) / n;
    EXPECT_LE(std::fabs(share - q), 5 * sigma) << p << ": " << (share - q) / sigma << " sigma";
  }
}

TEST(Dropout, TheMeanIsPreserved) {
  constexpr int64_t kCols = 1000, kPiece = 1000;
  const std::vector<float> x(kPiece * kCols, 1);
  std::vector<float> y(x.size());
  for (const double p : {0.1, 0.5, 0.9}) {
    Random s{.seed = 77, .columns = kCols};
    double sum = 0;
    for (int64_t row = 0; row < kManyRows; row += kPiece) {
      s.row0 = static_cast<uint64_t>(row), s.offset = 3;
      bias_dropout_add({.x = matrix(x.data(), DType::f32, kPiece, kCols),
                        .y = matrix(y.data(), DType::f32, kPiece, kCols),
                        .p = p,
                        .random = &s});
      for (const float v : y) sum += v;
    }
    const double n = std::ceil(kManyRows / double{kPiece}) * kPiece * kCols;
    const double q = 1 - Rule(p).t / 65536.0, sigma = std::sqrt((1 - q) / q / n);
    EXPECT_LE(std::fabs(sum / n - 1), 5 * sigma + 0x1p-24) << p;
  }
}

// The relative error of one rounding to the format.
Real unit(DType d) { return d == DType::f32 ? 0x1p-24L : d == DType::f16 ? 0x1p-11L : 0x1p-8L; }

TEST(Dropout, ForwardAgainstFloat64) {
  const int64_t m = 19, k = 37;
  unsigned turn = 0;
  for (const DType dx : kPlain)
    for (const DType db : kPlain)
      for (const DType dr : kPlain)
        for (const DType dy : kPlain)
          for (const Rounding rounding : {Rounding::once, Rounding::eager}) {
            const double p = turn % 4 * 0.25 + 0.1;
            const Mat x = Mat(dx, m, k).fill(turn), bias = Mat(db, 1, k).fill(turn + 1),
                      residual = Mat(dr, m, k).fill(turn + 2), y(dy, m, k);
            const Random before = states()[turn++ % 6];
            Random s = before;
            const Call call{&x, &bias, &residual, &y, p};
            bias_dropout_add(call.with(&s), {.rounding = rounding});
            const uint32_t t = Rule(p).t;
            const Real scale = 65536.0L / (65536 - t);
            const Real between = rounding == Rounding::eager ? unit(dx) : 0;
            for (int64_t r = 0; r < m; ++r)
              for (int64_t c = 0; c < k; ++c) {
                const bool kept = draw(before, r, c) >= t;
                const Real in = Real(x.at(r, c)) + bias.at(0, c);
                const Real dropped = kept ? in * scale : 0;
                const Real exact = residual.at(r, c) + dropped;
                // Two roundings and that of the scale before the sum, one after it, and subnormals
                // of f16.
                const Real size = std::fabs(dropped) + std::fabs(exact);
                const Real allowed = 1.01L * (3 * 0x1p-24L * size + 2 * between * size +
                                              unit(dy) * std::fabs(exact)) +
                                     (2 + scale) * 0x1p-25L;
                ASSERT_LE(std::fabs(y.at(r, c) - exact), allowed)
                    << turn << " (" << r << ", " << c << ")";
              }
          }
}

TEST(Dropout, ForwardBitByBit) {
  unsigned turn = 0;
  for (const DType dx : kPlain)
    for (const DType db : kPlain)
      for (const DType dr : kPlain)
        for (const DType dy : kPlain)
          for (int parts = 0; parts < 4; ++parts)
            for (const bool training : {true, false})
              for (const Options& options : {kStrict, kEager}) {
                const int64_t m = 7, k = 21 + turn % 5;
                const size_t shift = turn % 4;
                const Mat x = Mat(dx, m, k, turn % 3, shift).fill(turn, true),
                          bias = Mat(db, 1, k, 0, shift + 1).fill(turn + 1, true),
                          residual = Mat(dr, m, k, turn % 2, shift + 3).fill(turn + 2, true),
                          y(dy, m, k, turn % 4, shift + 5);
                check({.x = &x,
                       .bias = parts & 1 ? &bias : nullptr,
                       .residual = parts & 2 ? &residual : nullptr,
                       .y = &y,
                       .p = turn % 7 * 0.15,
                       .training = training},
                      states()[turn % 6], options, str("turn ", turn));
                ++turn;
                if (HasFailure()) return;
              }
}

// Eager equals three calls with one op each, with the chain's dtype between them.
TEST(Dropout, EagerEqualsOpByOp) {
  const Fused add = fuse([](Expr a, Expr b) { return a + b; });
  for (const DType d : kPlain) {
    const int64_t m = 66, k = 59;
    const Mat x = Mat(d, m, k).fill(1), bias = Mat(d, 1, k).fill(2),
              residual = Mat(d, m, k).fill(3), y(d, m, k), a(d, m, k), b(d, m, k), z(d, m, k);
    Random s = states()[3], s2 = s;
    bias_dropout_add(Call{&x, &bias, &residual, &y, 0.3}.with(&s), kEager);
    add.forward({x.view(), bias.view()}, a.view(), kStrict);
    bias_dropout_add(Call{&a, nullptr, nullptr, &b, 0.3}.with(&s2), kStrict);
    add.forward({residual.view(), b.view()}, z.view(), kStrict);
    EXPECT_TRUE(y.same_bytes(z)) << info(d).name;
  }
}

TEST(Dropout, NativeAndStrictAreTheSameBits) {
  for (const DType d : kPlain)
    for (const Rounding rounding : {Rounding::once, Rounding::eager}) {
      const Mat x = Mat(d, 33, 65).fill(1, true), y(d, 33, 65), z(d, 33, 65);
      Random s = states()[1], s2 = s;
      bias_dropout_add(Call{&x, nullptr, &x, &y, 0.7}.with(&s), {Precision::strict, rounding});
      bias_dropout_add(Call{&x, nullptr, &x, &z, 0.7}.with(&s2), {Precision::native, rounding});
      EXPECT_TRUE(y.same_bytes(z));
    }
}

struct Gradients {
  Mat g, dx, dbias, dresidual;
};

void check(const Gradients& v, const Random& s, double p, bool training, int parts,
           const Options& options, const std::string& what) {
  const auto view = [&](const Mat& m, int part) { return parts & part ? m.view() : View{}; };
  const Random copy = s;
  bias_dropout_add_backward({.grad = v.g.view(),
                             .dx = view(v.dx, 1),
                             .dbias = view(v.dbias, 2),
                             .dresidual = view(v.dresidual, 4),
                             .p = p,
                             .training = training,
                             .random = training ? &copy : nullptr},
                            options);
  EXPECT_EQ(words(copy), words(s));
  const Rule rule(p);
  for (int64_t c = 0; c < v.g.cols(); ++c) {
    std::vector<float> column;
    for (int64_t r = 0; r < v.g.rows(); ++r) {
      const float g = v.g.at(r, c);
      float dx = training ? rule(s, r, c, g) : g;
      if (options.rounding == Rounding::eager)
        dx = rounded_ref(parts & 1 ? v.dx.dtype() : v.g.dtype(), dx);
      column.push_back(dx);
      if (parts & 1) expect_element(v.dx, r, c, dx, what);
      if (parts & 4) expect_element(v.dresidual, r, c, g, what);
    }
    if (parts & 2) expect_element(v.dbias, 0, c, tree(column), what);
  }
  int part = 1;
  for (const Mat* m : {&v.dx, &v.dbias, &v.dresidual}) {
    EXPECT_TRUE(parts & part ? m->guards_hold() : m->untouched()) << what;
    part *= 2;
  }
}

TEST(Dropout, BackwardBitByBit) {
  unsigned turn = 0;
  for (const DType dg : kPlain)
    for (const DType dx : kPlain)
      for (const DType db : kPlain)
        for (const DType dr : kPlain)
          for (int parts = 1; parts < 8; ++parts)
            for (const bool training : {true, false})
              for (const Options& options : {kStrict, kEager}) {
                const int64_t m = 5 + turn % 9, k = 17 + turn % 5;
                const size_t shift = turn % 4;
                Gradients v{Mat(dg, m, k, turn % 3, shift), Mat(dx, m, k, 1, shift + 1),
                            Mat(db, 1, k, 0, shift + 3), Mat(dr, m, k, 2, shift)};
                v.g.fill(turn, turn % 3 == 0);
                check(v, states()[turn % 6], turn % 7 * 0.15, training, parts, options,
                      str("turn ", turn));
                ++turn;
                if (HasFailure()) return;
              }
}

// Row counts near the powers of two at which blocks of partial sums begin, and several column
// chunks.
TEST(Dropout, BiasGradientsAreTheTreeSum) {
  constexpr int64_t kShapes[][2] = {{1, 9},     {2, 9},     {127, 9},  {128, 9},   {129, 300},
                                    {257, 513}, {1000, 31}, {5001, 3}, {300, 4500}};
  unsigned turn = 0;
  for (const auto& [m, k] : kShapes)
    for (const Options& options : {kStrict, kEager}) {
      Gradients v{Mat(DType::bf16, m, k), Mat(DType::bf16, m, k), Mat(DType::f32, 1, k),
                  Mat(DType::f32, m, k)};
      v.g.fill(turn);
      check(v, states()[turn % 6], 0.3, true, 7, options, str(m, "x", k));
      ++turn;
      if (HasFailure()) return;
    }
}

// Difference quotients of Σ g·y in float64, with the mask of a forward call.
TEST(Dropout, GradientsAreDifferenceQuotients) {
  const int64_t m = 6, k = 23;
  const double p = 0.35, h = 1e-3;
  const Random s{.seed = 31, .offset = 8, .row0 = 2, .col0 = 3, .columns = 40};
  const Mat one = filled(DType::f32, m, k, 1), mask(DType::f32, m, k);
  Random forward = s;
  bias_dropout_add(Call{&one, nullptr, nullptr, &mask, p}.with(&forward));
  const Mat x = Mat(DType::f32, m, k).fill(1), bias = Mat(DType::f32, 1, k).fill(2),
            residual = Mat(DType::f32, m, k).fill(3), g = Mat(DType::f32, m, k).fill(4);
  const auto loss = [&](int which, int64_t row, int64_t col, double step) {
    double sum = 0;
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < k; ++c) {
        const auto moved = [&](int i) { return which == i && c == col && (i == 1 || r == row); };
        const double in =
            x.at(r, c) + (moved(0) ? step : 0) + bias.at(0, c) + (moved(1) ? step : 0);
        sum += g.at(r, c) * (residual.at(r, c) + (moved(2) ? step : 0) + mask.at(r, c) * in);
      }
    return sum;
  };
  const auto slope = [&](int which, int64_t r, int64_t c) {
    return (loss(which, r, c, h) - loss(which, r, c, -h)) / (2 * h);
  };
  const Mat dx(DType::f32, m, k), dbias(DType::f32, 1, k), dresidual(DType::f32, m, k);
  bias_dropout_add_backward({.grad = g.view(),
                             .dx = dx.view(),
                             .dbias = dbias.view(),
                             .dresidual = dresidual.view(),
                             .p = p,
                             .random = &s});
  int dropped = 0;
  for (int64_t c = 0; c < k; ++c) {
    for (int64_t r = 0; r < m; ++r) {
      dropped += mask.at(r, c) == 0;
      EXPECT_NEAR(dx.at(r, c), slope(0, r, c), 1e-5);
      EXPECT_NEAR(dresidual.at(r, c), slope(2, r, c), 1e-5);
    }
    EXPECT_NEAR(dbias.at(0, c), slope(1, 0, c), 1e-5);
  }
  EXPECT_GT(dropped, 20);
  EXPECT_LT(dropped, 80);
}

TEST(Dropout, EvaluationNeedsNoState) {
  const Mat x = Mat(DType::f32, 9, 31).fill(1, true), bias = Mat(DType::f32, 1, 31).fill(2),
            residual = Mat(DType::f32, 9, 31).fill(3), y(DType::f32, 9, 31), z(DType::f32, 9, 31);
  const Call call{&x, &bias, &residual, &y, 0.5, false};
  bias_dropout_add(call.with(nullptr));
  for (int64_t r = 0; r < 9; ++r)
    for (int64_t c = 0; c < 31; ++c)
      expect_element(y, r, c, residual.at(r, c) + (x.at(r, c) + bias.at(0, c)), "evaluation");
  Random unfit{.seed = 1, .columns = 2};  // not checked
  bias_dropout_add(Call{&x, &bias, &residual, &z, 1, false}.with(&unfit));
  EXPECT_TRUE(z.same_bytes(y));
  EXPECT_EQ(words(unfit), (std::array<uint64_t, 5>{1, 0, 0, 0, 2}));
}

TEST(Dropout, GetBiasDropoutAddFixesTraining) {
  const Mat x = Mat(DType::bf16, 9, 31).fill(1), bias = Mat(DType::bf16, 1, 31).fill(2),
            residual = Mat(DType::bf16, 9, 31).fill(3);
  const auto result = [&](auto f, bool asked, const Options& options, uint64_t moves) {
    const Mat y(DType::bf16, 9, 31);
    Random s{.seed = 4, .columns = 31};
    f(Call{&x, &bias, &residual, &y, 0.5, asked}.with(&s), options);
    EXPECT_EQ(s.offset, moves);
    return y;
  };
  for (const bool training : {true, false})
    for (const Options& options : {kStrict, kEager}) {
      const Mat direct = result(bias_dropout_add, training, options, training);
      for (const bool asked : {true, false})
        EXPECT_TRUE(
            result(get_bias_dropout_add(training), asked, options, training).same_bytes(direct));
    }
  EXPECT_FALSE(result(get_bias_dropout_add(true), true, {}, 1)
                   .same_bytes(result(get_bias_dropout_add(false), true, {}, 0)));
}

TEST(Dropout, InPlace) {
  for (const DType d : kPlain)
    for (const bool training : {true, false}) {
      const int64_t m = 65, k = 530;
      const Mat x = Mat(d, m, k, 3, 1).fill(1, true), bias = Mat(d, 1, k).fill(2),
                residual = Mat(d, m, k, 3, 1).fill(3, true), y(d, m, k, 3, 1), both(d, m, k, 3, 1);
      Random s[5];
      for (Random& one : s) one = states()[1];
      bias_dropout_add(Call{&x, &bias, &residual, &y, 0.5, training}.with(&s[0]));
      bias_dropout_add(Call{&x, &bias, &x, &both, 0.5, training}.with(&s[1]));
      const Mat in_x = x, in_residual = residual, in_both = x;
      bias_dropout_add(Call{&in_x, &bias, &residual, &in_x, 0.5, training}.with(&s[2]));
      bias_dropout_add(Call{&x, &bias, &in_residual, &in_residual, 0.5, training}.with(&s[3]));
      bias_dropout_add(Call{&in_both, &bias, &in_both, &in_both, 0.5, training}.with(&s[4]));
      EXPECT_TRUE(in_x.same_bytes(y) && in_residual.same_bytes(y) && in_both.same_bytes(both));

      const Random saved = states()[1];
      const Mat dx(d, m, k, 3, 1), dbias(DType::f32, 1, k), dbias2(DType::f32, 1, k),
          dresidual(d, m, k, 3, 1), in_grad = x, in_grad2 = x;
      const auto back = [&](const Mat& g, const Mat& to_x, const Mat& to_b, const Mat& to_r) {
        bias_dropout_add_backward({.grad = g.view(),
                                   .dx = to_x.view(),
                                   .dbias = to_b.view(),
                                   .dresidual = to_r.view(),
                                   .p = 0.5,
                                   .training = training,
                                   .random = &saved});
      };
      back(x, dx, dbias, dresidual);
      const Mat dx2(d, m, k, 3, 1), dr2(d, m, k, 3, 1);
      back(in_grad, in_grad, dbias2, dr2);
      EXPECT_TRUE(in_grad.same_bytes(dx) && dr2.same_bytes(dresidual) && dbias2.same_bytes(dbias));
      back(in_grad2, dx2, dbias2, in_grad2);
      EXPECT_TRUE(dx2.same_bytes(dx) && dbias2.same_bytes(dbias));
    }
  // With one row, dbias may be the same memory as grad.
  const Mat g = Mat(DType::f32, 1, 50).fill(1), dx(DType::f32, 1, 50), dbias(DType::f32, 1, 50),
            in_grad = g;
  const Random s = states()[1];
  bias_dropout_add_backward(
      {.grad = g.view(), .dx = dx.view(), .dbias = dbias.view(), .p = 0.5, .random = &s});
  bias_dropout_add_backward(
      {.grad = in_grad.view(), .dbias = in_grad.view(), .p = 0.5, .random = &s});
  EXPECT_TRUE(dbias.same_bytes(dx) && in_grad.same_bytes(dx));
}

TEST(Dropout, EmptyTensors) {
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{0, 8}, {8, 0}, {0, 0}})
    for (const bool training : {true, false}) {
      const Mat x(DType::f32, m, k), y(DType::f32, m, k), bias = Mat(DType::f32, 1, k).fill(1),
                                                          dbias(DType::f32, 1, k);
      Random s{.seed = 1, .columns = static_cast<uint64_t>(k)};
      const Random saved = s;
      bias_dropout_add(Call{&x, &bias, &x, &y, 0.5, training}.with(&s));
      bias_dropout_add(Call{&x, nullptr, nullptr, &y, 0.5, training}.with(&s));
      EXPECT_EQ(s.offset, training ? 2U : 0U);  // every run counts, also an empty one
      bias_dropout_add_backward({.grad = x.view(),
                                 .dx = y.view(),
                                 .dbias = dbias.view(),
                                 .dresidual = y.view(),
                                 .p = 0.5,
                                 .training = training,
                                 .random = &saved});
      for (int64_t c = 0; c < k; ++c) EXPECT_EQ(dbias.code(0, c), 0U);
      EXPECT_TRUE(y.untouched() && dbias.guards_hold());
      // Null pointers are valid for empty tensors.
      const View none = matrix(nullptr, DType::f32, m, k);
      bias_dropout_add({.x = none, .y = none, .p = 0.5, .training = training, .random = &s});
      if (m + k > 0)
        bias_dropout_add_backward(
            {.grad = none, .dx = none, .p = 0.5, .training = training, .random = &s});
    }
  bias_dropout_add_backward({.grad = View{}, .training = false});
}

// −0, infinities and NaN follow normal arithmetic. Dropped elements are +0.
TEST(Dropout, SpecialValues) {
  const Random s{.seed = 8, .columns = 400};
  const Rule rule(0.5);
  const Mat zero = filled(DType::f32, 1, 400, 0);
  for (const float special : {kInf, -kInf, kNan, -0.0F}) {
    const Mat x = filled(DType::f32, 1, 400, special), y(DType::f32, 1, 400), b(DType::f32, 1, 400),
              r(DType::f32, 1, 400), dx(DType::f32, 1, 400);
    Random s1 = s, s2 = s, s3 = s;
    bias_dropout_add(Call{&x, nullptr, nullptr, &y}.with(&s1));
    bias_dropout_add(Call{&zero, &x, nullptr, &b}.with(&s2));
    bias_dropout_add(Call{&zero, nullptr, &x, &r}.with(&s3));
    bias_dropout_add_backward({.grad = x.view(), .dx = dx.view(), .p = 0.5, .random = &s});
    for (int64_t c = 0; c < 400; ++c) {
      const bool kept = draw(s, 0, c) >= rule.t;
      EXPECT_TRUE(equal(y.at(0, c), kept ? special : 0.0F));
      EXPECT_TRUE(equal(dx.at(0, c), kept ? special : 0.0F));
      EXPECT_TRUE(equal(b.at(0, c), kept ? 0.0F + special : 0.0F));
      EXPECT_TRUE(equal(r.at(0, c), special + 0.0F));
    }
  }
  // inf - inf occurs only where x is kept.
  const Mat up = filled(DType::f32, 1, 400, kInf), down = filled(DType::f32, 1, 400, -kInf),
            y(DType::f32, 1, 400);
  Random s1 = s;
  bias_dropout_add(Call{&up, nullptr, &down, &y}.with(&s1));
  for (int64_t c = 0; c < 400; ++c)
    EXPECT_TRUE(equal(y.at(0, c), draw(s, 0, c) >= rule.t ? kNan : -kInf));
}

// The library's oracle, used by `tenon check`, accepts correct results and rejects wrong ones.
TEST(Dropout, TheOracleAgrees) {
  int seen = 0;
  bool spoil = false;
  set_observer([&](const Step& step, const RunArgs& args, const Options&, const auto& run) {
    run();
    ++seen;
    if (spoil) *static_cast<float*>(args.out[0].data) += 1;
    const auto wrong = verify(step, args);
    EXPECT_EQ(wrong.has_value(), spoil) << wrong.value_or("spoiled");
  });
  for (const DType d : kPlain)
    for (const Random& s : states()) everything(d, 6, 700, s);
  spoil = true;
  everything(DType::f32, 6, 700, states()[0]);
  set_observer({});
  EXPECT_EQ(seen, 44);
}

TEST(Dropout, TwoThreadsWithStatesOfTheirOwn) {
  constexpr int kCalls = 40;
  const Mat x = Mat(DType::bf16, 130, 257).fill(1);
  const auto start = [](int t) {
    return Random{.seed = 100 + static_cast<uint64_t>(t), .columns = 257};
  };
  const auto calls = [&](int t, std::vector<Mat>& out) {
    Random s = start(t);
    for (int i = 0; i < kCalls; ++i) {
      const Mat y(DType::bf16, 130, 257), dx(DType::bf16, 130, 257);
      const Random saved = s;
      bias_dropout_add(Call{&x, nullptr, nullptr, &y, 0.5}.with(&s));
      bias_dropout_add_backward({.grad = x.view(), .dx = dx.view(), .p = 0.5, .random = &saved});
      EXPECT_TRUE(dx.same_bytes(y));
      out.push_back(y);
    }
    EXPECT_EQ(s.offset, uint64_t{kCalls});
  };
  std::vector<Mat> alone[2], beside[2];
  for (int t = 0; t < 2; ++t) calls(t, alone[t]);
  std::barrier together(2);
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&, t] {
      together.arrive_and_wait();
      calls(t, beside[t]);
    });
  for (std::thread& t : threads) t.join();
  for (int t = 0; t < 2; ++t)
    for (size_t i = 0; i < kCalls; ++i) EXPECT_TRUE(beside[t][i].same_bytes(alone[t][i]));
  EXPECT_FALSE(alone[0][0].same_bytes(alone[1][0]));
}

View cut(View v, int64_t rows, int64_t cols) {
  v.rows = rows, v.cols = cols;
  return v;
}

// Invalid calls must not change outputs, inputs or the state.
struct Bad {
  const Mat x = Mat(DType::f32, 6, 8).fill(1), bias = Mat(DType::f32, 1, 8).fill(2),
            residual = Mat(DType::f32, 6, 8).fill(3);
  const Mat y{DType::f32, 6, 8}, dx{DType::f32, 6, 8}, dbias{DType::f32, 1, 8},
      dresidual{DType::f32, 6, 8};
  const Random good{.seed = 1, .offset = 2, .columns = 8};
  mutable Random state = good;

  template <class Change>
  void forward(Change change, std::initializer_list<std::string_view> parts,
               Code code = Code::invalid_argument) const {
    BiasDropoutAdd call{x.view(), bias.view(), residual.view(), y.view(), 0.5, true, &state};
    change(call);
    const Random before = state;
    expect_error([&] { bias_dropout_add(call); }, code, parts);
    expect_error([&] { bias_dropout_add(call); }, code, {"bias_dropout_add: "});
    untouched(before);
  }
  template <class Change>
  void backward(Change change, std::initializer_list<std::string_view> parts,
                Code code = Code::invalid_argument) const {
    BiasDropoutAddBackward call{x.view(), dx.view(), dbias.view(), dresidual.view(),
                                0.5,      true,      &state};
    change(call);
    const Random before = state;
    expect_error([&] { bias_dropout_add_backward(call); }, code, parts);
    expect_error([&] { bias_dropout_add_backward(call); }, code, {"bias_dropout_add backward: "});
    untouched(before);
  }
  void untouched(const Random& before) const {
    for (const Mat* m : {&y, &dx, &dbias, &dresidual})
      EXPECT_TRUE(m->untouched()) << "an output was written";
    EXPECT_TRUE(x.same_bytes(Mat(DType::f32, 6, 8).fill(1)) &&
                bias.same_bytes(Mat(DType::f32, 1, 8).fill(2)) &&
                residual.same_bytes(Mat(DType::f32, 6, 8).fill(3)));
    EXPECT_EQ(words(state), words(before));
    state = good;
  }
};

TEST(DropoutErrors, Probabilities) {
  const Bad b;
  const struct {
    double p;
    std::string_view text;
  } list[] = {{-0.1, "p = -0.1"},
              {1.5, "p = 1.5"},
              {-5e-324, "p = -5e-324"},
              {std::nextafter(1.0, 2.0), "p = 1.0000000000000002"},
              {10, "p = 10"},
              {std::numeric_limits<double>::infinity(), "p = inf"},
              {-std::numeric_limits<double>::infinity(), "p = -inf"},
              {std::numeric_limits<double>::quiet_NaN(), "p = nan"}};
  for (const auto& [p, text] : list)
    for (const bool training : {true, false}) {
      const auto change = [p = p, training](auto& call) { call.p = p, call.training = training; };
      b.forward(change, {text, "probability", "[0, 1]"});
      b.backward(change, {text, "probability", "[0, 1]"});
    }
}

TEST(DropoutErrors, States) {
  const Bad b;
  const auto none = [](auto& call) { call.random = nullptr; };
  b.forward(none, {"random is null", "training", "columns = 8"});
  b.backward(none, {"random is null", "training", "columns = 8"});
  const struct {
    uint64_t col0, columns;
    std::string_view text;
  } list[] = {{0, 0, "columns = 0"},
              {0, 7, "columns = 7"},
              {1, 8, "col0 = 1"},
              {3, 10, "col0 = 3"},
              {~uint64_t{0}, 16, "col0 = 18446744073709551615"},
              {~uint64_t{0} - 7, ~uint64_t{0}, "col0 = 18446744073709551608"}};
  for (const auto& [col0, columns, text] : list) {
    const auto change = [&, col0 = col0, columns = columns](auto&) {
      b.state.col0 = col0, b.state.columns = columns;
    };
    b.forward(change, {text, "8 columns are drawn", "set columns"});
    b.backward(change, {text, "8 columns are drawn", "set columns"});
  }
}

TEST(DropoutErrors, ShapesAndDTypes) {
  const Bad b;
  const auto y = [](auto v) { return [v](BiasDropoutAdd& c) { c.y = v(c.y); }; };
  const auto x = [](auto v) { return [v](BiasDropoutAdd& c) { c.x = v(c.x); }; };
  const auto bias = [](auto v) { return [v](BiasDropoutAdd& c) { c.bias = v(c.bias); }; };
  const auto residual = [](auto v) {
    return [v](BiasDropoutAdd& c) { c.residual = v(c.residual); };
  };
  b.forward(y([](View v) { return cut(v, 5, 8); }), {"y is 5x8", "must be 6x8", "shape of x"});
  b.forward(y([](View v) { return cut(v, 6, 7); }), {"y is 6x7", "must be 6x8"});
  b.forward(y([](View) { return View{}; }), {"y is 0x0", "must be 6x8"});
  b.forward(bias([](View v) { return cut(v, 1, 7); }), {"bias is 1x7", "must be 1x8", "column"});
  b.forward(bias([&](View) { return b.residual.view(); }), {"bias is 6x8", "must be 1x8"});
  b.forward(residual([](View v) { return cut(v, 1, 8); }), {"residual is 1x8", "must be 6x8"});
  const auto e4m3 = [](View v) {
    v.dtype = DType::e4m3;
    return v;
  };
  const auto strange = [](View v) {
    v.dtype = static_cast<DType>(77);
    return v;
  };
  const auto null = [](View v) {
    v.data = nullptr;
    return v;
  };
  const auto narrow = [](View v) {
    v.stride = 7;
    return v;
  };
  b.forward(x(e4m3), {"x is e4m3", "f32, f16 or bf16"}, Code::unsupported);
  b.forward(y(e4m3), {"y is e4m3", "f32, f16 or bf16"}, Code::unsupported);
  b.forward(bias(e4m3), {"bias is e4m3", "f32, f16 or bf16"}, Code::unsupported);
  b.forward(residual(e4m3), {"residual is e4m3", "f32, f16 or bf16"}, Code::unsupported);
  b.forward(x(strange), {"x has the dtype number 77", "f32, f16, bf16"});
  b.forward(y(strange), {"y has the dtype number 77"});
  b.forward(bias(strange), {"bias has the dtype number 77"});
  b.forward(residual(strange), {"residual has the dtype number 77"});
  b.forward(x(null), {"x is 6x8", "null", "pass the address"});
  b.forward(y(null), {"y is 6x8", "null"});
  b.forward(bias(null), {"bias is 1x8", "null"});
  b.forward(residual(null), {"residual is 6x8", "null"});
  b.forward(x(narrow), {"x has row stride 7", "8 columns", "at least 8"});
  b.forward(y(narrow), {"y has row stride 7"});
  b.forward(residual(narrow), {"residual has row stride 7"});
  b.forward(x([](View v) { return cut(v, -1, 8); }), {"x is -1x8", "negative"});
  b.forward(x([](View v) { return cut(v, 6, -8); }), {"x is 6x-8", "negative"});
  b.forward(x([](View v) { return cut(v, INT64_MAX, 8); }), {"x of", "does not fit"});

  b.backward([](BiasDropoutAddBackward& c) { c.dx = c.dbias = c.dresidual = View{}; },
             {"no output", "pass dx, dbias or dresidual"});
  b.backward([](BiasDropoutAddBackward& c) { c.dx = cut(c.dx, 5, 8); },
             {"dx is 5x8", "must be 6x8", "shape of grad"});
  b.backward([](BiasDropoutAddBackward& c) { c.dresidual = cut(c.dresidual, 6, 7); },
             {"dresidual is 6x7", "must be 6x8"});
  b.backward([](BiasDropoutAddBackward& c) { c.dbias = cut(c.dbias, 1, 7); },
             {"dbias is 1x7", "must be 1x8"});
  b.backward([](BiasDropoutAddBackward& c) { c.dbias = c.dx; }, {"dbias is 6x8", "must be 1x8"});
  b.backward([&](BiasDropoutAddBackward& c) { c.grad = e4m3(c.grad); }, {"grad is e4m3"},
             Code::unsupported);
  b.backward([&](BiasDropoutAddBackward& c) { c.dx = e4m3(c.dx); }, {"dx is e4m3"},
             Code::unsupported);
  b.backward([&](BiasDropoutAddBackward& c) { c.dbias = e4m3(c.dbias); }, {"dbias is e4m3"},
             Code::unsupported);
  b.backward([&](BiasDropoutAddBackward& c) { c.dresidual = null(c.dresidual); },
             {"dresidual is 6x8", "null"});
  b.backward([&](BiasDropoutAddBackward& c) { c.grad = narrow(c.grad); },
             {"grad has row stride 7"});
}

TEST(DropoutErrors, OptionsThatDoNotExist) {
  const Bad b;
  for (const Options& options :
       {Options{.precision = static_cast<Precision>(7)},
        Options{.rounding = static_cast<Rounding>(7)}, Options{.device = static_cast<Device>(7)}}) {
    expect_error(
        [&] {
          bias_dropout_add(Call{&b.x, nullptr, nullptr, &b.y}.with(&b.state), options);
        },
        Code::invalid_argument, {"bias_dropout_add", "number 7"});
    expect_error(
        [&] {
          bias_dropout_add_backward(
              {.grad = b.x.view(), .dx = b.dx.view(), .p = 0.5, .random = &b.state}, options);
        },
        Code::invalid_argument, {"bias_dropout_add backward", "number 7"});
    b.untouched(b.good);
  }
}

TEST(DropoutErrors, Overlaps) {
  const Mat big = Mat(DType::f32, 12, 32).fill(9), before = big;
  Random s{.seed = 1, .columns = 8};
  const auto at = [&](int64_t r, int64_t c, int64_t rows, int64_t cols) {
    return matrix(static_cast<float*>(big.view().data) + r * 32 + c, DType::f32, rows, cols, 32);
  };
  const View x = at(0, 0, 6, 8), y = at(0, 8, 6, 8);
  const auto bad = [&](BiasDropoutAdd call, std::initializer_list<std::string_view> parts) {
    call.p = 0.5, call.random = &s;
    expect_error([&] { bias_dropout_add(call); }, Code::invalid_argument, parts);
    EXPECT_TRUE(big.same_bytes(before));
    EXPECT_EQ(s.offset, 0U);
  };
  bad({.x = x, .y = at(0, 4, 6, 8)}, {"bias_dropout_add", "y overlaps", "x", "own memory"});
  bad({.x = x, .y = at(1, 0, 6, 8)}, {"y overlaps the input x"});
  bad({.x = x, .residual = at(6, 0, 6, 8), .y = at(5, 0, 6, 8)}, {"y overlaps the input x"});
  bad({.x = x, .residual = at(6, 8, 6, 8), .y = at(5, 8, 6, 8)}, {"y overlaps the input residual"});
  bad({.x = x, .bias = at(3, 8, 1, 8), .y = y}, {"y overlaps the input bias"});
  bad({.x = at(0, 0, 1, 8), .bias = at(1, 0, 1, 8), .y = at(1, 0, 1, 8)},
      {"y overlaps the input bias"});
  bad({.x = x, .y = matrix(x.data, DType::bf16, 6, 8, 64)}, {"y overlaps the input x"});
  bad({.x = x, .residual = at(0, 2, 6, 8), .y = x}, {"y overlaps the input residual"});

  const auto back = [&](BiasDropoutAddBackward call,
                        std::initializer_list<std::string_view> parts) {
    call.p = 0.5, call.random = &s;
    expect_error([&] { bias_dropout_add_backward(call); }, Code::invalid_argument, parts);
    EXPECT_TRUE(big.same_bytes(before));
  };
  back({.grad = x, .dx = y, .dresidual = y}, {"dx and dresidual overlap", "own memory"});
  back({.grad = x, .dx = y, .dbias = at(2, 8, 1, 8)}, {"dx and dbias overlap"});
  back({.grad = at(6, 0, 6, 8), .dbias = at(2, 8, 1, 8), .dresidual = y},
       {"dbias and dresidual overlap"});
  back({.grad = x, .dx = at(1, 0, 6, 8)}, {"dx overlaps the input grad"});
  back({.grad = x, .dbias = at(0, 0, 1, 8)}, {"dbias overlaps the input grad"});
  back({.grad = x, .dresidual = at(0, 1, 6, 8)}, {"dresidual overlaps the input grad"});
  back({.grad = x, .dx = x, .dresidual = x}, {"dx and dresidual overlap"});

  // Adjacent tensors do not overlap, and inputs may share memory.
  bias_dropout_add({.x = x, .bias = at(0, 0, 1, 8), .residual = x, .y = y, .p = 0.5, .random = &s});
  const Random first{.seed = 1, .columns = 8};
  for (int64_t r = 0; r < 6; ++r)
    for (int64_t c = 0; c < 8; ++c) {
      const float in = before.at(r, c) + before.at(0, c);
      expect_element(big, r, 8 + c, before.at(r, c) + Rule(0.5)(first, r, c, in), "side by side");
    }
}

}  // namespace
}  // namespace tenon::test
