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

// Bounds that keep untrusted text harmless.
inline constexpr size_t kMaxChainBytes = 65536;
inline constexpr size_t kMaxChainOps = 1024;

// A value of an op's argument: a finite number, a name (gelu, true) or a quoted text.
struct OpArgument {
  std::string name = {};  // empty: by position
  std::variant<double, std::string> value = 0.0;
  bool quoted = false;

  friend bool operator==(const OpArgument&, const OpArgument&) = default;
};

// Where an op stands in its text, from 1; 0 where there is none. It is no part of what the op is.
struct Position {
  int64_t line = 0, column = 0;

  friend bool operator==(const Position&, const Position&) { return true; }
};

struct Op {
  std::string name = {};  // of the registry of ops
  std::vector<OpArgument> arguments = {};
  std::vector<std::string> reads = {},
                           writes = {};  // channels of extra inputs and outputs, in order
  std::string label = {};                // for messages and pictures
  Position position = {};

  friend bool operator==(const Op&, const Op&) = default;
};
using Chain = std::vector<Op>;

// Initial values of a parameter: uniform from low to high; one number if both are equal.
struct Initial {
  float low = 0, high = 0;

  friend bool operator==(const Initial&, const Initial&) = default;
};

// Items are separated by spaces and newlines; `#` starts a comment. In a quoted text \" and
// \\ stand for " and \. Throws an Error that names line, column, op and what was expected.
Chain parse_chain(std::string_view text);

// Canonical: one space between items, `name(1,"text",eps=1e-5)<in>out:label` without any inside,
// `()` left out, numbers as short as they read back equal. A chain that no text says is refused.
std::string print_chain(std::span<const Op> chain);

}  // namespace tenon

#pragma GCC visibility pop

#endif
