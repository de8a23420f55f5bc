// Tests of traces: the inputs of a formula, the inputs of its gradients, and the tensors that a
// plan saves.
#include "lower/trace.h"

#include "ops/formulas.h"
#include "support/support.h"
#include "tenon/plan.h"

namespace tenon::test {
namespace {

using Kind = Variable::Kind;

TEST(Trace, ABiasMentionsNothing) {
  const Trace t = trace(bias_formula(), 1);
  ASSERT_EQ(t.variables.size(), 2U);
  EXPECT_EQ(t.variables[1], (Variable{Kind::parameter, 0}));
  for (const Trace::Gradient& g : t.gradients) {
    EXPECT_TRUE(g.seed);
    EXPECT_EQ(g.mentions, (std::vector<bool>{false, false}));
  }
  EXPECT_FALSE(t.identity);
  EXPECT_FALSE(t.random);
}

// d(x·p) uses the other factor.
TEST(Trace, AProductMentionsTheOtherFactor) {
  const Trace t = trace(
      [](Element& e, std::span<const Expr> x) { return x[0] * e.parameter(3) + e.extra(1); }, 1);
  ASSERT_EQ(t.variables.size(), 3U);
  EXPECT_TRUE(t.reads(Kind::parameter, 3));
  EXPECT_TRUE(t.reads(Kind::extra, 1));
  EXPECT_FALSE(t.reads(Kind::extra, 0));
  const size_t x = 0, p = t.at(Kind::parameter, 3), e = t.at(Kind::extra, 1);
  EXPECT_TRUE(t.gradients[x].mentions[p]);
  EXPECT_FALSE(t.gradients[x].mentions[x]);
  EXPECT_TRUE(t.gradients[p].mentions[x]);
  EXPECT_FALSE(t.gradients[p].mentions[p]);
  EXPECT_TRUE(t.gradients[e].seed);
}

TEST(Trace, DropoutMentionsItsRandomNumbersAlone) {
  const Trace t = trace(dropout_formula({100, 2}), 1);
  EXPECT_TRUE(t.random);
  ASSERT_EQ(t.variables.size(), 1U);
  EXPECT_FALSE(t.gradients[0].seed);
  EXPECT_FALSE(t.gradients[0].mentions[0]);
}

TEST(Trace, AnIdentityIsSeen) {
  const Trace t = trace([](Element&, std::span<const Expr> x) { return x[0]; }, 1);
  EXPECT_TRUE(t.identity);
  EXPECT_TRUE(t.gradients[0].seed);
}

// A formula may be a constant, or read only one half of a gated value.
TEST(Trace, AConstantHasNoGradient) {
  const Trace t = trace([](Element&, std::span<const Expr>) { return Expr(2.0F); }, 2);
  ASSERT_EQ(t.gradients.size(), 2U);
  for (const Trace::Gradient& g : t.gradients) {
    EXPECT_FALSE(g.seed);
    EXPECT_EQ(g.mentions, (std::vector<bool>{false, false}));
  }
  EXPECT_FALSE(t.identity);
}

int64_t saved(const char* chain) {
  PlanRequest r{.cols = 8};
  return Plan::build(chain, r).saved_bytes(4);
}

TEST(Keeps, OnlyWhatAGradientMentions) {
  constexpr int64_t kTensor = 4 * 8 * 4;
  EXPECT_EQ(saved("bias scale(2) add"), 0);
  EXPECT_EQ(saved("act(\"2*x + 1\")"), 0);
  EXPECT_EQ(saved("bias act(\"x*x\")"), kTensor);
  EXPECT_EQ(saved("scale(2) act(\"2*x + 1\") silu"), kTensor);
  // Its input belongs to the caller, so it is not saved.
  EXPECT_EQ(saved("silu"), 0);
}

}  // namespace
}  // namespace tenon::test
