// Formula text, by the grammar of the guide: docs/formulas.md.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/activation.h"
#include "tenon/expr.h"

namespace tenon {

// Bounds that keep untrusted text harmless.
inline constexpr size_t kMaxFormulaBytes = 4096;
inline constexpr uint32_t kMaxFormulaNodes = 512;
inline constexpr int kMaxFormulaDepth = 64;

// A parsed formula: loads are the offered inputs in order, then the parameters.
struct Formula {
  std::shared_ptr<const Graph> graph;
  uint32_t root = 0;
  std::vector<Parameter> parameters;  // in the order of their defaults in the text
  std::vector<bool> used;             // which of the offered inputs the formula mentions
};

// Throws an Error that names line, column and what was expected.
Formula parse(std::string_view text, std::span<const std::string> inputs);

// The formula with its loads replaced, in the graph of the replacements.
Expr substitute(const Formula& formula, std::span<const Expr> loads);

// Refuses a text that is too long; the contents of pinned names do not count.
void check_bytes(std::string_view what, std::string_view text);

// What a formula without a name is called in messages: its beginning, on one line.
std::string formula_label(std::string_view text);

// Whether a word, `clamp`, `round` or `select` has this name.
bool is_reserved(std::string_view name);

}  // namespace tenon
