// Parses a chain text to ops and prints ops as text, with one loop over items and no recursion.
#include "tenon/chain.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>

#include "core/fp_mode.h"
#include "core/text.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// Names are user input and may be long.
std::string shortened(std::string_view name) {
  constexpr size_t kMost = 40;
  return name.size() > kMost ? str(name.substr(0, kMost), "...") : std::string(name);
}

// Bytes that a quoted text cannot hold. A tab counts as a space.
bool is_control(char c) {
  return (static_cast<unsigned char>(c) < ' ' && c != '\t') || c == '\x7f';
}

// Names such as `inf` and `nan`. As values they look like numbers, but numbers must be finite.
bool is_not_finite(std::string_view name) {
  std::string lower(name.substr(0, 9));
  for (char& c : lower) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return lower == "nan" || lower == "inf" || lower == "infinity";
}

bool starts_value(char c) {
  return is_letter(c) || is_digit(c) || c == '.' || c == '-' || c == '+' || c == '"';
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {
    require(text.size() <= kMaxChainBytes, "chain: ", text.size(), " bytes; at most ",
            kMaxChainBytes, " are read. Split the chain");
  }

  Chain run() {
    if (!is_letter(peek())) error("the name of an op");
    while (is_letter(peek())) {
      if (chain_.size() == kMaxChainOps)
        fail_at("chain", text_, at_, "more than ", kMaxChainOps, " ops; split the chain");
      item();
    }
    if (at_ < text_.size()) after_item();
    return std::move(chain_);
  }

 private:
  void item() {
    op_ = &chain_.emplace_back();
    op_->position = position();
    op_->name = identifier();
    if (peek() == '(') arguments();
    for (char c = peek(); c == '<' || c == '>'; c = peek()) {
      ++at_;
      if (!is_letter(peek())) error(str("the name of a channel after '", c, "'"));
      (c == '<' ? op_->reads : op_->writes).emplace_back(identifier());
    }
    if (peek() == ':') {
      ++at_;
      if (!is_letter(peek())) error("a label after ':'");
      op_->label = identifier();
    }
  }

  void arguments() {
    ++at_;
    names_.clear();
    if (peek() == ')') {
      ++at_;
      return;
    }
    argument();
    while (peek() == ',') {
      ++at_;
      argument();
    }
    const char c = peek();
    if (c == '(' || c == '+' || c == '-' || c == '*' || c == '/')
      error("',' or ')'; a formula is a text in quotes, as in act(\"x*sigmoid(x)\")");
    if (c != ')') error("',' or ')'");
    ++at_;
  }

  void argument() {
    peek();
    const size_t start = at_;
    OpArgument& a = op_->arguments.emplace_back();
    if (is_letter(peek())) {
      const std::string_view name = identifier();
      if (peek() == '=') {
        ++at_;
        a.name = name;
        if (!names_.insert(name).second) {
          at_ = start;
          fail_here(str("'", shortened(name), "' is given twice; keep one of them"));
        }
      } else {
        at_ = start;  // a value
      }
    }
    if (a.name.empty() && !names_.empty() && starts_value(peek()))
      fail_here("a value by position stands before the named ones; move it there or name it");
    value(a);
  }

  void value(OpArgument& a) {
    const char c = peek();
    if (!starts_value(c)) {
      const std::string of = a.name.empty() ? "" : str(" for '", shortened(a.name), "'");
      error(str("a value", of, ": a number, a name or a text in quotes"));
    }
    if (is_letter(c)) {
      const size_t start = at_;
      const std::string_view name = identifier();
      if (is_not_finite(name)) {
        at_ = start;
        fail_here(str("the value '", name, "' is no number; give a finite one"));
      }
      a.value = std::string(name);
    } else if (c == '"') {
      a.value = quoted();
      a.quoted = true;
    } else {
      a.value = number();
    }
  }

  double number() {
    const bool negative = text_[at_] == '-';
    if (negative || text_[at_] == '+') ++at_;
    const Literal literal = scan_literal(text_, at_);
    if (literal.expected) {
      at_ = literal.end;
      error_here(literal.expected);
    }
    const auto value = literal_value<double>(text_.substr(at_, literal.end - at_));
    if (!value) fail_here("the number is too large for float64 (at most 1.7976931348623157e308)");
    at_ = literal.end;
    return negative ? -*value : *value;
  }

  std::string quoted() {
    std::string out;
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      char c = text_[at_];
      if (c == '\n' || c == '\r') break;
      if (is_control(c)) error_here("a text without control characters");
      if (c == '\\') {
        c = ++at_ < text_.size() ? text_[at_] : '\0';
        if (c != '"' && c != '\\') error_here("'\"' or '\\' after '\\'");
      }
      out += c;
    }
    if (at_ >= text_.size() || text_[at_] != '"')
      error_here("'\"' on the line where the text began");
    ++at_;
    return out;
  }

  // Throws for a character that neither continues the last item nor starts a new one.
  [[noreturn]] void after_item() {
    const char c = text_[at_];
    const bool labelled = !op_->label.empty();
    if (labelled && c == ':') fail_here("an op has one label; keep one of them");
    if (labelled && (c == '<' || c == '>'))
      fail_here("channels stand before the label; write name<in>out:label");
    if (c == '(')
      fail_here("arguments stand once, after the op's name; write name(…)<in>out:label");
    if (c == ',' || c == ';' || c == '|')
      error("an op or the end; spaces or newlines are between ops");
    error(labelled ? "an op or the end" : "an op, '<', '>', ':' or the end");
  }

  std::string_view identifier() {
    const size_t start = at_;
    at_ = name_end(text_, at_);
    return text_.substr(start, at_ - start);
  }

  // Position of the next byte. It only moves forward.
  Position position() {
    for (; seen_ < at_; ++seen_)
      if (text_[seen_] == '\n') {
        ++line_;
        line_start_ = seen_ + 1;
      }
    return {line_, static_cast<int64_t>(at_ - line_start_) + 1};
  }

  // Skips spaces and comments. Returns 0 at the end.
  char peek() {
    for (; at_ < text_.size(); ++at_) {
      if (text_[at_] == '#') at_ = std::min(text_.find('\n', at_), text_.size());
      if (at_ >= text_.size()) break;
      if (!is_space(text_[at_])) return text_[at_];
    }
    return '\0';
  }

  [[noreturn]] void error(const std::string& expected) {
    peek();
    error_here(expected);
  }

  [[noreturn]] void error_here(const std::string& expected) const {
    const bool line_ends = at_ < text_.size() && (text_[at_] == '\n' || text_[at_] == '\r');
    fail_here(str("expected ", expected, ", found ",
                  line_ends ? "the end of the line" : found_at(text_, at_)));
  }

  [[noreturn]] void fail_here(const std::string& what) const {
    fail_at("chain", text_, at_, op_ ? str(shortened(op_->name), ": ") : "", what);
  }

  std::string_view text_;
  size_t at_ = 0;
  size_t seen_ = 0, line_start_ = 0;  // state of position()
  int64_t line_ = 1;
  Chain chain_;
  Op* op_ = nullptr;                            // the last item
  std::unordered_set<std::string_view> names_;  // argument names of the current item
};

// The shortest digits that parse to the same value, with short exponents: 1e-5, not 1e-05.
void append_number(std::string& out, double value) {
  const std::string digits = str(value);
  const size_t e = digits.find('e');
  out += digits.substr(0, e);
  if (e == std::string::npos) return;
  out += digits[e + 1] == '-' ? "e-" : "e";
  out += digits.substr(digits.find_first_not_of("+-0", e + 1));
}

void append_value(std::string& out, const OpArgument& a) {
  if (const double* number = std::get_if<double>(&a.value)) return append_number(out, *number);
  const std::string& text = std::get<std::string>(a.value);
  if (!a.quoted) {
    out += text;
    return;
  }
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  out += '"';
}

std::string text_of(std::span<const Op> chain) {
  std::string out;
  for (const Op& op : chain) {
    if (!out.empty()) out += ' ';
    out += op.name;
    char before = '(';
    for (const OpArgument& a : op.arguments) {
      out += before;
      before = ',';
      if (!a.name.empty()) out += str(a.name, '=');
      append_value(out, a);
    }
    if (!op.arguments.empty()) out += ')';
    for (const std::string& channel : op.reads) out += str('<', channel);
    for (const std::string& channel : op.writes) out += str('>', channel);
    if (!op.label.empty()) out += str(':', op.label);
  }
  return out;
}

// Checks an op that was not parsed from text against the rules of the text. The printed text is a
// cache key, so it must parse to the same op.
void check(const Op& op, size_t index) {
  const auto rule = [&](bool holds, const auto&... what) {
    if (holds) return;
    fail(Code::invalid_argument, "chain: op ", index + 1, " '", shortened(op.name), "': ", what...);
  };
  const auto named = [&](const char* what, const std::string& name) {
    if (is_identifier(name)) return;
    rule(false, what, " '", shortened(name), "' is not a name; use letters, digits, _");
  };
  named("the op", op.name);
  std::unordered_set<std::string_view> names;
  for (const OpArgument& a : op.arguments) {
    if (a.name.empty()) {
      rule(names.empty(), "a value by position stands after a named one; move it or name it");
    } else {
      named("the argument", a.name);
      rule(names.insert(a.name).second, "'", shortened(a.name), "' is given twice; keep one");
    }
    const std::string* text = std::get_if<std::string>(&a.value);
    if (!text) {
      const double number = std::get<double>(a.value);
      rule(std::isfinite(number), "the number ", number, " has no text; give a finite one");
      rule(!a.quoted, "the number ", number, " is marked as quoted; unmark it");
    } else if (a.quoted) {
      rule(std::ranges::none_of(*text, is_control),
           "a text holds a newline or another control character; leave it out");
    } else {
      named("the value", *text);
      rule(!is_not_finite(*text), "the value '", *text, "' is no number; give a finite one");
    }
  }
  for (const std::string& channel : op.reads) named("the channel", channel);
  for (const std::string& channel : op.writes) named("the channel", channel);
  if (!op.label.empty()) named("the label", op.label);
}

void check_size(const std::string& canonical) {
  require(canonical.size() <= kMaxChainBytes, "chain: ", canonical.size(),
          " bytes in canonical form; at most ", kMaxChainBytes, " are read. Split the chain");
}

}  // namespace

Chain parse_chain(std::string_view text) {
  const FpMode ieee;  // the parsed bits must not depend on the host's rounding mode
  Chain chain = Parser(text).run();
  // Every parsed chain must have a printed form within the limit. Printing can make a text longer
  // (`1e4` becomes `10000`) but never twice as long.
  if (text.size() > kMaxChainBytes / 2) check_size(text_of(chain));
  return chain;
}

std::string print_chain(std::span<const Op> chain) {
  require(!chain.empty(), "chain: no ops; give at least one, as in `identity`");
  require(chain.size() <= kMaxChainOps, "chain: ", chain.size(), " ops; at most ", kMaxChainOps,
          " are read. Split the chain");
  for (size_t i = 0; i < chain.size(); ++i) check(chain[i], i);
  std::string text = text_of(chain);
  check_size(text);
  return text;
}

}  // namespace tenon
