// What a user's mistake becomes: an Error whose message names the op, the value, the rule and the
// remedy.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#pragma GCC visibility push(default)

namespace tenon {

enum class Code : int {
  ok = 0,
  invalid_argument = 1,  // a shape, value or name that no call could accept
  unsupported = 2,       // a meaningful request that this build or device refuses
  runtime = 3,           // the machine failed: no memory, no driver, a failed launch
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] Code code() const { return code_; }

 private:
  Code code_;
};

// Joins its arguments into one string.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
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

#pragma GCC visibility pop
