// What a user's mistake becomes: an Error whose message names the op, the value, the rule and the
// remedy.
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
  invalid_argument = 1,  // a shape, value or name that no call could accept
  unsupported = 2,       // a meaningful request that this build or device refuses
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
// Numbers are kernel text and cache keys too, so they must not depend on the host's locale.
template <class T>
requires std::is_arithmetic_v<T>
void append(std::string& out, T number) {
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number).ptr;
  out.append(buffer.data(), end);
}
}  // namespace detail

// Joins its arguments into one string.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

template <class... Parts>
[[noreturn]] void fail(Code code, const Parts&... parts) {
  throw Error(code, str(parts...));
}

// A rule of a public entry point: a broken one is the caller's mistake.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(Code::invalid_argument, parts...);
}

}  // namespace tenon

#endif
