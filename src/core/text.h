// Shared code to read and write text: characters, decimal literals, JSON strings, positions in
// errors.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tenon/error.h"

namespace tenon {

// ASCII only, independent of the locale of the host.
inline bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// The end of the name that starts at `at`.
inline size_t name_end(std::string_view text, size_t at) {
  while (at < text.size() && (is_letter(text[at]) || is_digit(text[at]))) ++at;
  return at;
}
// The end of an optional `@contents` after a name that ends at `at`.
inline size_t pin_end(std::string_view text, size_t at) {
  return at > 0 && at < text.size() && text[at] == '@' ? name_end(text, at + 1) : at;
}
// Limit for names from users. Messages quote names, so they must be short.
inline constexpr size_t kMaxNameBytes = 256;
inline bool is_identifier(std::string_view name) {
  return !name.empty() && is_letter(name[0]) && name_end(name, 0) == name.size();
}

// A C decimal literal without sign: its end, or the missing token there.
struct Literal {
  size_t end = 0;
  const char* expected = nullptr;
};
inline Literal scan_literal(std::string_view text, size_t at) {
  size_t i = at, digits = 0;
  const auto run = [&] {
    for (; i < text.size() && is_digit(text[i]); ++i) ++digits;
  };
  run();
  if (i < text.size() && text[i] == '.') ++i, run();
  if (digits == 0) return {at, "a number"};
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
    if (i >= text.size() || !is_digit(text[i])) return {i, "the digits of an exponent"};
    run();
  }
  if (i < text.size() && (is_letter(text[i]) || text[i] == '.'))
    return {i, "the end of the number (no suffix, no hexadecimal)"};
  return {i};
}

// The decimal exponent of the first nonzero digit of a literal, limited to ±1e9. For short texts.
inline int64_t decimal_exponent(std::string_view literal) {
  constexpr int64_t kMost = 1'000'000'000;
  const size_t e = std::min(literal.find_first_of("eE"), literal.size());
  const std::string_view mantissa = literal.substr(0, e);
  const auto first = static_cast<int64_t>(mantissa.find_first_of("123456789"));
  if (first < 0) return -kMost;
  const auto point = static_cast<int64_t>(std::min(mantissa.find('.'), mantissa.size()));
  int64_t power = 0;
  for (size_t i = e; i < literal.size(); ++i)
    if (is_digit(literal[i])) power = std::min(10 * power + (literal[i] - '0'), kMost);
  if (e + 1 < literal.size() && literal[e + 1] == '-') power = -power;
  return power + (first < point ? point - first - 1 : point - first);
}

// The value nearest to a literal. Empty if it is too large.
template <class T>
std::optional<T> literal_value(std::string_view literal) {
  T value = 0;
  const char* last = literal.data() + literal.size();
  // An out-of-range literal is too large, or it is below half of the smallest value and becomes
  // zero.
  if (std::from_chars(literal.data(), last, value).ec != std::errc())
    return decimal_exponent(literal) > 0 ? std::nullopt : std::optional<T>(0);
  return value;
}

// The character at a position of a text, for a message.
inline std::string found_at(std::string_view text, size_t at) {
  if (at >= text.size()) return "the end";
  const auto byte = static_cast<unsigned char>(text[at]);
  return byte < ' ' || byte > '~' ? str("byte ", static_cast<int>(byte)) : str("'", text[at], "'");
}

template <class... Parts>
[[noreturn]] void fail_at(std::string_view language, std::string_view text, size_t at,
                          const Parts&... what) {
  const std::string_view before = text.substr(0, at);
  const auto line = 1 + std::ranges::count(before, '\n');
  const size_t newline = before.rfind('\n');
  const size_t column = newline == std::string_view::npos ? at + 1 : at - newline;
  fail(Code::invalid_argument, language, ": line ", line, ", column ", column, ": ", what...);
}

// A JSON string.
inline std::string json_text(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') out += '\\';
    if (code < 0x20)
      out += str("\\u00", kDigits[code / 16], kDigits[code % 16]);
    else
      out += c;
  }
  return out + "\"";
}

}  // namespace tenon
