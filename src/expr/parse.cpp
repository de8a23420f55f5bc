// A recursive-descent parser that builds expressions as it reads.
#include "expr/parse.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "core/fp_mode.h"
#include "expr/order.h"
#include "expr/registry.h"
#include "tenon/error.h"

namespace tenon {

namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Words that are functions in the text; + − * / are operators, select and round have own rules.
std::optional<Word> word_named(std::string_view name) {
  for (size_t i = index(Word::min); i <= index(Word::erfc); ++i)
    if (kWords[i].name == name) return static_cast<Word>(i);
  return std::nullopt;
}

class Parser {
 public:
  Parser(std::string_view text, std::span<const std::string> inputs)
      : text_(text), inputs_(inputs), used_(inputs.size(), false) {
    require(text.size() <= kMaxFormulaBytes, "formula: ", text.size(), " bytes; at most ",
            kMaxFormulaBytes, " are read. Define a part of it as an activation of its own");
    const size_t end = text.find(';');
    body_end_ = std::min(end, text.size());
    read_defaults();
  }

  Formula run() {
    at_ = 0;
    end_ = body_end_;
    const Expr result = expression();
    const char next = peek();
    if (next == '<' || next == '>' || next == '=' || next == '!')
      error("an operator or the end; a comparison stands inside select(l < r, then, else)");
    if (next == '^') error("an operator; there is no power, write x*x");
    if (at_ < end_) error("an operator or the end of the formula");
    const uint32_t root = graph_->id(result);
    return {graph_, root, parameters_, used_};
  }

 private:
  struct Nesting {
    explicit Nesting(Parser& p) : parser(p) {
      if (++parser.depth_ > kMaxFormulaDepth)
        parser.fail_here(str("more than ", kMaxFormulaDepth, " levels of nesting; name a part"));
    }
    ~Nesting() { --parser.depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;
    Parser& parser;
  };

  // `; name = number` after the formula.
  void read_defaults() {
    at_ = body_end_;
    end_ = text_.size();
    while (peek() == ';') {
      ++at_;
      if (!is_letter(peek())) error("the name of a parameter");
      const size_t start = at_;
      const std::string name(identifier());
      const bool taken =
          is_reserved(name) || std::ranges::find(inputs_, name) != inputs_.end() ||
          std::ranges::any_of(parameters_, [&](const Parameter& p) { return p.name == name; });
      if (taken) {
        at_ = start;
        fail_here(str("the parameter name '", name, "' is already taken; choose another"));
      }
      if (peek() != '=') error("'=' and the parameter's default");
      ++at_;
      const char sign = peek();
      if (sign == '-' || sign == '+') ++at_;
      const float value = number();
      parameters_.push_back({name, sign == '-' ? -value : value});
    }
    peek();
    if (at_ < end_) error("';' or the end of the formula");
  }

  Expr expression() {
    Expr left = term();
    for (char c = peek(); c == '+' || c == '-'; c = peek()) {
      ++at_;
      const Expr right = term();
      left = c == '+' ? left + right : left - right;
    }
    return counted(left);
  }

  Expr term() {
    Expr left = unary();
    for (char c = peek(); c == '*' || c == '/'; c = peek()) {
      ++at_;
      const Expr right = unary();
      left = c == '*' ? left * right : left / right;
    }
    return counted(left);
  }

  Expr unary() {
    if (peek() != '-') return atom();
    ++at_;
    return -atom();
  }

  Expr atom() {
    const Nesting nesting(*this);
    const char c = peek();
    if (is_digit(c) || c == '.') return {number()};
    if (c == '(') {
      ++at_;
      const Expr inner = expression();
      expect(')');
      return inner;
    }
    if (!is_letter(c)) error("a number, a name or '('");
    const size_t start = at_;
    const std::string_view name = identifier();
    return peek() == '(' ? called(name, start) : named(name, start);
  }

  Expr named(std::string_view name, size_t start) {
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i] == name) {
        used_[i] = true;
        return graph_->load(static_cast<uint32_t>(i));
      }
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].name == name)
        return graph_->load(static_cast<uint32_t>(inputs_.size() + i));
    at_ = start;
    if (is_reserved(name) || registered(name))
      fail_here(str("'", name, "' is a function; call it, as in ", name, "(…)"));
    std::string offered;
    for (const std::string& input : inputs_) offered += str(offered.empty() ? "" : ", ", input);
    fail_here(str("'", name, "' is neither an input (", offered, ") nor given a default; add `; ",
                  name, " = <number>` to make it a parameter"));
  }

  Expr called(std::string_view name, size_t start) {
    if (name == "select") return select_call();
    if (name == "round") return round_call();
    const std::vector<Expr> in = arguments();
    if (name == "clamp") {
      check_count(name, start, in.size(), 3, 3);
      return clamp(in[0], in[1], in[2]);
    }
    if (const auto w = word_named(name)) {
      const auto arity = static_cast<size_t>(info(*w).arity);
      check_count(name, start, in.size(), arity, arity);
      return apply_word(*w, in);
    }
    const std::optional<Activation> f = registered(name);
    if (!f) {
      at_ = start;
      fail_here(str("unknown function '", name, "'", suggestion(name),
                    "; a function is a word, clamp, round, select or a registered activation"));
    }
    if (f->scaled) {
      at_ = start;
      fail_here(str("'", name, "' is scaled and cannot be called inside a formula; scale outside"));
    }
    const auto inputs = static_cast<size_t>(f->inputs);
    check_count(name, start, in.size(), inputs, inputs + f->parameters.size());
    std::vector<Expr> parameters;
    for (size_t i = 0; i < f->parameters.size(); ++i) {
      const Parameter& p = f->parameters[i];
      const Expr value = inputs + i < in.size() ? in[inputs + i] : Expr(p.value);
      if (value.is_constant() && !(value.constant() >= p.least && value.constant() <= p.most)) {
        at_ = start;
        fail_here(str(name, ": ", p.name, " = ", value.constant(), " is outside [", p.least, ", ",
                      p.most, "]; give a value inside"));
      }
      parameters.push_back(value);
    }
    return counted(call(*f, std::span(in).first(inputs), parameters));
  }

  Expr select_call() {
    expect('(');
    const Expr left = expression();
    const Rel rel = relation();
    const Expr right = expression();
    expect(',');
    const Expr then = expression();
    expect(',');
    const Expr otherwise = expression();
    expect(')');
    return select({rel, left, right}, then, otherwise);
  }

  Expr round_call() {
    expect('(');
    const Expr value = expression();
    expect(',');
    if (!is_letter(peek())) error("bf16, f16, e4m3 or e5m2");
    const size_t start = at_;
    const auto dtype = dtype_named(identifier());
    if (!dtype || *dtype == DType::f32 || *dtype == DType::e8m0) {
      at_ = start;
      error("bf16, f16, e4m3 or e5m2");
    }
    expect(')');
    return round(value, *dtype);
  }

  std::vector<Expr> arguments() {
    std::vector<Expr> in;
    expect('(');
    do {
      if (!in.empty()) ++at_;
      in.push_back(expression());
    } while (peek() == ',');
    expect(')');
    return in;
  }

  Rel relation() {
    peek();
    const std::string_view rest = text_.substr(at_, end_ - at_);
    for (const size_t length : {size_t{2}, size_t{1}})  // "<=" before "<"
      for (size_t i = 0; i < kRels.size(); ++i)
        if (kRels[i].size() == length && rest.starts_with(kRels[i])) {
          at_ += length;
          return static_cast<Rel>(i);
        }
    error("one of < <= > >= == != (a select starts with a comparison)");
  }

  // A C decimal literal, to the nearest fp32 number.
  float number() {
    peek();
    size_t i = at_;
    size_t digits = 0;
    const auto run = [&] {
      for (; i < end_ && is_digit(text_[i]); ++i) ++digits;
    };
    run();
    if (i < end_ && text_[i] == '.') ++i, run();
    if (digits == 0) error("a number");
    if (i < end_ && (text_[i] == 'e' || text_[i] == 'E')) {
      size_t j = i + 1;
      if (j < end_ && (text_[j] == '+' || text_[j] == '-')) ++j;
      if (j >= end_ || !is_digit(text_[j])) {
        at_ = j;
        error("the digits of an exponent");
      }
      for (i = j; i < end_ && is_digit(text_[i]);) ++i;
    }
    if (i < end_ && (is_letter(text_[i]) || text_[i] == '.')) {
      at_ = i;
      error("the end of the number (no suffix, no hexadecimal)");
    }
    float value = 0;
    const char* first = text_.data() + at_;
    const char* last = text_.data() + i;
    // Out of range is either too large or, below half of 2^-149, zero.
    if (std::from_chars(first, last, value).ec != std::errc()) {
      if (decimal_exponent({first, last}) > 0)
        fail_here("the number is too large for fp32 (at most 3.4028235e38)");
      value = 0;
    }
    at_ = i;
    return value;
  }

  // The power of ten of a literal's first digit that is not 0, cut at ±1e9; at most 4096 bytes.
  static int64_t decimal_exponent(std::string_view token) {
    constexpr int64_t kMost = 1'000'000'000;
    const size_t e = std::min(token.find_first_of("eE"), token.size());
    const std::string_view mantissa = token.substr(0, e);
    const auto first = static_cast<int64_t>(mantissa.find_first_of("123456789"));
    if (first < 0) return -kMost;
    const auto point = static_cast<int64_t>(std::min(mantissa.find('.'), mantissa.size()));
    int64_t power = 0;
    for (size_t i = e; i < token.size(); ++i)
      if (is_digit(token[i])) power = std::min(10 * power + (token[i] - '0'), kMost);
    if (e + 1 < token.size() && token[e + 1] == '-') power = -power;
    return power + (first < point ? point - first - 1 : point - first);
  }

  std::string_view identifier() {
    const size_t start = at_;
    while (at_ < end_ && (is_letter(text_[at_]) || is_digit(text_[at_]))) ++at_;
    return text_.substr(start, at_ - start);
  }

  char peek() {
    while (at_ < end_ && is_space(text_[at_])) ++at_;
    return at_ < end_ ? text_[at_] : '\0';
  }

  void expect(char c) {
    if (peek() != c || at_ >= end_) error(str("'", c, "'"));
    ++at_;
  }

  Expr counted(Expr e) const {
    if (graph_->size() > kMaxFormulaNodes)
      fail_here(str("more than ", kMaxFormulaNodes, " nodes; split it into several activations"));
    return e;
  }

  void check_count(std::string_view name, size_t start, size_t given, size_t least, size_t most) {
    if (given >= least && given <= most) return;
    at_ = start;
    const std::string range = least == most ? str(least) : str(least, " to ", most);
    fail_here(str("'", name, "' takes ", range, " argument", most == 1 ? "" : "s", ", ", given,
                  " given"));
  }

  [[noreturn]] void error(const std::string& expected) {
    peek();
    std::string found = at_ >= text_.size() ? "the end" : str("'", text_[at_], "'");
    if (at_ < text_.size() && (text_[at_] < ' ' || text_[at_] > '~'))
      found = str("byte ", static_cast<int>(static_cast<unsigned char>(text_[at_])));
    fail_here(str("expected ", expected, ", found ", found));
  }

  [[noreturn]] void fail_here(const std::string& what) const {
    const std::string_view before = text_.substr(0, at_);
    const auto line = 1 + std::ranges::count(before, '\n');
    const size_t newline = before.rfind('\n');
    const size_t column = newline == std::string_view::npos ? at_ + 1 : at_ - newline;
    fail(Code::invalid_argument, "formula: line ", line, ", column ", column, ": ", what);
  }

  std::string_view text_;
  std::span<const std::string> inputs_;
  std::vector<bool> used_;
  std::vector<Parameter> parameters_;
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  size_t at_ = 0, end_ = 0, body_end_ = 0;
  int depth_ = 0;
};

}  // namespace

bool is_reserved(std::string_view name) {
  return word_named(name) || name == "clamp" || name == "round" || name == "select" ||
         name == "gated" || name == "scaled";
}

bool is_identifier(std::string_view name) {
  return !name.empty() && is_letter(name[0]) &&
         std::ranges::all_of(name, [](char c) { return is_letter(c) || is_digit(c); });
}

std::string formula_label(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string name(text.substr(0, kMost));
  for (char& c : name)
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  return text.size() > kMost ? name + "..." : name;
}

Formula parse(std::string_view text, std::span<const std::string> inputs) {
  const FpMode ieee;  // constants are folded while reading
  return Parser(text, inputs).run();
}

Expr substitute(const Formula& formula, std::span<const Expr> loads) {
  const Graph& graph = *formula.graph;
  require(loads.size() == formula.used.size() + formula.parameters.size(),
          "formula: ", loads.size(), " values for ", formula.used.size(), " inputs and ",
          formula.parameters.size(), " parameters; the activation's parameters were changed");
  std::vector<Expr> image(graph.size());
  for (const uint32_t id : order(graph, std::span(&formula.root, 1))) {
    const Node& n = graph[id];
    if (n.word == Word::constant) {
      image[id] = Expr(n.value);
    } else if (n.word == Word::load) {
      image[id] = loads[n.slot];
    } else {
      std::vector<Expr> in;
      for (int i = 0; i < n.arity(); ++i) in.push_back(image[n.in[i]]);
      image[id] = apply_word(n.word, in, n.detail);
    }
  }
  return image[formula.root];
}

}  // namespace tenon
