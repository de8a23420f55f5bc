// Tests of chain texts: parsing, canonical form, and error messages.
#include "tenon/chain.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/support.h"
#include "tenon/error.h"

namespace {

using namespace tenon;
using test::error_of;

std::string parse_error(std::string_view text) {
  return error_of([&] { parse_chain(text); });
}
std::string print_error(const Chain& chain) {
  return error_of([&] { print_chain(chain); });
}
std::string canonical(std::string_view text) { return print_chain(parse_chain(text)); }

double number(const OpArgument& a) { return std::get<double>(a.value); }
std::string text(const OpArgument& a) { return std::get<std::string>(a.value); }

TEST(Read, OpsArgumentsChannelsLabels) {
  const Chain c = parse_chain(
      "rmsnorm(512, eps=1e-5) make_extra_output>res linear(512,2048) bias swiglu\n"
      "act(\"x*sigmoid(x)\", layout=swapped) add<res<more>out:last");
  ASSERT_EQ(c.size(), 7U);
  EXPECT_EQ(c[0].name, "rmsnorm");
  ASSERT_EQ(c[0].arguments.size(), 2U);
  EXPECT_EQ(c[0].arguments[0].name, "");
  EXPECT_EQ(number(c[0].arguments[0]), 512);
  EXPECT_EQ(c[0].arguments[1].name, "eps");
  EXPECT_EQ(number(c[0].arguments[1]), 1e-5);
  EXPECT_EQ(c[1].writes, std::vector<std::string>{"res"});
  EXPECT_TRUE(c[1].reads.empty());
  EXPECT_EQ(number(c[2].arguments[1]), 2048);
  EXPECT_EQ(c[3], Op{.name = "bias"});
  EXPECT_EQ(c[4], Op{.name = "swiglu"});
  EXPECT_EQ(text(c[5].arguments[0]), "x*sigmoid(x)");
  EXPECT_TRUE(c[5].arguments[0].quoted);
  EXPECT_EQ(text(c[5].arguments[1]), "swapped");
  EXPECT_FALSE(c[5].arguments[1].quoted);
  EXPECT_EQ(c[6].reads, (std::vector<std::string>{"res", "more"}));
  EXPECT_EQ(c[6].writes, std::vector<std::string>{"out"});
  EXPECT_EQ(c[6].label, "last");
}

TEST(Read, SpacesAndComments) {
  const Chain plain = parse_chain("linear(512,2048) add<res:sum");
  for (const char* t : {" linear ( 512 , 2048 ) add < res : sum ", "linear(512,2048)add<res:sum",
                        "linear\n(512,\r\n2048)\tadd\n<\nres\n:\nsum\n",
                        "# a chain\nlinear(512, # in\n 2048) # out\nadd #\n<#\nres:sum#",
                        "linear(512,2048)add<res#>no\n:sum # end"})
    EXPECT_EQ(parse_chain(t), plain) << t;
  // '#' in quotes is a character.
  EXPECT_EQ(text(parse_chain("act(\"a#b\")")[0].arguments[0]), "a#b");
  EXPECT_EQ(parse_chain("bias()"), parse_chain("bias"));
  EXPECT_EQ(parse_chain("bias( #\n )"), parse_chain("bias"));
}

TEST(Read, PositionsOfOps) {
  const Chain c = parse_chain(" gelu # a comment\n\n  linear( 4,\n 8 )<a :up bias");
  ASSERT_EQ(c.size(), 3U);
  const int64_t expected[][2] = {{1, 2}, {3, 3}, {4, 12}};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(c[i].position.line, expected[i][0]) << i;
    EXPECT_EQ(c[i].position.column, expected[i][1]) << i;
  }
  // The position of an op in the text does not affect equality.
  EXPECT_EQ(c, parse_chain(print_chain(c)));
}

TEST(Read, Numbers) {
  const auto value = [](const std::string& t) {
    return number(parse_chain("scale(" + t + ")")[0].arguments[0]);
  };
  const std::vector<std::pair<std::string, double>> cases{{"0", 0},
                                                          {"-1", -1},
                                                          {"+2.5", 2.5},
                                                          {".5", 0.5},
                                                          {"5.", 5},
                                                          {"-.25e+1", -2.5},
                                                          {"1E3", 1000},
                                                          {"0.1", 0.1},
                                                          {"007", 7},
                                                          {"1e-400", 0},
                                                          {"1e308", 1e308},
                                                          {"5e-324", 5e-324},
                                                          {"0e99999999999", 0},
                                                          {"12345678901", 12345678901.0}};
  for (const auto& [t, expected] : cases) EXPECT_EQ(value(t), expected) << t;
  EXPECT_TRUE(std::signbit(value("-0")));
  EXPECT_TRUE(std::signbit(value("-1e-999")));
  // Maximal number of digits, with an exponent that brings the value into range.
  EXPECT_EQ(value("0." + std::string(60000, '0') + "1e60001"), 1);
  EXPECT_EQ(value("1" + std::string(400, '0') + "e-400"), 1);
  EXPECT_EQ(value(std::string(60000, '9') + "e-60000"), 1);
}

TEST(Read, QuotedTexts) {
  const auto value = [](const std::string& t) {
    return text(parse_chain("act(\"" + t + "\")")[0].arguments[0]);
  };
  EXPECT_EQ(value(""), "");
  EXPECT_EQ(value("x; p = -0.5"), "x; p = -0.5");
  EXPECT_EQ(value(R"(\"\\)"), R"("\)");
  EXPECT_EQ(value(R"(a\\\"b)"), R"(a\"b)");
  EXPECT_EQ(value("\t\xc3\xa9"), "\t\xc3\xa9");
  // A quoted name differs from the name. nan is a text.
  EXPECT_NE(parse_chain("f(\"gelu\")"), parse_chain("f(gelu)"));
  EXPECT_EQ(value("nan"), "nan");
}

TEST(Canonical, Form) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"linear( 512, 2048 )\nbias # with\n swiglu add < res",
       "linear(512,2048) bias swiglu add<res"},
      {"a() b ( )", "a b"},
      {"a(b = c, d=\"e\")", "a(b=c,d=\"e\")"},
      {"a > x < y > z : l", "a<y>x>z:l"},
      {R"(act("\"\\"))", R"(act("\"\\"))"},
      {"n(1e-05,+1,1.50,1e+22,1e5,100000)", "n(1e-5,1,1.5,1e22,1e5,1e5)"},
      {"n(0.001,1e4,-0,-0.0,.5,65536,1e-310)", "n(0.001,10000,-0,-0,0.5,65536,1e-310)"},
      {"n(1.7976931348623157e308,5e-324,0.1,3)", "n(1.7976931348623157e308,5e-324,0.1,3)"},
      {"n(10e9,123456789012,1e-10)", "n(1e10,123456789012,1e-10)"}};
  for (const auto& [t, expected] : cases) {
    EXPECT_EQ(canonical(t), expected) << t;
    EXPECT_EQ(canonical(expected), expected);
  }
}

// Random chains with all syntax elements, and another spelling of each.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(engine_); }

  std::string name() {
    constexpr std::string_view kLetters = "abcXYZ_e019";
    std::string out(1, kLetters[below(8)]);
    for (size_t n = below(6); n > 0; --n) out += kLetters[below(kLetters.size())];
    return out;
  }

  double value() {
    switch (below(4)) {
      case 0:
        return static_cast<double>(below(100000));
      case 1:
        return std::uniform_real_distribution<double>(-1, 1)(engine_);
      case 2:
        return -std::pow(10.0, static_cast<double>(below(600)) - 300);
      default: {
        const auto bits = std::uniform_int_distribution<uint64_t>()(engine_);
        const auto v = __builtin_bit_cast(double, bits);
        return std::isfinite(v) ? v : -0.0;
      }
    }
  }

  OpArgument argument() {
    const size_t kind = below(3);
    if (kind == 0) return {.value = value()};
    if (kind == 1) return {.value = name()};
    std::string quoted;
    for (size_t n = below(8); n > 0; --n) {
      constexpr std::string_view kBytes = "x\"\\#()<>: \t,=\xc3";
      quoted += kBytes[below(kBytes.size())];
    }
    return {.value = quoted, .quoted = true};
  }

  Op op() {
    Op out{.name = name()};
    for (size_t n = below(4); n > 0; --n) out.arguments.push_back(argument());
    for (size_t n = below(3); n > 0; --n) {
      out.arguments.push_back(argument());
      out.arguments.back().name = name() + std::to_string(n);  // names must differ
    }
    for (size_t n = below(3); n > 0; --n) out.reads.push_back(name());
    for (size_t n = below(3); n > 0; --n) out.writes.push_back(name());
    if (below(3) == 0) out.label = name();
    return out;
  }

  // Adds spaces, newlines and comments around every token outside of quotes.
  std::string loosened(std::string_view text) {
    std::string out;
    bool quoted = false;
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if (quoted && c == '\\') {
        out += text.substr(i++, 2);
        continue;
      }
      if (c == '"') quoted = !quoted;
      const bool mark = !quoted && std::string_view("(),=<>: ").find(c) != std::string_view::npos;
      if (mark) out += blank();
      out += c;
      if (mark) out += blank();
    }
    return out;
  }

 private:
  std::string blank() {
    constexpr const char* kBlanks[] = {"", " ", "\n", "\t\r\n ", "# (\"\n", "##<\n#\n"};
    return kBlanks[below(std::size(kBlanks))];
  }

  std::mt19937 engine_;
};

TEST(Canonical, RandomChainsComeBack) {
  Random random(7);
  for (int i = 0; i < 5000; ++i) {
    Chain chain;
    for (size_t n = 1 + random.below(6); n > 0; --n) chain.push_back(random.op());
    const std::string text = print_chain(chain);
    const Chain back = parse_chain(text);
    ASSERT_EQ(back, chain) << text;
    ASSERT_EQ(print_chain(back), text);  // also checks the signs of zeros
    const std::string loose = random.loosened(text);
    ASSERT_EQ(print_chain(parse_chain(loose)), text) << loose;
  }
}

struct Mistake {
  std::string text, message;
};

void expect_messages(const std::vector<Mistake>& mistakes) {
  for (const Mistake& m : mistakes) EXPECT_EQ(parse_error(m.text), "chain: " + m.message) << m.text;
}

TEST(Mistakes, Items) {
  expect_messages({
      {"", "line 1, column 1: expected the name of an op, found the end"},
      {" \n# bias", "line 2, column 7: expected the name of an op, found the end"},
      {"(512)", "line 1, column 1: expected the name of an op, found '('"},
      {"2d", "line 1, column 1: expected the name of an op, found '2'"},
      {"bias\n gelu, add",
       "line 2, column 6: gelu: expected an op or the end; spaces or newlines "
       "are between ops, found ','"},
      {"bias | gelu",
       "line 1, column 6: bias: expected an op or the end; spaces or newlines are "
       "between ops, found '|'"},
      {"layer-norm",
       "line 1, column 6: layer: expected an op, '<', '>', ':' or the end, found '-'"},
      {"bias )", "line 1, column 6: bias: expected an op, '<', '>', ':' or the end, found ')'"},
      {"bias \"x\"",
       "line 1, column 6: bias: expected an op, '<', '>', ':' or the end, found '\"'"},
      {"bias \xc3\xa9",
       "line 1, column 6: bias: expected an op, '<', '>', ':' or the end, found "
       "byte 195"},
      {std::string("bias\0gelu", 9),
       "line 1, column 5: bias: expected an op, '<', '>', ':' or the end, found byte 0"},
      {"a:l /", "line 1, column 5: a: expected an op or the end, found '/'"},
      {"a(1)(2)",
       "line 1, column 5: a: arguments stand once, after the op's name; write "
       "name(…)<in>out:label"},
      {"add<res(1)",
       "line 1, column 8: add: arguments stand once, after the op's name; write "
       "name(…)<in>out:label"},
  });
}

TEST(Mistakes, ChannelsAndLabels) {
  expect_messages({
      {"add<", "line 1, column 5: add: expected the name of a channel after '<', found the end"},
      {"add<1", "line 1, column 5: add: expected the name of a channel after '<', found '1'"},
      {"add>>x", "line 1, column 5: add: expected the name of a channel after '>', found '>'"},
      {"add<\"r\"", "line 1, column 5: add: expected the name of a channel after '<', found '\"'"},
      {"add:", "line 1, column 5: add: expected a label after ':', found the end"},
      {"add:1", "line 1, column 5: add: expected a label after ':', found '1'"},
      {"add:a:b", "line 1, column 6: add: an op has one label; keep one of them"},
      {"add:a <res",
       "line 1, column 7: add: channels stand before the label; write "
       "name<in>out:label"},
  });
}

TEST(Mistakes, Arguments) {
  const std::string kinds = "a number, a name or a text in quotes";
  expect_messages({
      {"linear(", "line 1, column 8: linear: expected a value: " + kinds + ", found the end"},
      {"linear(,2)", "line 1, column 8: linear: expected a value: " + kinds + ", found ','"},
      {"linear(1,)", "line 1, column 10: linear: expected a value: " + kinds + ", found ')'"},
      {"n(eps=1,)", "line 1, column 9: n: expected a value: " + kinds + ", found ')'"},
      {"n(eps=)", "line 1, column 7: n: expected a value for 'eps': " + kinds + ", found ')'"},
      {"n(=1)", "line 1, column 3: n: expected a value: " + kinds + ", found '='"},
      {"linear(512", "line 1, column 11: linear: expected ',' or ')', found the end"},
      {"linear(512 # in)\nbias", "line 2, column 1: linear: expected ',' or ')', found 'b'"},
      {"linear(512;2)", "line 1, column 11: linear: expected ',' or ')', found ';'"},
      {"n(1=2)", "line 1, column 4: n: expected ',' or ')', found '='"},
      {"n(a=b=c)", "line 1, column 6: n: expected ',' or ')', found '='"},
      {"act(gelu(x))",
       "line 1, column 9: act: expected ',' or ')'; a formula is a text in quotes, "
       "as in act(\"x*sigmoid(x)\"), found '('"},
      {"act(x*x)",
       "line 1, column 6: act: expected ',' or ')'; a formula is a text in quotes, as "
       "in act(\"x*sigmoid(x)\"), found '*'"},
      {"n(eps=1,\n 512)",
       "line 2, column 2: n: a value by position stands before the named ones; "
       "move it there or name it"},
      {"n(eps=1, gelu)",
       "line 1, column 10: n: a value by position stands before the named ones; "
       "move it there or name it"},
      {"n(eps=1, \"x\")",
       "line 1, column 10: n: a value by position stands before the named ones; "
       "move it there or name it"},
      {"n(eps=1, p=2, eps=3)", "line 1, column 15: n: 'eps' is given twice; keep one of them"},
  });
  // Argument names must be unique only within an op.
  EXPECT_EQ(parse_chain("n(eps=1) n(eps=1)").size(), 2U);
}

TEST(Mistakes, Values) {
  const std::string end = "expected the end of the number (no suffix, no hexadecimal), found ";
  expect_messages({
      {"s(-)", "line 1, column 4: s: expected a number, found ')'"},
      {"s(+-1)", "line 1, column 4: s: expected a number, found '-'"},
      {"s(- 1)", "line 1, column 4: s: expected a number, found ' '"},
      {"s(.)", "line 1, column 3: s: expected a number, found '.'"},
      {"s(1e)", "line 1, column 5: s: expected the digits of an exponent, found ')'"},
      {"s(1e+", "line 1, column 6: s: expected the digits of an exponent, found the end"},
      {"s(1e\n5)",
       "line 1, column 5: s: expected the digits of an exponent, found the end of the "
       "line"},
      {"s(1.5f)", "line 1, column 6: s: " + end + "'f'"},
      {"s(0x10)", "line 1, column 4: s: " + end + "'x'"},
      {"s(1.2.3)", "line 1, column 6: s: " + end + "'.'"},
      {"s(1e999)",
       "line 1, column 3: s: the number is too large for float64 (at most "
       "1.7976931348623157e308)"},
      {"s(c=-1.8e308)",
       "line 1, column 6: s: the number is too large for float64 (at most "
       "1.7976931348623157e308)"},
      {"s(nan)", "line 1, column 3: s: the value 'nan' is no number; give a finite one"},
      {"s(c=NaN)", "line 1, column 5: s: the value 'NaN' is no number; give a finite one"},
      {"s(Infinity)", "line 1, column 3: s: the value 'Infinity' is no number; give a finite one"},
      {"s(-inf)", "line 1, column 4: s: expected a number, found 'i'"},
  });
  EXPECT_EQ(parse_chain("nan(info,nano,nan=1)<inf>nan:inf").size(), 1U);  // valid as names
}

TEST(Mistakes, QuotedTexts) {
  expect_messages({
      {"act(\"x",
       "line 1, column 7: act: expected '\"' on the line where the text began, found "
       "the end"},
      {"act(\"x\n\")",
       "line 1, column 7: act: expected '\"' on the line where the text began, "
       "found the end of the line"},
      {"act(\"x\r\n\")",
       "line 1, column 7: act: expected '\"' on the line where the text began, "
       "found the end of the line"},
      {"act(\"\\n\")", "line 1, column 7: act: expected '\"' or '\\' after '\\', found 'n'"},
      {"act(\"\\", "line 1, column 7: act: expected '\"' or '\\' after '\\', found the end"},
      {"act(\"\x1b\")",
       "line 1, column 6: act: expected a text without control characters, found "
       "byte 27"},
      {"act(\"x\" \"y\")", "line 1, column 9: act: expected ',' or ')', found '\"'"},
      {"act('x')",
       "line 1, column 5: act: expected a value: a number, a name or a text in quotes, "
       "found '''"},
  });
}

TEST(Mistakes, LongNamesAreCutInMessages) {
  EXPECT_EQ(parse_error(std::string(60000, 'a') + "("),
            "chain: line 1, column 60002: " + std::string(40, 'a') +
                "...: expected a value: a number, a name or a text in quotes, found the end");
}

TEST(Limits, Ops) {
  std::string ops;
  for (int i = 0; i < 1024; ++i) ops += "a ";
  EXPECT_EQ(parse_chain(ops).size(), 1024U);
  EXPECT_EQ(parse_error(ops + "\n b"),
            "chain: line 2, column 2: more than 1024 ops; split the chain");
}

TEST(Limits, Bytes) {
  EXPECT_EQ(parse_chain("a" + std::string(65535, ' ')).size(), 1U);
  EXPECT_EQ(parse_error("a" + std::string(65536, ' ')),
            "chain: 65537 bytes; at most 65536 are read. Split the chain");
  // The canonical form must also be within the limits.
  const auto list = [](size_t n) {
    std::string t = "n(1e4";
    for (size_t i = 1; i < n; ++i) t += ",1e4";
    return t + ")";
  };
  EXPECT_EQ(canonical(list(10922)).size(), 65534U);
  EXPECT_EQ(parse_error(list(10923)),
            "chain: 65540 bytes in canonical form; at most 65536 are read. Split the chain");
}

// Texts of maximal length with one repeated element. Quadratic rules would be slow here, and
// recursion would overflow the stack.
TEST(Limits, LongTexts) {
  std::string names = "a(";
  for (int i = 0; names.size() < 65000; ++i) names += "n" + std::to_string(i) + "=1,";
  names.back() = ')';
  std::string channels = "a";
  while (channels.size() < 65000) channels += "<b";
  std::string comments = "a";
  while (comments.size() < 65000) comments += "#\n";
  const std::vector<std::string> texts{names,
                                       channels,
                                       comments,
                                       "a(b" + std::string(65000, ' ') + "=1)",
                                       "a(" + std::string(65000, '9') + "e-64900)",
                                       "a(\"" + std::string(65000, '#') + "\")"};
  for (const std::string& t : texts) EXPECT_EQ(parse_chain(t).size(), 1U);
  for (const char c : std::string_view("(<>:\"\\#-.,e1\n"))
    EXPECT_NE(parse_error("a(" + std::string(65000, c)), "no error") << c;
}

TEST(Print, RefusesWhatNoTextSays) {
  const std::string use = "' is not a name; use letters, digits, _";
  const auto with = [](OpArgument a) { return Chain{{.name = "s", .arguments = {std::move(a)}}}; };
  EXPECT_EQ(print_error({}), "chain: no ops; give at least one, as in `identity`");
  EXPECT_EQ(print_error(Chain(1025, {.name = "a"})),
            "chain: 1025 ops; at most 1024 are read. Split the chain");
  EXPECT_EQ(print_error({{.name = "a"}, {.name = "b c"}}), "chain: op 2 'b c': the op 'b c" + use);
  EXPECT_EQ(print_error({{}}), "chain: op 1 '': the op '" + use);
  EXPECT_EQ(print_error({{.name = "a", .reads = {"x>y"}}}),
            "chain: op 1 'a': the channel 'x>y" + use);
  EXPECT_EQ(print_error({{.name = "a", .writes = {""}}}), "chain: op 1 'a': the channel '" + use);
  EXPECT_EQ(print_error({{.name = "a", .label = "l m"}}), "chain: op 1 'a': the label 'l m" + use);
  EXPECT_EQ(print_error(with({.value = "x*x"})), "chain: op 1 's': the value 'x*x" + use);
  EXPECT_EQ(print_error(with({.name = "p q"})), "chain: op 1 's': the argument 'p q" + use);
  EXPECT_EQ(print_error(with({.value = "nan"})),
            "chain: op 1 's': the value 'nan' is no number; give a finite one");
  EXPECT_EQ(print_error(with({.value = std::numeric_limits<double>::infinity()})),
            "chain: op 1 's': the number inf has no text; give a finite one");
  EXPECT_EQ(print_error(with({.value = std::nan("")})),
            "chain: op 1 's': the number nan has no text; give a finite one");
  EXPECT_EQ(print_error(with({.value = 1.0, .quoted = true})),
            "chain: op 1 's': the number 1 is marked as quoted; unmark it");
  EXPECT_EQ(print_error(with({.value = "x\n", .quoted = true})),
            "chain: op 1 's': a text holds a newline or another control character; leave it out");
  EXPECT_EQ(print_error({{.name = "a", .arguments = {{.name = "p"}, {.value = 1.0}}}}),
            "chain: op 1 'a': a value by position stands after a named one; move it or name it");
  EXPECT_EQ(print_error({{.name = "a", .arguments = {{.name = "p"}, {.name = "p"}}}}),
            "chain: op 1 'a': 'p' is given twice; keep one");
  EXPECT_EQ(print_error({{.name = std::string(65537, 'a')}}),
            "chain: 65537 bytes in canonical form; at most 65536 are read. Split the chain");
}

}  // namespace
