// Tests of formulas as graphs: sharing, simplification, folding, text, lowering, printing, oracle.
#include "tenon/expr.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <locale>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "expr/evaluate.h"
#include "expr/lower.h"
#include "expr/native.h"
#include "expr/order.h"
#include "expr/parse.h"
#include "expr/print.h"
#include "expr/registry.h"
#include "support/oracle.h"
#include "tenon/error.h"

namespace {

using namespace tenon;

constexpr float kInf = std::numeric_limits<float>::infinity();

uint32_t bits(float v) { return __builtin_bit_cast(uint32_t, v); }
float from_bits(uint32_t b) { return __builtin_bit_cast(float, b); }

class ExprTest : public testing::Test {
 protected:
  uint32_t id(Expr e) { return graph.id(e); }
  Word word(Expr e) { return graph[graph.id(e)].word; }

  Graph graph;
  Expr x = graph.load(0), y = graph.load(1);
};

TEST_F(ExprTest, EqualNodesAreOneNode) {
  EXPECT_EQ(id(graph.load(0)), id(x));
  EXPECT_NE(id(x), id(y));
  const Expr first = exp(x * y + 2.0F);
  const uint32_t size = graph.size();
  EXPECT_EQ(id(exp(x * y + 2.0F)), id(first));
  EXPECT_EQ(graph.size(), size);
  EXPECT_EQ(id(select(x < y, x, y)), id(select(x < y, x, y)));
  EXPECT_NE(id(select(x < y, x, y)), id(select(x <= y, x, y)));
  EXPECT_NE(id(round(x, DType::bf16)), id(round(x, DType::f16)));
  EXPECT_EQ(id(round(x, DType::f32)), id(x));
  EXPECT_NE(id(x - y), id(y - x));
}

TEST_F(ExprTest, ConstantsAreEqualByTheirBits) {
  EXPECT_EQ(id(graph.constant(0.5F)), id(Expr(0.5F)));
  EXPECT_NE(id(graph.constant(0.0F)), id(graph.constant(-0.0F)));
  EXPECT_EQ(id(graph.constant(NAN)), id(graph.constant(NAN)));
}

TEST_F(ExprTest, ChildrenComeBeforeTheirParents) {
  const Expr e = select(x < y, exp(x * y), x / (y + 1.0F));
  const uint32_t root = id(e);
  std::set<uint32_t> seen;
  for (const uint32_t n : order(graph, std::span(&root, 1))) {
    for (int i = 0; i < graph[n].arity(); ++i) EXPECT_TRUE(seen.contains(graph[n].in[i]));
    EXPECT_TRUE(seen.insert(n).second);
  }
  EXPECT_TRUE(seen.contains(root));
}

TEST_F(ExprTest, WhatSimplificationMayDo) {
  EXPECT_EQ(id(x * 1.0F), id(x));
  EXPECT_EQ(id(Expr(1.0F) * x), id(x));
  EXPECT_EQ(id(x / 1.0F), id(x));
  EXPECT_EQ(id(x + -0.0F), id(x));
  EXPECT_EQ(id(Expr(-0.0F) + x), id(x));
  EXPECT_EQ(id(-(-x)), id(x));
  EXPECT_EQ(id(select(Expr(1.0F) < Expr(2.0F), x, y)), id(x));
  EXPECT_EQ(id(select(Expr(1.0F) > Expr(2.0F), x, y)), id(y));
  EXPECT_EQ(id(select(Expr(NAN) == Expr(NAN), x, y)), id(y));
  EXPECT_EQ(id(select(Expr(NAN) != Expr(NAN), x, y)), id(x));
  EXPECT_EQ(id(select(Expr(0.0F) == Expr(-0.0F), x, y)), id(x));
}

// Each of these rules would change a bit for some input: sign of zero, NaN, infinity or rounding.
TEST_F(ExprTest, WhatSimplificationMustNotDo) {
  EXPECT_EQ(word(x + 0.0F), Word::add);  // −0 + 0 is +0
  EXPECT_EQ(word(Expr(0.0F) + x), Word::add);
  EXPECT_EQ(word(x * 0.0F), Word::mul);  // NaN, infinities, signs
  EXPECT_EQ(word(Expr(0.0F) * x), Word::mul);
  EXPECT_EQ(word(x - x), Word::sub);
  EXPECT_EQ(word(x / x), Word::div);
  EXPECT_EQ(word(Expr(0.0F) - x), Word::sub);  // −x differs at 0
  EXPECT_EQ(word(Expr(1.0F) / x), Word::div);
  EXPECT_EQ(word(x / 3.0F), Word::div);  // not a multiplication by 1/3
  EXPECT_EQ(word(Expr(0.0F) / x), Word::div);
  EXPECT_EQ(word(sqrt(x * x)), Word::sqrt);
  EXPECT_EQ(word(log(exp(x))), Word::log);
  EXPECT_EQ(word(round(round(x, DType::bf16), DType::f16)), Word::round);
  EXPECT_EQ(word(select(x == x, y, 0.0F)), Word::select);
  // No reassociation: both sums stay in order.
  const Expr sum = (x + 1.0F) + 2.0F;
  EXPECT_EQ(word(sum), Word::add);
  EXPECT_EQ(graph[id(sum)].in[0], id(x + 1.0F));
  EXPECT_NE(id((x + y) + 1.0F), id(x + (y + 1.0F)));
  EXPECT_NE(id((x * 3.0F) * 5.0F), id(x * 15.0F));
  EXPECT_NE(id((x * y) / y), id(x));
  EXPECT_NE(id(x * 2.0F), id(x + x));
}

TEST_F(ExprTest, FoldingOfKnownBits) {
  const auto folded = [](Expr e) {
    EXPECT_TRUE(e.is_constant());
    return bits(e.constant());
  };
  EXPECT_EQ(folded(Expr(0.1F) + Expr(0.2F)), 0x3e99999aU);
  EXPECT_EQ(folded(Expr(1.0F) / Expr(3.0F)), 0x3eaaaaabU);
  EXPECT_EQ(folded(sqrt(Expr(2.0F))), 0x3fb504f3U);
  EXPECT_EQ(folded(min(Expr(-0.0F), Expr(0.0F))), 0x80000000U);
  EXPECT_EQ(folded(min(Expr(0.0F), Expr(-0.0F))), 0x80000000U);
  EXPECT_EQ(folded(max(Expr(-0.0F), Expr(0.0F))), 0U);
  EXPECT_EQ(folded(max(Expr(0.0F), Expr(-0.0F))), 0U);
  EXPECT_EQ(folded(-Expr(0.0F)), 0x80000000U);
  EXPECT_EQ(folded(abs(Expr(-0.0F))), 0U);
  EXPECT_EQ(folded(Expr(0x1p-140F) * Expr(0.5F)), 0x100U);  // subnormals are kept
  EXPECT_EQ(folded(round(Expr(17.0F), DType::e4m3)), bits(16.0F));
  EXPECT_EQ(folded(exp(Expr(0.0F))), bits(1.0F));
  EXPECT_EQ(folded(Expr(1.0F) / Expr(-0.0F)), bits(-kInf));
  EXPECT_TRUE(std::isnan(min(Expr(NAN), Expr(1.0F)).constant()));
  EXPECT_TRUE(std::isnan(max(Expr(1.0F), Expr(NAN)).constant()));
  EXPECT_EQ(folded(rsqrt(Expr(1.5F))), 0x3f5105ebU);  // two roundings; one rounding would give …ec
}

// float64 has more than twice the digits, so a second rounding of its result is correct.
TEST_F(ExprTest, FoldingIsFp32Arithmetic) {
  std::mt19937 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float a = from_bits(static_cast<uint32_t>(random()));
    const float b = from_bits(static_cast<uint32_t>(random()));
    const double da = a, db = b;
    const auto same = [](float got, double exact) {
      const auto f = static_cast<float>(exact);
      return std::isnan(f) ? std::isnan(got) : bits(got) == bits(f);
    };
    ASSERT_TRUE(same((Expr(a) + Expr(b)).constant(), da + db)) << a << " " << b;
    ASSERT_TRUE(same((Expr(a) - Expr(b)).constant(), da - db)) << a << " " << b;
    ASSERT_TRUE(same((Expr(a) * Expr(b)).constant(), da * db)) << a << " " << b;
    ASSERT_TRUE(same((Expr(a) / Expr(b)).constant(), da / db)) << a << " " << b;
    ASSERT_TRUE(same(sqrt(Expr(a)).constant(), std::sqrt(da))) << a;
  }
}

TEST_F(ExprTest, TwoGraphsDoNotMix) {
  Graph other;
  const Expr z = other.load(0);
  EXPECT_THROW(x + z, Error);
  EXPECT_THROW(select(x < 1.0F, y, z), Error);
  EXPECT_THROW(graph.id(z), Error);
  EXPECT_THROW(grad(x, Expr(1.0F), std::span(&z, 1)), Error);
  EXPECT_NO_THROW(x + Expr(1.0F));  // a constant belongs to no graph
}

TEST_F(ExprTest, TheNodeLimitIsAnError) {
  Expr e = x;
  EXPECT_THROW(
      {
        for (uint32_t i = 0; i <= Graph::kMaxNodes; ++i) e = e + y;
      },
      Error);
  EXPECT_EQ(graph.size(), Graph::kMaxNodes);
  EXPECT_EQ(id(graph.load(0)), id(x));  // the graph is still valid
}

bool same_tree(const Graph& g, uint32_t a, const Graph& h, uint32_t b) {
  const Node &n = g[a], &m = h[b];
  if (n.word != m.word || n.detail != m.detail || n.slot != m.slot ||
      bits(n.value) != bits(m.value))
    return false;
  for (int i = 0; i < n.arity(); ++i)
    if (!same_tree(g, n.in[i], h, m.in[i])) return false;
  return true;
}

TEST(Text, ReadsBackAsTheSameGraph) {
  const std::vector<std::string> inputs{"x", "a", "b"};
  for (const char* text : {"x",
                           "1.5",
                           "-x",
                           "x - (a - b)",
                           "x - a - b",
                           "x + (a + b)",
                           "x/(a*b)",
                           "x/a*b",
                           "x*(a/b)",
                           "-(x*a)",
                           "(-x)*a",
                           "x*(-1.5)",
                           "x - -a",
                           "2 - x*-3",
                           "(x + a)*(x - b)/(a + 1e-7)",
                           "select(x <= a + 1, -x, max(a, -2))",
                           "round(x*0.1, e4m3)",
                           "rsqrt(abs(x) + 1e-30)",
                           "erfc(-0.70710678*x)",
                           "x + -0*a",
                           "-(-(x + a))*b",
                           "x/-a",
                           "(x/a)/(b/2)",
                           "select(select(x > a, x, a) != b, exp(x), expm1(log1p(b)))",
                           "x*3.4028235e38 + 1e-45"}) {
    const Formula f = parse(text, inputs);
    const std::string printed = formula_text(*f.graph, std::span(&f.root, 1), inputs);
    ASSERT_EQ(std::ranges::count(printed, '\n'), 1) << printed;
    const Formula again = parse(printed, inputs);
    EXPECT_TRUE(same_tree(*f.graph, f.root, *again.graph, again.root)) << text << " -> " << printed;
  }
}

TEST(Text, SharedPartsAreNamed) {
  Graph graph;
  const Expr x = graph.load(0);
  const Expr t = exp(x + 1.0F);
  const uint32_t root = graph.id(t * t + graph.load(7));
  const std::vector<std::string> names{"x"};
  EXPECT_EQ(formula_text(graph, std::span(&root, 1), names), "t1 = exp(x + 1)\nt1*t1 + in7\n");
}

// An independent interpreter of lowered graphs: one fp32 operation per node.
float lowered_value(const Graph& g, uint32_t root, float x) {
  std::vector<float> v(g.size());
  for (const uint32_t id : order(g, std::span(&root, 1))) {
    const Node& n = g[id];
    const auto in = [&](int i) { return v[n.in[static_cast<size_t>(i)]]; };
    int e = 0;
    switch (n.word) {
      case Word::constant:
        v[id] = n.value;
        break;
      case Word::load:
        v[id] = x;
        break;
      case Word::add:
        v[id] = in(0) + in(1);
        break;
      case Word::sub:
        v[id] = in(0) - in(1);
        break;
      case Word::mul:
        v[id] = in(0) * in(1);
        break;
      case Word::div:
        v[id] = in(0) / in(1);
        break;
      case Word::neg:
        v[id] = -in(0);
        break;
      case Word::abs:
        v[id] = std::fabs(in(0));
        break;
      case Word::sqrt:
        v[id] = std::sqrt(in(0));
        break;
      case Word::min:
        v[id] = std::isnan(in(0)) ? in(0) : in(1) < in(0) ? in(1) : in(0);
        break;
      case Word::max:
        v[id] = std::isnan(in(0)) ? in(0) : in(1) > in(0) ? in(1) : in(0);
        break;
      case Word::fma:
        v[id] = std::fma(in(0), in(1), in(2));
        break;
      case Word::inverse:
        v[id] = 1 / in(0);
        break;
      case Word::pow2:
        v[id] = static_cast<float>(std::exp2(static_cast<double>(in(0)) - 12583039));
        break;
      case Word::exponent:
      case Word::mantissa: {
        float m = std::frexp(in(0), &e);
        if (m < 0x1.6a09e6p-1F) m *= 2, --e;  // reduce to [√½, √2)
        v[id] = n.word == Word::exponent ? static_cast<float>(e) : m;
        break;
      }
      case Word::select: {
        const std::array<bool, 6> holds{in(0) < in(1),  in(0) <= in(1), in(0) > in(1),
                                        in(0) >= in(1), in(0) == in(1), in(0) != in(1)};
        v[id] = holds[n.detail] ? in(2) : in(3);
        break;
      }
      default:
        ADD_FAILURE() << info(n.word).name << " in a lowered graph";
    }
  }
  return v[root];
}

struct Transcendental {
  const char* name;
  Expr (*word)(Expr);
  long double (*exact)(long double);
  float low, high;
  double ulps;
};
const std::vector<Transcendental>& transcendentals() {
  static const std::vector<Transcendental> kRows{
      {"exp", exp, expl, -110, 90, 1},
      {"expm1", expm1, expm1l, -30, 90, 2.5},
      {"log", log, logl, 0x1p-149F, 1e6F, 2.5},
      {"log1p", log1p, log1pl, -0.999F, 100, 2.5},
      {"sigmoid", sigmoid, [](long double v) { return 1 / (1 + expl(-v)); }, -105, 105, 2.5},
      {"tanh", tanh, tanhl, -12, 12, 2.5},
      {"erf", erf, erfl, -5, 5, 2.5},
      {"erfc", erfc, erfcl, -5, 10.5F, 2.5},
      {"rsqrt", rsqrt, [](long double v) { return 1 / sqrtl(v); }, 1e-6F, 1e6F, 1.5},
  };
  return kRows;
}

TEST(Lower, WordsBecomeIeeeOperationsWithinTheirBound) {
  for (const Transcendental& t : transcendentals()) {
    Graph graph;
    const uint32_t root = graph.id(t.word(graph.load(0)));
    for (const Precision p : {Precision::strict, Precision::native}) {
      const Lowered low = lower(graph, std::span(&root, 1), p);
      for (int i = 0; i <= 20'000; ++i) {
        const float v = t.low + (t.high - t.low) * static_cast<float>(i) / 20'000;
        const long double exact = t.exact(v);
        const float got = lowered_value(low.graph, low.roots[0], v);
        const double ulp = std::max(static_cast<double>(std::nextafterf(std::fabs(got), kInf)) -
                                        std::fabs(static_cast<double>(got)),
                                    0x1p-149);
        const bool overflows = exact > 0x1.ffffffp127L && std::isinf(got);
        // Native: the tightest bound is 2^−15.5 relative, for f16 outputs.
        const double bound = std::max(
            1.01 * t.ulps * ulp,
            p == Precision::native ? static_cast<double>(fabsl(exact)) * 0x1p-15 / M_SQRT2 : 0.0);
        ASSERT_TRUE(overflows || fabsl(got - exact) <= bound)
            << t.name << "(" << v << ") = " << got << ", exact " << static_cast<double>(exact);
      }
    }
  }
}

TEST(Lower, OnlyBasicAndLoweredWordsRemain) {
  for (const Transcendental& t : transcendentals()) {
    Graph graph;
    const Expr x = graph.load(0);
    const std::vector<uint32_t> roots{
        graph.id(t.word(x)), graph.id(grad(t.word(x), graph.load(1), std::span(&x, 1))[0])};
    const Lowered strict = lower(graph, roots, Precision::strict);
    const Lowered native = lower(graph, roots, Precision::native);
    for (const Lowered* l : {&strict, &native})
      for (uint32_t i = 0; i < l->graph.size(); ++i) {
        const WordKind kind = info(l->graph[i].word).kind;
        EXPECT_NE(kind, WordKind::transcendental) << t.name << ": " << info(l->graph[i].word).name;
      }
    const bool differ = print(strict.graph, strict.roots) != print(native.graph, native.roots);
    EXPECT_EQ(differ, std::string(t.name) != "rsqrt") << t.name;
  }
}

TEST(Print, LiteralsAreExact) {
  std::mt19937 random(2);
  for (int i = 0; i < 100'000; ++i) {
    const float v = from_bits(static_cast<uint32_t>(random()));
    if (!std::isfinite(v)) continue;
    std::string text = literal(v);
    if (text.front() == '(') text = text.substr(1, text.size() - 2);
    ASSERT_EQ(text.back(), 'f') << text;
    char* end = nullptr;
    ASSERT_EQ(bits(std::strtof(text.c_str(), &end)), bits(v)) << text;
    ASSERT_EQ(*end, 'f') << text;
  }
  EXPECT_EQ(literal(-0.0F), "(-0x0p+0f)");
  EXPECT_EQ(literal(kInf), "tenon_bits(2139095040u)");
  EXPECT_EQ(literal(-kInf), "tenon_bits(4286578688u)");
  EXPECT_EQ(literal(from_bits(0x7fc00000)), "tenon_bits(2143289344u)");
}

TEST(Print, EveryConstantOfTheGraphAndNoOther) {
  Graph graph;
  const Expr x = graph.load(0);
  const std::vector<uint32_t> roots{graph.id(erfc(x) * 0.1F), graph.id(log(max(x, -kInf)))};
  const Lowered low = lower(graph, roots, Precision::strict);
  std::set<uint32_t> expected, found;
  for (const uint32_t id : order(low.graph, low.roots))
    if (low.graph[id].word == Word::constant) expected.insert(bits(low.graph[id].value));
  const std::string text = print(low.graph, low.roots);
  const std::regex hex("-?0x[0-9a-f.]+p[+-][0-9]+f"), other("tenon_bits\\(([0-9]+)u\\)");
  for (std::sregex_iterator it(text.begin(), text.end(), hex), end; it != end; ++it)
    found.insert(bits(std::strtof(it->str().c_str(), nullptr)));
  for (std::sregex_iterator it(text.begin(), text.end(), other), end; it != end; ++it)
    found.insert(static_cast<uint32_t>(std::stoul((*it)[1].str())));
  EXPECT_EQ(found, expected);
  EXPECT_TRUE(expected.contains(bits(kInf)) && expected.contains(bits(-kInf)));
  EXPECT_NE(text.find("in[0]"), std::string::npos);
  EXPECT_NE(text.find("out[1] = "), std::string::npos);
}

// The host may use any locale. Kernel text, keys and messages must not depend on it.
class CommaLocale : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(Print, NumbersDoNotDependOnTheLocale) {
  const std::locale before = std::locale::global(std::locale(std::locale(), new CommaLocale));
  const std::string joined = str(1234567, " ", 1.5F, " ", literal(__builtin_inff()), literal(1.5F));
  std::locale::global(before);
  EXPECT_EQ(joined, "1234567 1.5 tenon_bits(2139095040u)0x1.8p+0f");
}

TEST(Print, StatementsOfASmallFormula) {
  Graph graph;
  const Expr x = graph.load(0);
  const Expr y = graph.load(3);
  const Expr product = -(x * y);  // in separate statements: nodes are numbered in creation order
  const Expr most = max(x, y);
  const std::vector<uint32_t> roots{graph.id(select(x < 0.5F, product, most)),
                                    graph.id(Expr(-2.0F))};
  const std::string t = print(graph, roots);
  EXPECT_EQ(t,
            "const float t0 = in[0];\nconst float t1 = in[3];\nconst float t2 = t0 * t1;\n"
            "const float t3 = -t2;\nconst float t4 = tenon_max(t0, t1);\n"
            "const float t5 = t0 < 0x1p-1f ? t3 : t4;\nout[0] = t5;\nout[1] = (-0x1p+1f);\n");
}

struct Evaluated {
  double value, bound;
};
Evaluated evaluated(Graph& g, Expr e, std::vector<float> loads, double native = 0) {
  const uint32_t root = g.id(e);
  std::vector<const float*> pointers;
  for (const float& v : loads) pointers.push_back(&v);
  const Evaluation r = Oracle(g, std::span(&root, 1), native).run(1, pointers);
  return {r.value[0][0], r.bound[0][0]};
}

TEST(OracleTest, ValuesMatchLongDouble) {
  Graph g;
  const Expr x = g.load(0), y = g.load(1);
  for (const float a : {-7.25F, -1.0F, -0.001F, 0.3F, 1.0F, 6.5F})
    for (const float b : {-3.0F, 0.125F, 9.0F}) {
      const long double p = a, q = b;
      const auto near = [&](Expr e, long double exact) {
        EXPECT_NEAR(evaluated(g, e, {a, b}).value, static_cast<double>(exact),
                    1e-14 * std::max(1.0, static_cast<double>(fabsl(exact))));
      };
      near(x * sigmoid(1.5F * x), p / (1 + expl(-1.5L * p)));
      near((x + y) * (x - y) / (1.0F + x * x), (p + q) * (p - q) / (1 + p * p));
      near(log1p(exp(x)), log1pl(expl(p)));
      near(tanh(x) + erf(y) - erfc(x), tanhl(p) + erfl(q) - erfcl(p));
      near(rsqrt(abs(x)) + sqrt(abs(y)), 1 / sqrtl(fabsl(p)) + sqrtl(fabsl(q)));
      near(expm1(x) * log(abs(y)), expm1l(p) * logl(fabsl(q)));
      near(select(x < y, max(x, y), min(x, -y)), p < q ? q : std::min(p, -q));
      near(round(x * 3.0F, DType::e4m3), nearest(static_cast<double>(3 * p), DType::e4m3));
    }
}

TEST(OracleTest, BoundsWorkedOutByHand) {
  Graph g;
  const Expr x = g.load(0), y = g.load(1);
  constexpr double kUlp = 0x1p-23;  // ulp of values in [1, 2)
  EXPECT_EQ(evaluated(g, x, {3, 5}).bound, 0);
  EXPECT_EQ(evaluated(g, x + y, {3, 5}).bound, 0.5 * 8 * kUlp);  // value 8
  // (3 + 5)·3 = 24: half an ulp of 16 for the product, plus 3 times the error of the sum.
  EXPECT_EQ(evaluated(g, (x + y) * x, {3, 5}).bound, 0.5 * 16 * kUlp + 3 * 4 * kUlp);
  EXPECT_DOUBLE_EQ(evaluated(g, exp(x), {1, 0}).bound, 2 * kUlp);  // value e, in [2, 4)
  EXPECT_DOUBLE_EQ(evaluated(g, rsqrt(x), {4, 0}).bound, 1.5 * 0.5 * kUlp);
  EXPECT_DOUBLE_EQ(evaluated(g, tanh(x), {1, 0}).bound, 2.5 * 0.5 * kUlp);
  const double native = native_error(DType::bf16);
  EXPECT_DOUBLE_EQ(native, std::exp2(-12.5));
  EXPECT_DOUBLE_EQ(native_error(DType::f16), std::exp2(-15.5));
  EXPECT_EQ(native_error(DType::f32), 0);
  EXPECT_DOUBLE_EQ(evaluated(g, exp(x), {1, 0}, native).bound, M_E * native);
  // Basic functions have the same bound.
  EXPECT_EQ(evaluated(g, x + y, {3, 5}, native).bound, 4 * kUlp);
}

TEST(OracleTest, UlpsOfFp32) {
  EXPECT_EQ(ulp32(1), 0x1p-23);
  EXPECT_EQ(ulp32(-1.999), 0x1p-23);
  EXPECT_EQ(ulp32(2), 0x1p-22);
  EXPECT_EQ(ulp32(0), 0x1p-149);
  EXPECT_EQ(ulp32(0x1p-126), 0x1p-149);
  EXPECT_EQ(ulp32(1e-60), 0x1p-149);
  EXPECT_EQ(ulp32(INFINITY), 0);
  EXPECT_EQ(ulp32(NAN), 0);
  std::mt19937 random(4);
  for (int i = 0; i < 100'000; ++i) {
    const float v = from_bits(static_cast<uint32_t>(random()) & 0x7f7fffffU);
    if (v >= 0x1.fffffep127F) continue;
    ASSERT_EQ(ulp32(v), static_cast<double>(std::nextafterf(v, kInf)) - static_cast<double>(v));
  }
}

TEST(OracleTest, NearestAgreesWithTheConversions) {
  std::mt19937 random(6);
  for (const DType d : {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::e5m2})
    for (int i = 0; i < 200'000; ++i) {
      const float v = from_bits(static_cast<uint32_t>(random()));
      if (std::isnan(v)) continue;
      const double expected = decode(d, encode(d, v));
      const double got = nearest(v, d);
      ASSERT_TRUE(got == expected && std::signbit(got) == std::signbit(expected)) << v;
    }
  EXPECT_EQ(nearest(1 + 0x1p-8, DType::bf16), 1);
  EXPECT_EQ(nearest(1 + 0x1p-8 + 0x1p-50, DType::bf16), 1 + 0x1p-7);  // one rounding only
}

TEST(OracleTest, WithinAcceptsUpToTheBound) {
  constexpr double kUlp = 0x1p-23;
  EXPECT_TRUE(within(1, DType::f32, 1, 0));
  EXPECT_TRUE(within(1 + 0x1p-23F, DType::f32, 1, kUlp));
  EXPECT_TRUE(within(1 + 0x1p-23F, DType::f32, 1, kUlp / 1.005));  // slack of 1 %
  EXPECT_FALSE(within(1 + 0x1p-23F, DType::f32, 1, kUlp / 1.02));
  EXPECT_FALSE(within(1 + 0x1p-22F, DType::f32, 1, kUlp));
  // A tie in bf16. Without an error only the even neighbour is valid, with an error both are.
  const double tie = 1 + 0x1p-8;
  EXPECT_TRUE(within(1, DType::bf16, tie, 0));
  EXPECT_FALSE(within(1 + 0x1p-7F, DType::bf16, tie, 0));
  EXPECT_TRUE(within(1 + 0x1p-7F, DType::bf16, tie, 1e-9));
  EXPECT_FALSE(within(1 - 0x1p-8F, DType::bf16, tie, 1e-9));
  EXPECT_FALSE(within(1 + 0x1p-6F, DType::bf16, tie, 1e-9));
  EXPECT_TRUE(within(NAN, DType::f32, NAN, 0));
  EXPECT_FALSE(within(NAN, DType::f32, 1, 1));
  EXPECT_FALSE(within(1, DType::f32, NAN, 0));
  EXPECT_TRUE(within(kInf, DType::f32, INFINITY, 0));
  EXPECT_FALSE(within(0x1.fffffep127F, DType::f32, INFINITY, 0));
  // At the overflow threshold, infinity and the largest value of the same sign are both valid.
  EXPECT_TRUE(within(kInf, DType::f16, 65519, 2));
  EXPECT_TRUE(within(65504, DType::f16, 65519, 2));
  EXPECT_FALSE(within(-kInf, DType::f16, 65519, 2));
  EXPECT_FALSE(within(kInf, DType::f16, 65000, 2));
  EXPECT_TRUE(within(kInf, DType::f32, 0x1.ffffffp127, 0));
  EXPECT_FALSE(within(kInf, DType::f32, 0x1.fffffep127, 0));
}

// The functions of the hardware have no value at compile time.
TEST(NativeTest, FunctionsOfConstantsAreFolded) {
  for (const float divisor :
       {0.0F, -0.0F, 0x1p-149F, 1e-30F, -1e-30F, 1e-18F, 3.0F, 1e18F, 1e25F, -1e25F, kInf, NAN})
    for (const auto& function : {tenon::sigmoid, tenon::tanh}) {
      Graph graph;
      const uint32_t root = graph.id(function(graph.load(0) / divisor));
      const Lowered formula = native(graph, std::span(&root, 1), 0x1p-13);
      for (uint32_t i = 0; i < formula.graph.size(); ++i) {
        const Node& n = formula.graph[i];
        if (info(n.word).kind == WordKind::transcendental) {
          EXPECT_NE(formula.graph[n.in[0]].word, Word::constant) << divisor;
        }
      }
    }
}

// For fp32 results, only compositions of functions are replaced.
TEST(NativeTest, Fp32KeepsStrictFunctions) {
  const auto sizes = [](const char* text) {
    Graph graph;
    const Expr x = graph.load(0);
    const uint32_t root = graph.id(call(activation(text), std::span(&x, 1), {}));
    const auto nodes = [&](const Lowered& l) { return order(l.graph, l.roots).size(); };
    return std::pair(nodes(native(graph, std::span(&root, 1), 0)),
                     nodes(lower(graph, std::span(&root, 1), Precision::strict)));
  };
  for (const char* same : {"silu", "gelu", "tanh", "exp(x)*erf(x) + log1p(x)/3", "erfc(x)"}) {
    const auto [native, strict] = sizes(same);
    EXPECT_EQ(native, strict) << same;
  }
  for (const char* shorter : {"mish", "softplus", "gelu_erf", "tanh(softplus(x))"}) {
    const auto [native, strict] = sizes(shorter);
    EXPECT_LT(native, strict * 4 / 5) << shorter;
  }
}

}  // namespace
