// The definition of one op: its schema, its forward pass on lazy values and its float64 form. Each
// op has one file in this folder. list.cpp names them all.
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

// The data that an op has when it extends the value.
struct OpCall {
  const Arguments& arguments;
  int64_t cols = 0;  // columns of its input
  bool training = true;
  int64_t ranks = 1;  // size of the group of the collectives
};

// A parameter has as many columns as the op's input.
struct ParameterSchema {
  std::string name;
  // One row, or the value of the argument with this name.
  std::string rows = {};
  std::function<Initial(const OpCall&)> initial = [](const OpCall&) { return Initial{}; };
};

struct ExtraSchema {
  // A whole tensor, one value per row, or one value.
  enum class Kind : uint8_t { tensor, column, scalar };
  std::string name;
  Kind kind = Kind::tensor;
};

// The output has rows·rows_mul ÷ rows_div rows.
struct OutputShape {
  int64_t cols = 0, rows_mul = 1, rows_div = 1;
};

struct OpSchema {
  std::string name;
  std::string summary;  // one line for the documentation
  std::vector<ArgumentSchema> arguments = {};
  std::vector<ParameterSchema> parameters = {};
  std::vector<ExtraSchema> extra_inputs = {};
  std::vector<std::string> extra_outputs = {};
  bool same_columns = true;  // if false, `output` computes the columns
  std::function<OutputShape(const OpCall&)> output = [](const OpCall& call) {
    return OutputShape{.cols = call.cols};
  };
  // The extensions of the value, in order. An op without extensions passes the value through.
  std::function<std::vector<Extension>(const OpCall&)> forward = {};
  Float64 float64 = {};
};

// All ops except activations. The registry of formulas holds the activations.
std::span<const OpSchema> op_schemas();
// True if a chain may use the name: an op, an activation, or act for a formula.
bool is_op(const std::string& name);

// An op of a chain: the schema of its name, and its arguments. `op` must outlive this object.
struct OpUse {
  std::shared_ptr<const OpSchema> schema;
  Arguments arguments;

  // `who` names the op in messages. Throws if the op is invalid, as far as its text shows.
  static OpUse of(const Op& op, const std::string& who);
  // Throws if the input of the op cannot have `cols` columns.
  void check_columns(int64_t cols) const;
};

// The schema of an activation or a formula, with its arguments.
OpSchema activation_op(const Op& op, const std::string& who);
bool is_activation(const std::string& name);
// The layout of the halves of a gated op.
Layout layout_of(const Arguments& a);

}  // namespace tenon
