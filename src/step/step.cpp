// What a step says of itself.
#include "step/step.h"

#include <algorithm>
#include <map>

#include "expr/order.h"
#include "tenon/error.h"

namespace tenon {

namespace {

std::string text(const ColumnMap& m) {
  if (m == ColumnMap{}) return "";
  return str("[", m.block, "/", m.stride, "+", m.offset, "]");
}

std::string text(const Load& l) {
  return str(kLoadNames[static_cast<size_t>(l.from)], l.arg, ":", info(l.dtype).name,
             text(l.columns));
}

std::string text(const Store& s) {
  return str(kStoreNames[static_cast<size_t>(s.to)], s.arg, ":", info(s.dtype).name,
             text(s.columns));
}

}  // namespace

std::vector<uint32_t> Step::roots() const {
  std::vector<uint32_t> ids;
  for (const Store& s : stores) ids.push_back(s.value);
  return ids;
}

Precision Step::effective_precision() const {
  bool exact = true;
  for (const Store& s : stores)
    if (s.to != Store::To::amax) exact = false;
  for (const Store& s : stores)
    if (s.to != Store::To::amax && s.dtype == DType::f32) exact = true;
  return exact ? Precision::strict : precision;
}

int64_t Step::bytes(int64_t rows) const {
  int64_t total = 0;
  for (const Load& l : loads) {
    const int64_t count = l.from == Load::From::tile     ? rows * cols
                          : l.from == Load::From::row    ? cols
                          : l.from == Load::From::column ? rows
                                                         : 1;
    total += count * info(l.dtype).bytes;
  }
  for (const Store& s : stores) {
    const int64_t count = s.to == Store::To::tile         ? rows * cols
                          : s.to == Store::To::column_sum ? cols
                          : s.to == Store::To::row_sum    ? rows
                                                          : 1;
    total += count * info(s.dtype).bytes;
  }
  return total;
}

std::string Step::key() const {
  std::string out = str(cols, precision == Precision::strict ? " strict" : " native");
  for (const Load& l : loads) out += " " + text(l);
  out += " |";
  std::map<uint32_t, size_t> position;
  for (const uint32_t id : order(*graph, roots())) {
    const Node& n = (*graph)[id];
    position.emplace(id, position.size());
    out += str(" ", info(n.word).name);
    if (n.word == Word::constant) out += str("#", __builtin_bit_cast(uint32_t, n.value));
    if (n.word == Word::load) out += str("@", n.slot);
    if (n.detail) out += str(":", static_cast<int>(n.detail));
    for (int i = 0; i < n.arity(); ++i) out += str(",", position[n.in[i]]);
  }
  out += " |";
  for (const Store& s : stores) out += str(" ", position[s.value], ">", text(s));
  return out;
}

std::string Step::describe() const {
  std::string out = str("map ", name, " cols=", cols, " |");
  for (const Load& l : loads) out += " " + text(l);
  size_t words = 0;
  for (const uint32_t id : order(*graph, roots())) words += (*graph)[id].arity() > 0;
  out += str(" | ", words, " words ",
             effective_precision() == Precision::strict ? "strict" : "native", " |");
  for (const Store& s : stores) out += " " + text(s);
  return out;
}

}  // namespace tenon
