// Chains of ops and their text: `linear(512,2048) bias swiglu linear(1024,512) add<res:out`.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#pragma GCC visibility push(default)

namespace tenon {

// Limits for untrusted text.
inline constexpr size_t kMaxChainBytes = 65536;
inline constexpr size_t kMaxChainOps = 1024;

// An argument of an op: a finite number, a name (gelu, true) or a quoted text.
struct OpArgument {
  std::string name = {};  // empty for a positional argument
  std::variant<double, std::string> value = 0.0;
  bool quoted = false;

  friend bool operator==(const OpArgument&, const OpArgument&) = default;
};

// The position of an op in its text, from 1. 0 if there is no text. Not part of the op's identity.
struct Position {
  int64_t line = 0, column = 0;

  friend bool operator==(const Position&, const Position&) { return true; }
};

struct Op {
  std::string name = {};  // a registered op
  std::vector<OpArgument> arguments = {};
  std::vector<std::string> reads = {},
                           writes = {};  // channels of extra inputs and outputs, in order
  std::string label = {};                // for messages and pictures
  Position position = {};

  friend bool operator==(const Op&, const Op&) = default;
};
using Chain = std::vector<Op>;

// Initial values of a parameter: uniform from low to high. Constant if both are equal.
struct Initial {
  float low = 0, high = 0;

  friend bool operator==(const Initial&, const Initial&) = default;
};

// Spaces and newlines separate items; `#` starts a comment. A quoted text escapes a quote and a
// backslash with a backslash. Throws an Error with the line, the column, the op and what was
// expected.
Chain parse_chain(std::string_view text);

// Prints the canonical text: one space between items, `name(1,"text",eps=1e-5)<in>out:label`
// without spaces inside, no empty `()`, shortest numbers that parse to the same value. Throws if no
// text can express the chain.
std::string print_chain(std::span<const Op> chain);

}  // namespace tenon

#pragma GCC visibility pop

#endif
