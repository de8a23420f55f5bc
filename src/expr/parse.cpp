// A recursive-descent parser that builds expressions as it reads.
#include "expr/parse.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/fp_mode.h"
#include "core/text.h"
#include "expr/order.h"
#include "expr/registry.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// Words that are functions in the text. + − * / are operators; select and round have their own
// rules.
std::optional<Word> word_named(std::string_view name) {
  for (size_t i = index(Word::min); i <= index(Word::erfc); ++i)
    if (kWords[i].name == name) return static_cast<Word>(i);
  return std::nullopt;
}

class Parser {
 public:
  Parser(std::string_view text, std::span<const std::string> inputs)
      : text_(text), inputs_(inputs), used_(inputs.size(), false) {
    check_bytes("formula", text);
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

  // Reads `; name = number` after the formula.
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
    identifier();
    at_ = pin_end(text_.substr(0, end_), at_);
    const std::string_view name = text_.substr(start, at_ - start);
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
      check_pin(name);
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
    const Literal literal = scan_literal(text_.substr(0, end_), at_);
    if (literal.expected) {
      at_ = literal.end;
      error(literal.expected);
    }
    const auto value = literal_value<float>(text_.substr(at_, literal.end - at_));
    if (!value) fail_here("the number is too large for fp32 (at most 3.4028235e38)");
    at_ = literal.end;
    return *value;
  }

  std::string_view identifier() {
    const size_t start = at_;
    at_ = name_end(text_.substr(0, end_), at_);
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
    fail_here(str("expected ", expected, ", found ", found_at(text_, at_)));
  }

  [[noreturn]] void fail_here(const std::string& what) const {
    fail_at("formula", text_, at_, what);
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

void check_bytes(std::string_view what, std::string_view text) {
  size_t bytes = text.size();
  for (size_t at = text.find('@'); at < text.size(); at = text.find('@', at + 1))
    bytes -= pin_end(text, at) - at;
  require(bytes <= kMaxFormulaBytes && text.size() <= 4 * kMaxFormulaBytes, what, ": ", bytes,
          " bytes; at most ", kMaxFormulaBytes,
          " are read. Define a part of it as an activation of its own");
}

std::string formula_label(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string name;
  for (size_t i = 0; i < text.size(); ++i) {
    i = pin_end(text, i);  // skips the hash of a pinned name
    if (i == text.size()) break;
    if (name.size() == kMost) return name + "...";
    name += static_cast<unsigned char>(text[i]) < ' ' ? ' ' : text[i];
  }
  return name;
}

Formula parse(std::string_view text, std::span<const std::string> inputs) {
  const FpMode ieee;  // the parser folds constants
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
