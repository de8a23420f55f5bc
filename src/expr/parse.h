// The parser of formula texts. docs/formulas.md has the grammar.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/activation.h"
#include "tenon/expr.h"

namespace tenon {

// Limits for untrusted text.
inline constexpr size_t kMaxFormulaBytes = 4096;
inline constexpr uint32_t kMaxFormulaNodes = 512;
inline constexpr int kMaxFormulaDepth = 64;

// A parsed formula. Its loads are the given inputs in order, then the parameters.
struct Formula {
  std::shared_ptr<const Graph> graph;
  uint32_t root = 0;
  std::vector<Parameter> parameters;  // in the order of their defaults in the text
  std::vector<bool> used;             // which of the given inputs the formula uses
};

// Throws an Error with line, column and the expected token.
Formula parse(std::string_view text, std::span<const std::string> inputs);

// The formula with its loads replaced. The result is in the graph of the replacements.
Expr substitute(const Formula& formula, std::span<const Expr> loads);

// Throws if a text is too long. The contents of pinned names do not count.
void check_bytes(std::string_view what, std::string_view text);

// The label of an unnamed formula in messages: its beginning, on one line.
std::string formula_label(std::string_view text);

// Whether `name` is a word, `clamp`, `round` or `select`.
bool is_reserved(std::string_view name);

}  // namespace tenon
