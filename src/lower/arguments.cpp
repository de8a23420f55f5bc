// Arguments of ops, with messages that name the op, the value and the rule.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lower/stage.h"
#include "tenon/error.h"

namespace tenon {

namespace {

std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> list;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    if (end > 0) list.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return list;
}

std::string shown(const OpArgument& a) {
  if (const auto* n = std::get_if<double>(&a.value)) return str(*n);
  return std::get<std::string>(a.value);
}

}  // namespace

Arguments::Arguments(const Op& op, std::string_view names, std::string who)
    : op_(op), names_(words(names)), who_(std::move(who)) {
  size_t position = 0;
  std::vector<bool> given(names_.size());
  for (const OpArgument& a : op.arguments) {
    const auto at = a.name.empty()
                        ? position++
                        : static_cast<size_t>(std::ranges::find(names_, a.name) - names_.begin());
    const std::string takes = names_.empty() ? "none" : std::string(names);
    if (a.name.empty())
      require(at < names_.size(), who_, ": ", op.arguments.size(), " arguments; it takes ", takes);
    else
      require(at < names_.size(), who_, ": there is no argument '", a.name, "'; it takes ", takes);
    require(!given[at], who_, ": '", names_[at], "' is given twice; keep one");
    given[at] = true;
  }
}

const OpArgument* Arguments::find(std::string_view name) const {
  size_t position = 0;
  for (const OpArgument& a : op_.get().arguments) {
    if (a.name.empty() ? names_[position] == name : a.name == name) return &a;
    position += a.name.empty();
  }
  return nullptr;
}

std::optional<double> Arguments::number(std::string_view name) const {
  const OpArgument* a = find(name);
  if (!a) return std::nullopt;
  const auto* n = std::get_if<double>(&a->value);
  constexpr double kMost = std::numeric_limits<float>::max();
  require(n && std::fabs(*n) <= kMost, who_, ": ", name, " is '", shown(*a),
          "'; it must be a number of fp32, at most 3.4028235e38 in size");
  return *n;
}

std::optional<int64_t> Arguments::integer(std::string_view name, int64_t least) const {
  const std::optional<double> n = number(name);
  if (!n) return std::nullopt;
  require(*n == std::floor(*n) && *n >= static_cast<double>(least), who_, ": ", name, " is ", *n,
          "; it must be a whole number, at least ", least);
  require(*n <= static_cast<double>(kMostCols), who_, ": ", name, " is ", *n,
          "; it must be at most ", kMostCols);
  return static_cast<int64_t>(*n);
}

std::optional<std::string> Arguments::text(std::string_view name) const {
  const OpArgument* a = find(name);
  if (!a) return std::nullopt;
  const auto* t = std::get_if<std::string>(&a->value);
  require(t != nullptr, who_, ": ", name, " is ", shown(*a),
          "; it must be a name or a quoted text");
  return *t;
}

std::optional<bool> Arguments::flag(std::string_view name) const {
  const OpArgument* a = find(name);
  if (!a) return std::nullopt;
  const std::string value = shown(*a);
  require(value == "true" || value == "false" || value == "1" || value == "0", who_, ": ", name,
          " is '", value, "'; it must be true or false");
  return value == "true" || value == "1";
}

}  // namespace tenon
