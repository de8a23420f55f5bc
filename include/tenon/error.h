// Errors for mistakes of users. A message names the op, the value, the rule and the remedy.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <array>
#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace tenon {

enum class Code : int {
  ok = 0,
  invalid_argument = 1,  // a shape, value or name that no call accepts
  unsupported = 2,       // a valid request that this build or device does not support
  runtime = 3,           // the machine failed: no memory, no driver, a failed launch
};

#pragma GCC visibility push(default)
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] Code code() const { return code_; }

 private:
  Code code_;
};
#pragma GCC visibility pop

namespace detail {
inline void append(std::string& out, std::string_view text) { out += text; }
inline void append(std::string& out, char c) { out += c; }
// Independent of the locale of the host, because numbers are part of kernel texts and cache keys.
template <class T>
requires std::is_arithmetic_v<T>
void append(std::string& out, T number) {
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number).ptr;
  out.append(buffer.data(), end);
}
}  // namespace detail

// Appends its arguments to `out`.
template <class... Parts>
void append_to(std::string& out, const Parts&... parts) {
  (detail::append(out, parts), ...);
}

// Joins its arguments into one string.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::string out;
  append_to(out, parts...);
  return out;
}

template <class... Parts>
[[noreturn]] void fail(Code code, const Parts&... parts) {
  throw Error(code, str(parts...));
}

// Checks a rule of a public entry point. A violation is a mistake of the caller.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(Code::invalid_argument, parts...);
}

}  // namespace tenon

#endif
