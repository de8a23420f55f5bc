// Checks the arguments of an op. Messages name the op, the argument, its value and the rule.
#include "ops/arguments.h"

#include <algorithm>
#include <cmath>

#include "tenon/error.h"

namespace tenon {

namespace {

using Kind = ArgumentSchema::Kind;

std::string shown(const OpArgument& a) {
  if (const auto* n = std::get_if<double>(&a.value)) return str(*n);
  return std::get<std::string>(a.value);
}

std::string names_of(const std::vector<ArgumentSchema>& schema) {
  std::string names;
  for (const ArgumentSchema& a : schema) names += (names.empty() ? "" : " ") + a.name;
  return names.empty() ? "none" : names;
}

std::string range_of(const ArgumentSchema& a) {
  const bool below = std::isfinite(a.least), above = std::isfinite(a.most);
  if (below && above) return str("it must be from ", a.least, " to ", a.most);
  if (below) return a.least == 0 ? "it must not be negative" : str("it must be at least ", a.least);
  return str("it must be at most ", a.most);
}

}  // namespace

Arguments::Arguments(const Op& op, std::vector<ArgumentSchema> schema, std::string who)
    : op_(op), schema_(std::move(schema)), who_(std::move(who)) {
  size_t position = 0;
  std::vector<bool> given(schema_.size());
  for (const OpArgument& a : op.arguments) {
    const auto named = std::ranges::find(schema_, a.name, &ArgumentSchema::name);
    const auto at = a.name.empty() ? position++ : static_cast<size_t>(named - schema_.begin());
    if (a.name.empty())
      require(at < schema_.size(), who_, ": ", op.arguments.size(), " arguments; it takes ",
              names_of(schema_));
    else
      require(at < schema_.size(), who_, ": there is no argument '", a.name, "'; it takes ",
              names_of(schema_));
    require(!a.name.empty() || !schema_[at].by_name, who_, ": ", op.arguments.size(),
            " arguments; it takes ", names_of(schema_));
    require(!given[at], who_, ": '", schema_[at].name, "' is given twice; keep one");
    given[at] = true;
  }
  for (const ArgumentSchema& a : schema_) check(a);
}

void Arguments::check(const ArgumentSchema& a) const {
  const OpArgument* const found = find(a.name);
  require(found || a.missing.empty(), who_, ": ", a.missing);
  if (!found) return;
  if (a.kind == Kind::text) {
    require(std::holds_alternative<std::string>(found->value), who_, ": ", a.name, " is ",
            shown(*found), "; it must be a name or a quoted text");
    return;
  }
  const std::optional<double> n = given(a);
  if (a.kind == Kind::flag) {
    require(n.has_value(), who_, ": ", a.name, " is '", shown(*found),
            "'; it must be true or false");
    return;
  }
  constexpr double kMost = std::numeric_limits<float>::max();
  require(n && std::fabs(*n) <= kMost, who_, ": ", a.name, " is '", shown(*found),
          "'; it must be a number of fp32, at most 3.4028235e38 in size");
  if (a.kind == Kind::number) {
    // The limits apply to the fp32 number that the kernel receives.
    const auto value = static_cast<double>(static_cast<float>(*n));
    require(value >= a.least && value <= a.most, who_, ": ", a.name, " is ", static_cast<float>(*n),
            "; ", range_of(a));
    return;
  }
  require(*n == std::floor(*n) && *n >= 1, who_, ": ", a.name, " is ", *n,
          "; it must be a whole number, at least 1");
  require(*n <= static_cast<double>(kMostCols), who_, ": ", a.name, " is ", *n,
          "; it must be at most ", kMostCols);
}

const OpArgument* Arguments::find(std::string_view name) const {
  size_t position = 0;
  for (const OpArgument& a : op_.get().arguments) {
    if (a.name.empty() ? schema_[position].name == name : a.name == name) return &a;
    position += a.name.empty();
  }
  return nullptr;
}

std::optional<double> Arguments::given(const ArgumentSchema& a) const {
  const OpArgument* const found = find(a.name);
  if (!found) return std::nullopt;
  const auto* n = std::get_if<double>(&found->value);
  if (a.kind != Kind::flag) return n ? std::optional(*n) : std::nullopt;
  const std::string value = shown(*found);
  if (value != "true" && value != "false" && value != "1" && value != "0") return std::nullopt;
  return value == "true" || value == "1" ? 1.0 : 0.0;
}

double Arguments::number(std::string_view name) const {
  const auto a = std::ranges::find(schema_, name, &ArgumentSchema::name);
  return given(*a).value_or(a->value.value_or(0));
}

std::optional<std::string> Arguments::text(std::string_view name) const {
  const OpArgument* const a = find(name);
  return a ? std::optional(std::get<std::string>(a->value)) : std::nullopt;
}

std::optional<int64_t> Arguments::columns() const {
  for (const ArgumentSchema& a : schema_)
    if (a.kind == Kind::columns)
      if (const std::optional<double> n = given(a)) return static_cast<int64_t>(*n);
  return std::nullopt;
}

}  // namespace tenon
