// The arguments of an op: what its schema allows, and what a chain gives.
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

// Columns of a tensor, and every other number that an op is given.
constexpr int64_t kMostCols = int64_t{1} << 40;

struct ArgumentSchema {
  // columns: those of the op's input, checked if given; count: a whole number from 1.
  enum class Kind : uint8_t { columns, count, number, flag, text };
  std::string name;
  Kind kind = Kind::number;
  std::optional<double> value = {};  // of a number or a flag that is not given
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  std::string missing = {};  // required: the message if it is not given
  bool by_name = false;      // has no position
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

// The arguments of one op of a chain. Each is checked when this is made; `op` must outlive it.
class Arguments {
 public:
  Arguments(const Op& op, std::vector<ArgumentSchema> schema, std::string who);

  [[nodiscard]] const std::string& who() const { return who_; }
  [[nodiscard]] double number(std::string_view name) const;  // given, or its default
  [[nodiscard]] bool flag(std::string_view name) const { return number(name) != 0; }
  [[nodiscard]] int64_t count(std::string_view name) const {
    return static_cast<int64_t>(number(name));
  }
  [[nodiscard]] std::optional<std::string> text(std::string_view name) const;
  // The number that the op says its input has, if it does.
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
