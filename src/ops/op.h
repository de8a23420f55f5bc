// One op: its schema, its forward pass on lazy values and its float64 form. Each is one file of
// this folder; list.cpp names them all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lazy/extension.h"
#include "ops/arguments.h"
#include "ops/float64.h"
#include "tenon/chain.h"

namespace tenon {

// What an op knows when it extends the value.
struct OpCall {
  const Arguments& arguments;
  int64_t cols = 0;  // of its input
  bool training = true;
  int64_t ranks = 1;  // of the group that collectives run in
};

// A parameter has as many columns as the op's input.
struct ParameterSchema {
  std::string name;
  // One row, unless the argument of this name says how many.
  std::string rows = {};
  std::function<Initial(const OpCall&)> initial = [](const OpCall&) { return Initial{}; };
};

struct ExtraSchema {
  // A whole tensor, one value per row, or one value.
  enum class Kind : uint8_t { tensor, column, scalar };
  std::string name;
  Kind kind = Kind::tensor;
};

// Rows of the output are the input's times rows_mul ÷ rows_div.
struct OutputShape {
  int64_t cols = 0, rows_mul = 1, rows_div = 1;
};

struct OpSchema {
  std::string name;
  std::string summary;  // one line for documents
  std::vector<ArgumentSchema> arguments = {};
  std::vector<ParameterSchema> parameters = {};
  std::vector<ExtraSchema> extra_inputs = {};
  std::vector<std::string> extra_outputs = {};
  bool same_columns = true;  // else `output` says how many there are
  std::function<OutputShape(const OpCall&)> output = [](const OpCall& call) {
    return OutputShape{.cols = call.cols};
  };
  // How it extends the value, in order; an op without extensions passes it on.
  std::function<std::vector<Extension>(const OpCall&)> forward = {};
  Float64 float64 = {};
};

// All ops but the activations, which the registry of formulas holds.
std::span<const OpSchema> op_schemas();
// Whether a chain may name it: an op, an activation, or act for a formula.
bool is_op(const std::string& name);

// An op of a chain: the schema that its name means, and its arguments. `op` must outlive it.
struct OpUse {
  std::shared_ptr<const OpSchema> schema;
  Arguments arguments;

  // `who` names it in messages. Throws what is wrong with it, as far as its text tells.
  static OpUse of(const Op& op, const std::string& who);
  // Throws if its input cannot have so many columns.
  void check_columns(int64_t cols) const;
};

// The schema of an activation or a formula, with its arguments.
OpSchema activation_op(const Op& op, const std::string& who);
bool is_activation(const std::string& name);
// How the halves of a gated op are laid out.
Layout layout_of(const Arguments& a);

}  // namespace tenon
