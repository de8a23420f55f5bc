// Tests of derivatives: activations against differences, formula functions against calculus, and
// kinks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "expr/lower.h"
#include "support/formula.h"
#include "support/oracle.h"
#include "tenon/activation.h"
#include "tenon/error.h"

namespace {

using namespace tenon;
using test::value;
using test::values;

constexpr float kInf = std::numeric_limits<float>::infinity();

// An activation of loads (the inputs, then the parameters), and its gradients for the seed 1.
struct Built {
  explicit Built(const Activation& f) {
    for (int i = 0; i < f.inputs; ++i) inputs.push_back(graph.load(slots++));
    std::vector<Expr> parameters;
    for (const Parameter& p : f.parameters) {
      parameters.push_back(graph.load(slots++));
      defaults.push_back(p.value);
    }
    y = call(f, inputs, parameters);
    d = grad(y, Expr(1.0F), inputs);
  }

  // The loads for given points of the inputs.
  [[nodiscard]] std::vector<std::vector<float>> at(std::vector<std::vector<float>> columns) const {
    for (const float p : defaults) columns.emplace_back(columns[0].size(), p);
    return columns;
  }
  double slope(size_t input, std::vector<float> point) {
    std::vector<std::vector<float>> columns;
    for (const float v : point) columns.push_back({v});
    return values(graph, d[input], at(columns))[0];
  }
  double result(std::vector<float> point) {
    std::vector<std::vector<float>> columns;
    for (const float v : point) columns.push_back({v});
    return values(graph, y, at(columns))[0];
  }

  Graph graph;
  uint32_t slots = 0;
  std::vector<Expr> inputs, d;
  std::vector<float> defaults;
  Expr y;
};

// x ± 4h is exact in fp32 for points of this spacing.
constexpr float kStep = 0x1p-5F;
constexpr float kSpacing = 0x1p-10F;

// The points with input `input` moved by `k` steps.
std::vector<std::vector<float>> moved(std::vector<std::vector<float>> at, size_t input, int k) {
  for (float& v : at[input]) v += static_cast<float>(k) * kStep;
  return at;
}

// Whether the difference stencil of each point crosses a kink: the operands of a min, a max or a
// select, or the operand of an abs and 0, change their order.
std::vector<bool> near_kinks(Built& f, size_t input, const std::vector<std::vector<float>>& at) {
  std::vector<bool> result(at[0].size());
  const uint32_t nodes = f.graph.id(f.y) + 1;  // the derivatives come later
  for (uint32_t id = 0; id < nodes; ++id) {
    const Node n = f.graph[id];
    const bool compares = n.word == Word::min || n.word == Word::max || n.word == Word::select;
    if (!compares && n.word != Word::abs) continue;
    const Expr left(&f.graph, n.in[0]);
    const Expr right = compares ? Expr(&f.graph, n.in[1]) : f.graph.constant(0);
    std::vector<int> first;
    for (int k = -4; k <= 4; ++k) {
      const auto there = moved(at, input, k);
      const std::vector<double> l = values(f.graph, left, there), r = values(f.graph, right, there);
      std::vector<int> order;
      for (size_t i = 0; i < l.size(); ++i) order.push_back(l[i] < r[i] ? -1 : l[i] > r[i]);
      if (first.empty()) first = order;
      for (size_t i = 0; i < order.size(); ++i)
        if (order[i] != first[i]) result[i] = true;
    }
  }
  return result;
}

// Eighth-order differences. With this step their error is below 1e-8.
std::vector<double> differences(Built& f, size_t input, const std::vector<std::vector<float>>& at) {
  constexpr std::array<double, 4> kWeights{4.0 / 5, -1.0 / 5, 4.0 / 105, -1.0 / 280};
  std::vector<double> sum(at[0].size());
  for (int k = 1; k <= 4; ++k) {
    const std::vector<double> high = values(f.graph, f.y, moved(at, input, k));
    const std::vector<double> low = values(f.graph, f.y, moved(at, input, -k));
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] += kWeights[static_cast<size_t>(k - 1)] * (high[i] - low[i]);
  }
  for (double& v : sum) v /= static_cast<double>(kStep);
  return sum;
}

void expect_slopes(const Activation& f) {
  Built built(f);
  std::mt19937 random(5);
  std::uniform_int_distribution<int> units(-20 * 1024, 20 * 1024);
  std::vector<std::vector<float>> points(static_cast<size_t>(f.inputs));
  for (auto& column : points)
    for (int i = 0; i < 2000; ++i) column.push_back(static_cast<float>(units(random)) * kSpacing);
  const auto loads = built.at(points);
  for (size_t input = 0; input < points.size(); ++input) {
    const std::vector<double> expected = differences(built, input, loads);
    const std::vector<double> got = values(built.graph, built.d[input], loads);
    const std::vector<bool> near = near_kinks(built, input, loads);
    size_t compared = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const float x = points[input][i];
      if (near[i]) continue;
      ++compared;
      // 2/√π is an fp32 constant in the derivative. A gated activation multiplies its error by b.
      const double factor = f.inputs == 2 ? std::fabs(static_cast<double>(points[1][i])) : 0;
      ASSERT_LE(std::fabs(got[i] - expected[i]),
                1e-7 * std::max({1.0, std::fabs(expected[i]), factor}))
          << f.name << " by input " << input << " at " << x << ": " << got[i] << " instead of "
          << expected[i];
    }
    EXPECT_GT(compared, 1900U) << f.name;
  }
}

TEST(Activations, MatchDifferences) {
  for (const std::string& name : activation_names()) {
    const Activation f = activation(name);
    expect_slopes(f);
    if (f.inputs == 1) expect_slopes(gated(f));
  }
}

TEST(Activations, MatchDifferencesWithOtherParameters) {
  for (const char* text :
       {"leaky_relu(slope=0.3)", "leaky_relu(slope=-2)", "elu(alpha=0.5)", "gated(elu(alpha=3))",
        "situglu(beta1=1.5,beta2=3)", "clamped_swiglu(limit=3, alpha=1, offset=0)"})
    expect_slopes(activation(text));
}

double unary_slope(const std::string& name, float x) {
  Built f(activation(name));
  return f.slope(0, {x});
}

TEST(Kinks, OfActivations) {
  for (const float zero : {0.0F, -0.0F}) {
    EXPECT_EQ(unary_slope("relu", zero), 0);
    EXPECT_EQ(unary_slope("srelu", zero), 0);
    EXPECT_EQ(unary_slope("leaky_relu", zero), static_cast<double>(0.01F));
    EXPECT_EQ(unary_slope("leaky_relu(slope=0.25)", zero), 0.25);
    EXPECT_EQ(unary_slope("elu", zero), 1);
    EXPECT_EQ(unary_slope("elu(alpha=0.5)", zero), 0.5);
  }
  EXPECT_EQ(unary_slope("relu", 0x1p-149F), 1);
  EXPECT_EQ(unary_slope("relu", -0x1p-149F), 0);
  EXPECT_EQ(unary_slope("leaky_relu", 0x1p-149F), 1);
  // The clamp passes the gradient at both kinks: (clamp + 3)/6 + max(x, −3)/6.
  EXPECT_EQ(unary_slope("hardswish", 3), 1.5);
  EXPECT_EQ(unary_slope("hardswish", std::nextafterf(3, 4)), 1);
  EXPECT_EQ(unary_slope("hardswish", -3), -0.5);
  EXPECT_EQ(unary_slope("hardswish", std::nextafterf(-3, -4)), 0);
  EXPECT_DOUBLE_EQ(unary_slope("softplus", 20), 1 / (1 + std::exp(-20.0)));
  EXPECT_EQ(unary_slope("softplus", std::nextafterf(20, 21)), 1);
}

TEST(Kinks, ClampedSwigluKeepsTheGradientAtTheBoundary) {
  Built f(activation("clamped_swiglu"));
  const double alpha = static_cast<double>(1.702F);
  const auto swish = [&](double w) { return w / (1 + std::exp(-alpha * w)); };
  const auto swish_slope = [&](double w) {
    const double s = 1 / (1 + std::exp(-alpha * w));
    return s + alpha * w * s * (1 - s);
  };
  EXPECT_NEAR(f.slope(0, {7, 2}), 3 * swish_slope(7), 1e-12);
  EXPECT_EQ(f.slope(0, {std::nextafterf(7, 8), 2}), 0);
  EXPECT_NEAR(f.slope(1, {2, 7}), swish(2), 1e-12);
  EXPECT_EQ(f.slope(1, {2, std::nextafterf(7, 8)}), 0);
  EXPECT_NEAR(f.slope(1, {2, -7}), swish(2), 1e-12);
  EXPECT_EQ(f.slope(1, {2, std::nextafterf(-7, -8)}), 0);
}

TEST(Kinks, OfWords) {
  Graph graph;
  const Expr a = graph.load(0), b = graph.load(1);
  const std::array both{a, b};
  const std::vector<Expr> most = grad(max(a, b), Expr(1.0F), both);
  const std::vector<Expr> least = grad(min(a, b), Expr(1.0F), both);
  for (const auto& [x, y] : {std::pair{2.0F, 2.0F}, {0.0F, -0.0F}, {-0.0F, 0.0F}, {kInf, kInf}}) {
    // For equal arguments the first one gets the gradient.
    EXPECT_EQ(value(graph, most[0], {x, y}), 1);
    EXPECT_EQ(value(graph, most[1], {x, y}), 0);
    EXPECT_EQ(value(graph, least[0], {x, y}), 1);
    EXPECT_EQ(value(graph, least[1], {x, y}), 0);
  }
  EXPECT_EQ(value(graph, most[0], {1, 2}), 0);
  EXPECT_EQ(value(graph, most[1], {1, 2}), 1);
  EXPECT_EQ(value(graph, least[0], {1, 2}), 1);
  EXPECT_EQ(value(graph, least[1], {1, 2}), 0);
  for (const auto& d : {most, least}) {  // with NaN both arguments get the gradient
    EXPECT_EQ(value(graph, d[0], {NAN, 2}), 1);
    EXPECT_EQ(value(graph, d[1], {NAN, 2}), 1);
  }
  const Expr of_abs = grad(abs(a), Expr(1.0F), both)[0];
  EXPECT_EQ(value(graph, of_abs, {0, 0}), 0);
  EXPECT_EQ(value(graph, of_abs, {-0.0F, 0}), 0);
  EXPECT_EQ(value(graph, of_abs, {-2, 0}), -1);
  EXPECT_EQ(value(graph, of_abs, {2, 0}), 1);
}

TEST(Words, MatchCalculus) {
  struct Row {
    const char* name;
    Expr (*word)(Expr);
    std::function<double(double)> slope;
    std::vector<float> points;
  };
  const double two_over_root_pi = 2 / std::sqrt(M_PI);
  const std::vector<float> all{-20, -3.5, -1, -0.25, 0, 0x1p-20F, 0.5, 1, 2.75, 10, 20};
  const std::vector<float> positive{0x1p-20F, 0.5, 1, 2.75, 10, 1e6F};
  const std::vector<float> above{-0.875, -0.25, 0, 0x1p-20F, 0.5, 10, 1e6F};
  const auto gauss = [](double x) { return std::exp(-x * x); };
  const std::vector<Row> rows{
      {"neg", [](Expr x) { return -x; }, [](double) { return -1; }, all},
      {"abs", abs, [](double x) { return (x > 0) - (x < 0); }, all},
      {"sqrt", sqrt, [](double x) { return 0.5 / std::sqrt(x); }, positive},
      {"rsqrt", rsqrt, [](double x) { return -0.5 * std::pow(x, -1.5); }, positive},
      {"exp", exp, [](double x) { return std::exp(x); }, all},
      {"expm1", expm1, [](double x) { return std::exp(x); }, all},
      {"log", log, [](double x) { return 1 / x; }, positive},
      {"log1p", log1p, [](double x) { return 1 / (1 + x); }, above},
      {"sigmoid", sigmoid, [](double x) { return 0.25 / std::pow(std::cosh(x / 2), 2); }, all},
      {"tanh", tanh, [](double x) { return 1 / std::pow(std::cosh(x), 2); }, all},
      {"erf", erf, [&](double x) { return two_over_root_pi * gauss(x); }, all},
      {"erfc", erfc, [&](double x) { return -two_over_root_pi * gauss(x); }, all},
      {"round", [](Expr x) { return round(x, DType::e4m3); }, [](double) { return 1; }, all},
  };
  for (const Row& r : rows)
    for (const float x : r.points) {
      Graph graph;
      const Expr in = graph.load(0), seed = graph.load(1);
      const Expr d = grad(r.word(in), seed, std::span(&in, 1))[0];
      const double expected = -3 * r.slope(x);
      // 2/√π is an fp32 constant of the formula. The rest is exact in float64.
      EXPECT_NEAR(value(graph, d, {x, -3}), expected, 1e-7 * std::fabs(expected)) << r.name << x;
    }
}

TEST(Words, OfTwoInputs) {
  Graph graph;
  const Expr a = graph.load(0), b = graph.load(1), seed = graph.load(2);
  const std::array both{a, b};
  const auto expect = [&](Expr y, double da, double db) {
    const std::vector<Expr> d = grad(y, seed, both);
    EXPECT_DOUBLE_EQ(value(graph, d[0], {3, -8, 2}), 2 * da);
    EXPECT_DOUBLE_EQ(value(graph, d[1], {3, -8, 2}), 2 * db);
  };
  expect(a + b, 1, 1);
  expect(a - b, 1, -1);
  expect(a * b, -8, 3);
  expect(a / b, -0.125, -3.0 / 64);
  expect(max(a, b), 1, 0);
  expect(min(a, b), 0, 1);
  expect(select(a > b, a * a, b * b), 6, 0);
  expect(select(a < b, a * a, b * b), 0, -16);
  expect(select(a > 0.0F, b, b), 0, 1);  // a condition has no derivative
  expect(a, 1, 0);
  expect(Expr(5.0F), 0, 0);
}

TEST(Rules, AContributionIsTheWordsOwnSequence) {
  Graph graph;
  const Expr x = graph.load(0), g = graph.load(1);
  const auto id = [&](Expr e) { return graph.id(e); };
  const auto d = [&](Expr y) { return graph.id(grad(y, g, std::span(&x, 1))[0]); };
  // Equal nodes are the same node, so comparing ids compares structure.
  EXPECT_EQ(d(x * x), id(g * x + g * x));
  EXPECT_EQ(d(exp(x)), id(g * exp(x)));
  EXPECT_EQ(d(-x), id(-g));
  EXPECT_EQ(d(round(x, DType::bf16)), id(g));
  EXPECT_EQ(d(x), id(g));
  EXPECT_EQ(d(max(x, 1.0F)), id(select(x < 1.0F, 0.0F, g)));
  EXPECT_EQ(d(select(x > 0.0F, x, 2.0F)), id(select(x > 0.0F, g, 0.0F)));
}

TEST(Rules, ContributionsAreAddedInReverseOrderOfUses) {
  Graph graph;
  const Expr x = graph.load(0), g = graph.load(1);
  const Expr p = graph.load(2), q = graph.load(3), r = graph.load(4);
  const Expr d = grad(x * p + x * q + x * r, g, std::span(&x, 1))[0];
  EXPECT_EQ(graph.id(d), graph.id((g * r + g * q) + g * p));
  // The order is visible in fp32: (1 + 1e8) − 1e8 loses the 1, 1 + (1e8 − 1e8) keeps it.
  std::array<float, 3> parts{-1e8F, 1e8F, 1};  // p, q, r
  EXPECT_EQ((parts[2] + parts[1]) + parts[0], 0);
  EXPECT_EQ(parts[2] + (parts[1] + parts[0]), 1);
  // The order of uses is that of the formula, not of construction.
  const Expr late = x * r;
  const Expr y = x * q + late;
  EXPECT_EQ(graph.id(grad(y, g, std::span(&x, 1))[0]), graph.id(g * r + g * q));
}

TEST(Rules, ABranchNotTakenContributesExactlyZero) {
  Graph graph;
  const Expr x = graph.load(0);
  const auto slope = [&](Expr y, float at) {
    return value(graph, grad(y, Expr(1.0F), std::span(&x, 1))[0], {at});
  };
  // The derivative of the other branch is NaN at −1 and infinite at 0.
  const Expr root = select(x > 0.0F, sqrt(x), 3.0F * x);
  EXPECT_EQ(slope(root, -1), 3);
  EXPECT_EQ(slope(root, 0), 3);
  EXPECT_EQ(slope(root, 4), 0.25);
  const Expr inverse = select(x == 0.0F, x, 1.0F / x);
  EXPECT_EQ(slope(inverse, 0), 1);
  const Expr logs = select(x <= 0.0F, -x, log(x));
  EXPECT_EQ(slope(logs, 0), -1);
  EXPECT_EQ(slope(logs, -2), -1);
  const Expr most = max(x, sqrt(x));
  EXPECT_EQ(slope(most, 4), 1);
  EXPECT_EQ(slope(min(x, exp(x * x)), 100), 1);  // exp overflows, and its derivative too
}

TEST(Rules, WhatHasNoPathGetsZero) {
  Graph graph;
  const Expr x = graph.load(0), other = graph.load(1);
  const std::array wrt{x, other};
  const std::vector<Expr> d = grad(exp(x), Expr(1.0F), wrt);
  ASSERT_TRUE(d[1].is_constant());
  EXPECT_EQ(d[1].constant(), 0);
  const std::vector<Expr> none = grad(Expr(2.0F), Expr(1.0F), wrt);
  ASSERT_EQ(none.size(), 2U);
  EXPECT_TRUE(none[0].is_constant() && none[0].constant() == 0);
  EXPECT_THROW(grad(fma(x, x, x), Expr(1.0F), wrt), Error);  // functions of lowered graphs only
}

// The limits of f and f' at ±∞. At −∞ most f' tend to 0, below the range of fp32.
TEST(Limits, UnaryActivationsAtInfinity) {
  struct Row {
    const char* name;
    double low, high, low_slope, high_slope;
  };
  const double inf = INFINITY;
  const double slope = static_cast<double>(0.01F);
  for (const Row& r :
       {Row{"gelu", 0, inf, 0, 1}, Row{"gelu_erf", 0, inf, 0, 1}, Row{"silu", 0, inf, 0, 1},
        Row{"qgelu", 0, inf, 0, 1}, Row{"relu", 0, inf, 0, 1}, Row{"srelu", 0, inf, 0, inf},
        Row{"sigmoid", 0, 1, 0, 0}, Row{"tanh", -1, 1, 0, 0}, Row{"softplus", 0, inf, 0, 1},
        Row{"mish", 0, inf, 0, 1}, Row{"hardswish", 0, inf, 0, 1},
        Row{"leaky_relu", -inf, inf, slope, 1}, Row{"elu", -1, inf, 0, 1}}) {
    Built f(activation(r.name));
    const auto near = [&](double got, double limit) {
      return std::isinf(limit) ? got == limit : std::fabs(got - limit) <= 1e-47;
    };
    EXPECT_PRED2(near, f.result({-kInf}), r.low) << r.name;
    EXPECT_PRED2(near, f.result({kInf}), r.high) << r.name;
    EXPECT_PRED2(near, f.slope(0, {-kInf}), r.low_slope) << r.name;
    EXPECT_PRED2(near, f.slope(0, {kInf}), r.high_slope) << r.name;
  }
}

TEST(Limits, NanPassesThrough) {
  for (const std::string& name : activation_names()) {
    Built f(activation(name));
    for (size_t i = 0; i < f.inputs.size(); ++i) {
      std::vector<float> at(f.inputs.size(), 1.0F);
      at[i] = NAN;
      EXPECT_TRUE(std::isnan(f.result(at))) << name << " by input " << i;
      for (size_t j = 0; j < f.d.size(); ++j)
        if (support::depends(f.graph, f.graph.id(f.d[j]), static_cast<uint32_t>(i))) {
          EXPECT_TRUE(std::isnan(f.slope(j, at))) << name << "' by input " << j << ", NaN in " << i;
        }
    }
  }
}

TEST(Limits, NoNanFromNumbers) {
  const std::array<float, 12> points{-kInf, -FLT_MAX,  -1e4F, -20,  -1,      -0x1p-149F,
                                     0,     0x1p-149F, 1,     1e4F, FLT_MAX, kInf};
  for (const std::string& name : activation_names()) {
    Built f(activation(name));
    const bool both = name == "clamped_swiglu" || name == "situglu";
    if (f.inputs.size() == 2 && !both) continue;
    for (const float a : points)
      for (const float b : points) {
        const std::vector<float> at = both ? std::vector{a, b} : std::vector{a};
        EXPECT_FALSE(std::isnan(f.result(at))) << name << " at " << a << ", " << b;
        for (size_t i = 0; i < f.inputs.size(); ++i)
          EXPECT_FALSE(std::isnan(f.slope(i, at))) << name << "' at " << a << ", " << b;
      }
  }
}

}  // namespace
