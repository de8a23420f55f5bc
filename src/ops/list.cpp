// The registry of ops, one line per op.
#include <algorithm>

#include "ops/op.h"
#include "tenon/error.h"

#define TENON_OPS       \
  OP(linear)            \
  OP(bias)              \
  OP(scale)             \
  OP(dropout)           \
  OP(add)               \
  OP(make_extra_output) \
  OP(layernorm)         \
  OP(rmsnorm)           \
  OP(l2norm)            \
  OP(quantize)          \
  OP(reshape)           \
  OP(identity)          \
  OP(all_reduce)        \
  OP(all_gather)        \
  OP(reduce_scatter)

namespace tenon {

#define OP(name) OpSchema name##_op();
TENON_OPS
#undef OP

std::span<const OpSchema> op_schemas() {
#define OP(name) name##_op(),
  static const auto& kList = *new std::vector<OpSchema>{TENON_OPS};
#undef OP
  return kList;
}

bool is_op(const std::string& name) {
  const std::span<const OpSchema> all = op_schemas();
  if (std::ranges::find(all, name, &OpSchema::name) != all.end()) return true;
  return is_activation(name);
}

OpUse OpUse::of(const Op& op, const std::string& who) {
  const std::span<const OpSchema> all = op_schemas();
  const auto at = std::ranges::find(all, op.name, &OpSchema::name);
  OpSchema schema = at != all.end() ? *at : activation_op(op, who);
  // Every op accepts `keep`. The lowering implements it, so schemas do not list it.
  if (std::ranges::find(schema.arguments, "keep", &ArgumentSchema::name) ==
      schema.arguments.end()) {
    ArgumentSchema keep = text("keep");
    keep.by_name = true;
    schema.arguments.push_back(keep);
  }
  Arguments arguments(op, schema.arguments, who);
  return {std::make_shared<const OpSchema>(std::move(schema)), std::move(arguments)};
}

void OpUse::check_columns(int64_t cols) const {
  const std::optional<int64_t> wanted = arguments.columns();
  require(!wanted || *wanted == cols, arguments.who(), ": input has ", cols, " columns, ",
          schema->parameters.empty() ? "it" : schema->parameters[0].name, " wants ",
          wanted.value_or(0));
}

}  // namespace tenon
