// Tests of the formula language: parsing, error messages, and the names of the registry.
#include "expr/parse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "expr/evaluate.h"
#include "support/support.h"
#include "tenon/activation.h"
#include "tenon/error.h"

namespace {

using namespace tenon;
using test::error_of;

const std::vector<std::string> kInputs{"x", "a", "b"};

// The value at x, a, b with default parameters, in float64.
double value(std::string_view text, float x = 0, float a = 0, float b = 0) {
  const Formula f = parse(text, kInputs);
  std::vector<float> loads{x, a, b};
  for (const Parameter& p : f.parameters) loads.push_back(p.value);
  std::vector<const float*> pointers;
  for (const float& v : loads) pointers.push_back(&v);
  return Oracle(*f.graph, std::span(&f.root, 1), 0).run(1, pointers).value[0][0];
}

std::string parse_error(std::string_view text) {
  return error_of([&] { parse(text, kInputs); });
}
std::string activation_error(std::string_view text) {
  return error_of([&] { activation(text); });
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(Grammar, Precedence) {
  EXPECT_EQ(value("1 + 2*3"), 7);
  EXPECT_EQ(value("(1 + 2)*3"), 9);
  EXPECT_EQ(value("x - 3 - 2", 10), 5);
  EXPECT_EQ(value("x/4/2", 24), 3);
  EXPECT_EQ(value("x - 6/3 + 2*4", 1), 7);
  EXPECT_EQ(value("x/2*4", 3), 6);
  EXPECT_EQ(value("8/(x*2)", 2), 2);
}

TEST(Grammar, UnaryMinus) {
  EXPECT_EQ(value("-x*2 + 1", 3), -5);
  EXPECT_EQ(value("2*-x", 3), -6);
  EXPECT_EQ(value("x - -x", 3), 6);
  EXPECT_EQ(value("-(-x)", 3), 3);
  EXPECT_EQ(value("-sqrt(x)", 9), -3);
  EXPECT_PRED2(has, parse_error("--x"),
               "line 1, column 2: expected a number, a name or '(', found '-'");
  EXPECT_PRED2(has, parse_error("x - - -x"), "line 1, column 7: expected a number");
  EXPECT_PRED2(has, parse_error("+x"), "line 1, column 1: expected a number");
}

TEST(Grammar, Numbers) {
  EXPECT_EQ(value("1."), 1);
  EXPECT_EQ(value(".5"), 0.5);
  EXPECT_EQ(value("1e3"), 1000);
  EXPECT_EQ(value("1.5E-3"), static_cast<double>(1.5e-3F));
  EXPECT_EQ(value("2.5e+2"), 250);
  EXPECT_EQ(value("1.e1"), 10);
  EXPECT_EQ(value("007"), 7);
  // The nearest fp32 value with one rounding: just above the midpoint of 1 and 1 + 2^-23.
  EXPECT_EQ(value("1.00000005960464477539062500000000000000001"), 0x1.000002p0);
  EXPECT_EQ(value("1.000000059604644775390625"), 1);
  EXPECT_EQ(value("3.4028235e38"), 0x1.fffffep127);
  EXPECT_EQ(value("1e-45"), 0x1p-149);
  EXPECT_EQ(value("1e-46"), 0);
  EXPECT_EQ(value("1e-400"), 0);
  EXPECT_EQ(value("0e999"), 0);
}

TEST(Grammar, NumbersThatAreNone) {
  EXPECT_PRED2(has, parse_error("1f*x"), "line 1, column 2: expected the end of the number");
  EXPECT_PRED2(has, parse_error("0x10"), "line 1, column 2: expected the end of the number");
  EXPECT_PRED2(has, parse_error("1.2.3"), "line 1, column 4: expected the end of the number");
  EXPECT_PRED2(has, parse_error("x*1e"), "line 1, column 5: expected the digits of an exponent");
  EXPECT_PRED2(has, parse_error("1e+*x"), "line 1, column 4: expected the digits of an exponent");
  EXPECT_PRED2(has, parse_error("."), "line 1, column 1: expected a number");
  EXPECT_PRED2(has, parse_error("inf"), "'inf' is neither an input");
  EXPECT_PRED2(has, parse_error("nan*x"), "'nan' is neither an input");
  EXPECT_PRED2(has, parse_error("x*1e39"), "line 1, column 3: the number is too large");
  EXPECT_PRED2(has, parse_error("1e400"), "line 1, column 1: the number is too large");
  EXPECT_PRED2(has, parse_error("x; p = -1e39"), "line 1, column 9: the number is too large");
}

// The value of a number decides, not its spelling.
TEST(Grammar, LongNumbers) {
  const std::string zeros(400, '0');
  EXPECT_PRED2(has, parse_error("1" + zeros + "e-50"), "too large");
  EXPECT_EQ(value("1" + zeros + "e-400"), 1);
  EXPECT_EQ(value("0." + zeros + "1"), 0);
  EXPECT_EQ(value("." + zeros + "1"), 0);
  EXPECT_EQ(value("0." + zeros + "1e3"), 0);
  EXPECT_EQ(value("0." + zeros + "1e402"), 10);
}

TEST(Grammar, WhitespaceAnywhereBetweenTokens) {
  EXPECT_EQ(value(" \t x \r\n * ( 2 +\n1 ) ", 4), 12);
  EXPECT_EQ(value("max\n(\nx\n,\n2\n)", 4), 4);
  EXPECT_EQ(value("select ( x <= 1 , 5 , 6 )", 1), 5);
  EXPECT_PRED2(has, parse_error("select(x < = 1, 5, 6)"), "line 1, column 12: expected a number");
  EXPECT_PRED2(has, parse_error("x x"), "line 1, column 3: expected an operator or the end");
  EXPECT_PRED2(has, parse_error(std::string_view("x\0+1", 4)), "line 1, column 2: expected");
  EXPECT_PRED2(has, parse_error(std::string_view("x; p = 1\0+1", 11)),
               "line 1, column 9: expected");
}

TEST(Grammar, WordsAndTheirValues) {
  EXPECT_EQ(value("min(x, 2)", 3), 2);
  EXPECT_EQ(value("max(x, 2)", 3), 3);
  EXPECT_EQ(value("clamp(x, -1, 1)", 3), 1);
  EXPECT_EQ(value("clamp(x, 2, 1)", 3), 2);  // max(min(x, h), l): the lower bound wins
  EXPECT_EQ(value("neg(x) + abs(-x)", 3), 0);
  EXPECT_EQ(value("rsqrt(x)", 4), 0.5);
  EXPECT_DOUBLE_EQ(value("exp(x)", 1), M_E);
  EXPECT_DOUBLE_EQ(value("expm1(x)", 1), M_E - 1);
  EXPECT_DOUBLE_EQ(value("log(x) + log1p(x)", 2), M_LN2 + std::log(3.0));
  EXPECT_DOUBLE_EQ(value("sigmoid(x)", 1), 1 / (1 + std::exp(-1.0)));
  EXPECT_DOUBLE_EQ(value("tanh(x)", 1), std::sinh(1.0) / std::cosh(1.0));
  EXPECT_DOUBLE_EQ(value("erf(x) + erfc(x)", 0.5), 1);
}

TEST(Grammar, RoundNamesAFormat) {
  EXPECT_EQ(value("round(x, bf16)", 257), 256);
  EXPECT_EQ(value("round(x, f16)", 2049), 2048);
  EXPECT_EQ(value("round(x, e4m3)", 17), 16);
  EXPECT_EQ(value("round(x, e5m2)", 9), 8);
  for (const char* t : {"round(x, f32)", "round(x, e8m0)", "round(x, f64)", "round(x, 1)"})
    EXPECT_PRED2(has, parse_error(t), "line 1, column 10: expected bf16, f16, e4m3 or e5m2");
  EXPECT_PRED2(has, parse_error("round(x)"), "line 1, column 8: expected ','");
  EXPECT_PRED2(has, parse_error("round(x, bf16, 1)"), "line 1, column 14: expected ')'");
}

TEST(Grammar, SelectRelations) {
  struct Row {
    const char* rel;
    int below, equal, above;
  };
  for (const Row& r : {Row{"<", 1, 0, 0}, Row{"<=", 1, 1, 0}, Row{">", 0, 0, 1}, Row{">=", 0, 1, 1},
                       Row{"==", 0, 1, 0}, Row{"!=", 1, 0, 1}}) {
    const std::string t = std::string("select(x") + r.rel + "2, 1, 0)";
    EXPECT_EQ(value(t, 1), r.below) << t;
    EXPECT_EQ(value(t, 2), r.equal) << t;
    EXPECT_EQ(value(t, 3), r.above) << t;
    EXPECT_EQ(value(t, NAN), r.rel == std::string("!=")) << t;
  }
  EXPECT_PRED2(has, parse_error("select(x, 1, 2)"),
               "line 1, column 9: expected one of < <= > >= == !=");
  EXPECT_PRED2(has, parse_error("select(x = 1, 1, 2)"), "line 1, column 10: expected one of <");
  EXPECT_PRED2(has, parse_error("select(x < 1 < 2, 1, 2)"), "line 1, column 14: expected ','");
  EXPECT_PRED2(has, parse_error("select(x < 1, 2)"), "line 1, column 16: expected ','");
  EXPECT_PRED2(has, parse_error("select(x < 1, 2, 3, 4)"), "line 1, column 19: expected ')'");
  EXPECT_PRED2(has, parse_error("x < 1"), "line 1, column 3: expected an operator or the end");
}

TEST(Grammar, Defaults) {
  const Formula f = parse("p*x + q + r + s; p = 2 ; q=-.5;\nr = +1e1; s = 3.", kInputs);
  ASSERT_EQ(f.parameters.size(), 4U);
  const std::array<std::pair<const char*, float>, 4> expected{
      {{"p", 2}, {"q", -0.5F}, {"r", 10}, {"s", 3}}};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(f.parameters[i].name, expected[i].first);
    EXPECT_EQ(f.parameters[i].value, expected[i].second);
  }
  EXPECT_EQ(f.used, (std::vector<bool>{true, false, false}));
  EXPECT_EQ(value("p*x + q + r + s; p = 2 ; q=-.5; r = +1e1; s = 3.", 4), 20.5);
  EXPECT_TRUE(std::signbit(parse("x*p; p = -0", kInputs).parameters[0].value));
}

TEST(Grammar, DefaultsThatAreWrong) {
  EXPECT_PRED2(has, parse_error("x;"),
               "line 1, column 3: expected the name of a parameter, found the end");
  EXPECT_PRED2(has, parse_error("x; 1 = 2"), "line 1, column 4: expected the name of a parameter");
  EXPECT_PRED2(has, parse_error("x; p"),
               "line 1, column 5: expected '=' and the parameter's default");
  EXPECT_PRED2(has, parse_error("x; p ="), "line 1, column 7: expected a number, found the end");
  EXPECT_PRED2(has, parse_error("x; p = --1"), "line 1, column 9: expected a number, found '-'");
  EXPECT_PRED2(has, parse_error("x; p = 1 2"), "line 1, column 10: expected ';' or the end");
  EXPECT_PRED2(has, parse_error("x; p = q"), "line 1, column 8: expected a number, found 'q'");
  EXPECT_PRED2(has, parse_error("x;\n p = 1; p = 2"),
               "line 2, column 9: the parameter name 'p' is already");
  EXPECT_PRED2(has, parse_error("x; a = 1"),
               "line 1, column 4: the parameter name 'a' is already taken");
  for (const char* name : {"exp", "min", "clamp", "round", "select", "gated", "scaled"})
    EXPECT_PRED2(has, parse_error(std::string("x; ") + name + " = 1"), "already taken") << name;
  EXPECT_PRED2(has, parse_error("x*q; p = 1"),
               "line 1, column 3: 'q' is neither an input (x, a, b)");
}

TEST(Grammar, ErrorsNameTheirPlace) {
  EXPECT_PRED2(has, parse_error(""),
               "line 1, column 1: expected a number, a name or '(', found the end");
  EXPECT_PRED2(has, parse_error(" \n  "), "line 2, column 3: expected a number, a name or '('");
  EXPECT_PRED2(has, parse_error("x +\n\n  * 2"),
               "line 3, column 3: expected a number, a name or '('");
  EXPECT_PRED2(has, parse_error("x\r\n+ @"),
               "line 2, column 3: expected a number, a name or '(', found '@'");
  EXPECT_PRED2(has, parse_error("(x"), "line 1, column 3: expected ')', found the end");
  EXPECT_PRED2(has, parse_error("x)"), "line 1, column 2: expected an operator or the end");
  EXPECT_PRED2(has, parse_error("max(x, )"), "line 1, column 8: expected a number, a name or '('");
  EXPECT_PRED2(has, parse_error("exp()"), "line 1, column 5: expected a number, a name or '('");
  EXPECT_PRED2(has, parse_error("max(x; p = 1"), "line 1, column 6: expected ')', found ';'");
  EXPECT_PRED2(has, parse_error("x*\xc3\xa9"),
               "line 1, column 3: expected a number, a name or '(', found byte");
  EXPECT_PRED2(has, parse_error("x*\n y"),
               "line 2, column 2: 'y' is neither an input (x, a, b) nor given");
  EXPECT_PRED2(has, parse_error("x*y"), "add `; y = <number>`");
}

TEST(Grammar, UnknownFunctions) {
  EXPECT_PRED2(has, parse_error("1 + sigmod(x)"), "line 1, column 5: unknown function 'sigmod'");
  EXPECT_PRED2(has, parse_error("sigmod(x)"), "did you mean 'sigmoid'?");
  EXPECT_PRED2(has, parse_error("gelu_erff(x)"), "did you mean 'gelu_erf'?");
  EXPECT_EQ(parse_error("qwertyuiop(x)").find("did you mean"), std::string::npos);
  EXPECT_PRED2(has, parse_error("x(1)"), "unknown function 'x'");
  // Operators and functions of lowered graphs are not functions of the language, and are not
  // suggested.
  for (const char* t : {"add(x, 1)", "fma(x, x, x)", "pow2(x)", "mantissa(x)", "load(x)"}) {
    EXPECT_PRED2(has, parse_error(t), "unknown function") << t;
    EXPECT_EQ(parse_error(t).find("did you mean 'pow2'"), std::string::npos) << t;
    EXPECT_EQ(parse_error(t).find("did you mean 'mantissa'"), std::string::npos) << t;
  }
}

TEST(Grammar, Arity) {
  EXPECT_PRED2(has, parse_error("2*max(x)"), "line 1, column 3: 'max' takes 2 arguments, 1 given");
  EXPECT_PRED2(has, parse_error("exp(x, x)"), "line 1, column 1: 'exp' takes 1 argument, 2 given");
  EXPECT_PRED2(has, parse_error("clamp(x, 1)"), "'clamp' takes 3 arguments, 2 given");
  EXPECT_PRED2(has, parse_error("gelu(x, 1)"), "'gelu' takes 1 argument, 2 given");
  EXPECT_PRED2(has, parse_error("elu(x, 1, 2)"), "'elu' takes 1 to 2 arguments, 3 given");
  EXPECT_PRED2(has, parse_error("swiglu(a)"), "'swiglu' takes 2 arguments, 1 given");
}

TEST(Grammar, CallsOfActivations) {
  EXPECT_EQ(value("relu(x)", -2), 0);
  EXPECT_EQ(value("leaky_relu(x)", -2), -2 * static_cast<double>(0.01F));
  EXPECT_EQ(value("leaky_relu(x, 0.5)", -2), -1);
  EXPECT_EQ(value("leaky_relu(x, p); p = 0.25", -2), -0.5);
  EXPECT_EQ(value("squared_relu(x)", 3), 9);
  EXPECT_EQ(value("reglu(a, b)", 0, 3, 5), 15);
  // limit, alpha, offset in the order of the registry: w = min(9, 4), b clamped to 4, offset 2.
  const double w = 4;
  EXPECT_DOUBLE_EQ(value("clamped_swiglu(a, b, 4, 1, 2)", 0, 9, 9), w / (1 + std::exp(-w)) * 6);
  EXPECT_DOUBLE_EQ(value("clamped_swiglu(a, b, 4)", 0, 9, 9),
                   w / (1 + std::exp(-w * static_cast<double>(1.702F))) * 5);
}

std::string nested(int parentheses) {
  return std::string(static_cast<size_t>(parentheses), '(') + "x" +
         std::string(static_cast<size_t>(parentheses), ')');
}

TEST(Limits, Depth) {
  EXPECT_EQ(value(nested(63), 5), 5);  // the name is level 64
  EXPECT_PRED2(has, parse_error(nested(64)), "line 1, column 65: more than 64 levels");
  std::string calls;
  for (int i = 0; i < 64; ++i) calls += "abs(";
  EXPECT_PRED2(has, parse_error(calls + "x"), "more than 64 levels");
  // Depth is nesting, not length: a level ends with its parenthesis.
  std::string flat = "(x)";
  for (int i = 0; i < 100; ++i) flat += "*(x)";
  EXPECT_EQ(value(flat, 1), 1);
}

TEST(Limits, Bytes) {
  EXPECT_EQ(value("x" + std::string(4095, ' '), 5), 5);
  EXPECT_PRED2(has, parse_error("x" + std::string(4096, ' ')), "4097 bytes; at most 4096");
  EXPECT_PRED2(has, activation_error("x*" + std::string(4095, '1')), "4097 bytes; at most 4096");
}

TEST(Limits, Nodes) {
  // x, then a constant and a sum per term.
  const auto sum = [](int terms) {
    std::string t = "x";
    for (int i = 0; i < terms; ++i) t += "+" + std::to_string(i + 2);
    return t;
  };
  const Formula f = parse(sum(255), kInputs);
  EXPECT_EQ(f.graph->size(), 511U);
  EXPECT_PRED2(has, parse_error(sum(256)), "more than 512 nodes");
  // Equal nodes count once.
  std::string same = "x";
  for (int i = 0; i < 500; ++i) same += "+x*x";
  EXPECT_EQ(parse(same, kInputs).graph->size(), 502U);
}

TEST(Define, BindsNamesWhenItIsRead) {
  define("bound_g", "2*x");
  define("bound_f", "bound_g(x) + 1");
  define("bound_g", "100*x");
  EXPECT_EQ(value("bound_f(x)", 3), 7);
  EXPECT_EQ(value("bound_g(x)", 3), 300);
  // A name in its own definition is the earlier definition, or unknown.
  define("bound_g", "bound_g(x) + 1");
  EXPECT_EQ(value("bound_g(x)", 3), 301);
  EXPECT_PRED2(has, error_of([] { define("bound_new", "bound_new(x)"); }),
               "unknown function 'bound_new'");
  // Activations that were resolved before keep their formula.
  const Activation held = activation("bound_f");
  define("bound_f", "x");
  Graph graph;
  const Expr x = graph.load(0);
  const uint32_t root = graph.id(call(held, std::span(&x, 1), {}));
  const float three = 3;
  const float* loads = &three;
  EXPECT_EQ(Oracle(graph, std::span(&root, 1), 0).run(1, std::span(&loads, 1)).value[0][0], 7);
}

TEST(Define, Rules) {
  for (const char* name : {"exp", "clamp", "round", "select", "gated", "scaled", "x", "a", "b"})
    EXPECT_PRED2(has, error_of([&] { define(name, "x"); }), "choose another name") << name;
  for (const char* name : {"gelu", "swiglu", "quick_gelu", "squared_relu"})
    EXPECT_PRED2(has, error_of([&] { define(name, "x"); }), "built in") << name;
  for (const char* name : {"", "1f", "a-b", "my act", "é"})
    EXPECT_PRED2(has, error_of([&] { define(name, "x"); }), "is not a name") << name;
  EXPECT_PRED2(has, error_of([] { define("rules_mix", "x*a"); }), "mixes x with a or b");
  EXPECT_PRED2(has, error_of([] { define("rules_bad", "x*"); }), "line 1, column 3");
  // A failed definition leaves nothing.
  EXPECT_PRED2(has, activation_error("rules_bad"), "is not known");
  Activation empty;
  empty.name = "rules_empty";
  EXPECT_PRED2(has, error_of([&] { define(empty); }), "no function given");

  define("rules_two", "a + k*b; k = 3");
  const Activation f = activation("rules_two");
  EXPECT_EQ(f.inputs, 2);
  EXPECT_EQ(f.parameters.at(0).value, 3);
  EXPECT_EQ(value("rules_two(a, b) + rules_two(a, b, 1)", 0, 1, 1), 6);
  const std::vector<std::string> names = activation_names();
  EXPECT_EQ(std::count(names.begin(), names.end(), "rules_two"), 1);
  EXPECT_EQ(names.front(), "gelu");
}

TEST(Named, ParametersInTheText) {
  EXPECT_EQ(activation("elu(alpha=0.5)").parameters.at(0).value, 0.5F);
  EXPECT_EQ(activation(" elu ( alpha = -2e0 ) ").parameters.at(0).value, -2);
  EXPECT_EQ(activation("elu", {{"alpha", 4.0F}}).parameters.at(0).value, 4);
  const Activation c = activation("clamped_swiglu(limit=3, offset=0)");
  EXPECT_EQ(c.parameters.at(0).value, 3);
  EXPECT_EQ(c.parameters.at(1).value, 1.702F);
  EXPECT_EQ(c.parameters.at(2).value, 0);
  EXPECT_EQ(activation("quick_gelu").name, "qgelu");
  EXPECT_EQ(activation("x*p; p = 2", {{"p", 5.0F}}).parameters.at(0).value, 5);
  EXPECT_PRED2(has, activation_error("elu(beta=1)"), "no parameter 'beta'; it has alpha");
  EXPECT_PRED2(has, activation_error("gelu(beta=1)"), "it has none");
  EXPECT_PRED2(has, activation_error("elu(alpha=two)"), "is not a number");
  EXPECT_PRED2(has, activation_error("elu(alpha=)"), "is not a number");
  EXPECT_PRED2(has, activation_error("gelo"), "did you mean 'gelu'?");
  EXPECT_PRED2(has, activation_error("  "), "empty");
}

TEST(Named, ParameterRanges) {
  for (const char* t :
       {"clamped_swiglu(limit=0)", "clamped_swiglu(limit=-1)", "clamped_swiglu(limit=nan)",
        "clamped_swiglu(alpha=7e-31)", "clamped_swiglu(alpha=inf)", "clamped_swiglu(alpha=-1)",
        "situglu(beta1=0)", "situglu(beta2=-1)", "situglu(beta1=inf)", "elu(alpha=nan)"})
    EXPECT_PRED2(has, activation_error(t), "is outside") << t;
  EXPECT_EQ(activation("clamped_swiglu", {{"alpha", 0x1p-100F}}).parameters.at(1).value, 0x1p-100F);
  EXPECT_PRED2(has, error_of([] {
                 activation("clamped_swiglu", {{"alpha", 0x1.fffffep-101F}});
               }),
               "is outside");
  EXPECT_PRED2(has, error_of([] { activation("leaky_relu", {{"slope", NAN}}); }), "is outside");
  EXPECT_EQ(activation("clamped_swiglu(limit=1e-45)").parameters.at(0).value, 0x1p-149F);
}

TEST(Named, GatedAndScaled) {
  const Activation g = activation("gated(elu(alpha=2))");
  EXPECT_EQ(g.inputs, 2);
  EXPECT_EQ(g.name, "gated(elu)");
  EXPECT_EQ(g.parameters.at(0).value, 2);
  EXPECT_EQ(activation("gated(x*p; p = 3)").parameters.at(0).value, 3);
  const Activation s = activation("scaled(gated(silu))");
  EXPECT_TRUE(s.scaled);
  EXPECT_EQ(s.inputs, 2);
  for (const char* t : {"gated(swiglu)", "gated(a*b)", "gated(gated(silu))", "gated(scaled(silu))"})
    EXPECT_PRED2(has, activation_error(t), "is not unary") << t;
  EXPECT_PRED2(has, activation_error("scaled(scaled(silu))"), "scaled already");
  EXPECT_PRED2(has, activation_error("gated()"), "empty");
}

// Formulas that look like a name with parameters.
TEST(Named, EveryNameLeadsToOneActivation) {
  define(
      {.name = "tests_one", .body = [](const Args& in) { return in.x; }, .aliases = {"tests_two"}});
  const auto message = [](Activation f) -> std::string {
    try {
      define(std::move(f));
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const auto body = [](const Args& in) { return in.x; };
  EXPECT_TRUE(has(message({.name = "tests_two", .body = body}), "tests_one"));
  for (const char* alias : {"x", "gelu", "quick_gelu", "tanh", "2x", "tests_one"})
    EXPECT_NE(message({.name = "tests_three", .body = body, .aliases = {alias}}), "") << alias;
  for (const char* name : {"bias_relu", "dgelu", "bgrad_dsilu"})
    EXPECT_TRUE(has(message({.name = name, .body = body}), "named function")) << name;
  EXPECT_TRUE(has(message({.name = "tests_p", .parameters = {{"p q", 1}}, .body = body}), "p q"));
  EXPECT_TRUE(
      has(message({.name = "tests_p", .parameters = {{"p", 1}, {"p", 2}}, .body = body}), "once"));
}

TEST(Named, FormulasOfOneCall) {
  for (const char* t : {"select(x == 0, 1, x)", "select(x==0,1,x)", "select(x <= 0, 1, x)",
                        "select(x != 0, 1, x)", "max(x, 1)", "elu(x, 0.5)", "gelu(x)"})
    EXPECT_EQ(error_of([&] { EXPECT_EQ(activation(t).inputs, 1); }), "no error") << t;
  EXPECT_EQ(error_of([] { EXPECT_EQ(activation("select(a == b, a, b)").inputs, 2); }), "no error");
}

}  // namespace
