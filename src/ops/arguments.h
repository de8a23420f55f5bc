// The arguments of an op: the schema, and the values from a chain.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/chain.h"

namespace tenon {

// Limit for the columns of a tensor, and for every other number argument of an op.
constexpr int64_t kMostCols = int64_t{1} << 40;

struct ArgumentSchema {
  // columns: the columns of the op's input, checked if given. count: an integer of at least 1.
  enum class Kind : uint8_t { columns, count, number, flag, text };
  std::string name;
  Kind kind = Kind::number;
  std::optional<double> value = {};  // default of a number or a flag
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  std::string missing = {};  // set if the argument is required: the message if it is missing
  bool by_name = false;      // by name only, not by position
};
inline ArgumentSchema columns(std::string name) {
  return {.name = std::move(name), .kind = ArgumentSchema::Kind::columns};
}
inline ArgumentSchema count(std::string name, std::string missing) {
  return {
      .name = std::move(name), .kind = ArgumentSchema::Kind::count, .missing = std::move(missing)};
}
inline ArgumentSchema flag(std::string name, bool value) {
  return {.name = std::move(name), .kind = ArgumentSchema::Kind::flag, .value = value ? 1.0 : 0.0};
}
inline ArgumentSchema text(std::string name) {
  return {.name = std::move(name), .kind = ArgumentSchema::Kind::text};
}

// The recipe of an op that quantises. It takes precedence over the recipe of the plan.
inline ArgumentSchema recipe_argument() {
  return {.name = "recipe", .kind = ArgumentSchema::Kind::text, .by_name = true};
}

// How a product sums FP8 operands: precise (default) or fast.
inline ArgumentSchema accumulate_argument() {
  return {.name = "accumulate", .kind = ArgumentSchema::Kind::text, .by_name = true};
}

// The arguments of one op of a chain. The constructor checks each of them. `op` must outlive this
// object.
class Arguments {
 public:
  Arguments(const Op& op, std::vector<ArgumentSchema> schema, std::string who);

  [[nodiscard]] const std::string& who() const { return who_; }
  [[nodiscard]] double number(std::string_view name) const;  // the given value or the default
  [[nodiscard]] bool flag(std::string_view name) const { return number(name) != 0; }
  [[nodiscard]] int64_t count(std::string_view name) const {
    return static_cast<int64_t>(number(name));
  }
  [[nodiscard]] std::optional<std::string> text(std::string_view name) const;
  // The input columns that the op states, if any.
  [[nodiscard]] std::optional<int64_t> columns() const;

 private:
  [[nodiscard]] const OpArgument* find(std::string_view name) const;
  [[nodiscard]] std::optional<double> given(const ArgumentSchema& a) const;
  void check(const ArgumentSchema& a) const;

  std::reference_wrapper<const Op> op_;
  std::vector<ArgumentSchema> schema_;
  std::string who_;
};

}  // namespace tenon
