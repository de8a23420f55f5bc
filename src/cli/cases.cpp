// A greedy covering array over the columns of a case.
#include "cli/cases.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <set>

#include "tenon/activation.h"

namespace tenon::cli {

namespace {

constexpr size_t kOp = static_cast<size_t>(Column::op);
constexpr size_t kDirection = static_cast<size_t>(Column::direction);
constexpr size_t kLayout = static_cast<size_t>(Column::layout);
constexpr size_t kShape = static_cast<size_t>(Column::shape);
constexpr size_t kBias = static_cast<size_t>(Column::bias);

using Indices = std::array<size_t, kColumns>;

// Which columns a row of the table may combine.
class Table {
 public:
  Table() {
    for (const std::string& name : activation_names()) {
      const bool unary = activation(name).inputs == 1;
      add_op(name, !unary);
      if (unary) add_op("gated(" + name + ")", true);
      add_op("scaled(" + name + ")", !unary);
    }
    add_op("l2normalization", false);
    values_[kDirection] = {"fwd", "bwd"};
    values_[static_cast<size_t>(Column::input)] = {"f32", "f16", "bf16"};
    values_[static_cast<size_t>(Column::output)] = {"f32", "f16", "bf16"};
    values_[static_cast<size_t>(Column::mode)] = {"none"};
    values_[static_cast<size_t>(Column::orientation)] = {"row"};
    values_[kLayout] = {
        "-",       "stacked", "swapped", "interleaved(1)", "interleaved(8)", "interleaved(32)",
        "separate"};
    values_[kShape] = {"0x32",
                       "3x0",
                       "1x1",
                       "1x777",
                       "7x13",
                       "31x33",
                       "32x32",
                       "127x129",
                       "2x1031",
                       "513x3",
                       "16x512",
                       "9x1024",
                       "5x4160",
                       "300x8",
                       "130x64+strided",
                       "19x32+unaligned",
                       "23x61+strided+unaligned",
                       "3x4608+strided"};
    values_[kBias] = {"-", "bias", "dbias", "bias+dbias"};
    values_[static_cast<size_t>(Column::precision)] = {"native", "strict"};
    values_[static_cast<size_t>(Column::rounding)] = {"once", "eager"};
  }

  [[nodiscard]] size_t size(size_t column) const { return values_[column].size(); }
  [[nodiscard]] const std::string& value(const Indices& row, size_t column) const {
    return values_[column][row[column]];
  }

  [[nodiscard]] bool allowed(const Indices& row) const {
    const bool plain_layout = value(row, kLayout) == "-";
    if (gated_[row[kOp]] == plain_layout) return false;
    const std::string& bias = value(row, kBias);
    const bool dbias = bias.find("dbias") != std::string::npos;
    if (dbias && value(row, kDirection) == "fwd") return false;
    if (value(row, kOp) == "l2normalization" && bias != "-") return false;
    const ShapeCase shape = parse_shape(value(row, kShape));
    const std::string& layout = value(row, kLayout);
    if (layout.starts_with("interleaved("))
      return shape.cols % std::atoll(layout.c_str() + std::string("interleaved(").size()) == 0;
    return true;
  }

  [[nodiscard]] Case make(const Indices& row) const {
    Case c;
    for (size_t i = 0; i < kColumns; ++i) c.values[i] = value(row, i);
    return c;
  }

 private:
  void add_op(const std::string& name, bool gated) {
    values_[kOp].push_back(name);
    gated_.push_back(gated);
  }

  std::array<std::vector<std::string>, kColumns> values_;
  std::vector<bool> gated_;
};

// A fixed generator, so that the list is the same everywhere.
class Random {
 public:
  size_t below(size_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<size_t>(state_ % n);
  }

 private:
  uint64_t state_ = 0x2545F4914F6CDD1DULL;
};

using Pair = std::array<size_t, 4>;  // column, value, column, value

class Cover {
 public:
  explicit Cover(const Table& table) : table_(table) {
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b)
        for (size_t i = 0; i < table.size(a); ++i)
          for (size_t j = 0; j < table.size(b); ++j) open_.insert({a, i, b, j});
  }

  // The allowed completion of the fixed columns that meets most open pairs, if there is one.
  bool complete(const std::vector<std::pair<size_t, size_t>>& fixed, Indices& best) {
    constexpr int kTries = 400;
    constexpr int kEnough = 24;
    int found = 0;
    size_t most = 0;
    for (int i = 0; i < kTries && found < kEnough; ++i) {
      Indices row{};
      for (size_t c = 0; c < kColumns; ++c) row[c] = random_.below(table_.size(c));
      for (const auto& [column, value] : fixed) row[column] = value;
      if (!table_.allowed(row)) continue;
      const size_t gain = 1 + count_open(row);
      if (gain > most) most = gain, best = row;
      ++found;
    }
    return found > 0;
  }

  void take(const Indices& row) {
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b) open_.erase({a, row[a], b, row[b]});
  }

  [[nodiscard]] const std::set<Pair>& open() const { return open_; }

 private:
  [[nodiscard]] size_t count_open(const Indices& row) const {
    size_t n = 0;
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b) n += open_.count({a, row[a], b, row[b]});
    return n;
  }

  const Table& table_;
  std::set<Pair> open_;
  Random random_;
};

// Op, direction, layout and bias of every cell.
std::vector<std::vector<std::pair<size_t, size_t>>> cell_rows(const Table& table) {
  std::vector<std::vector<std::pair<size_t, size_t>>> rows;
  std::set<std::string> seen;
  Indices row{};
  for (row[kShape] = 0; row[kShape] < table.size(kShape); ++row[kShape])
    for (row[kOp] = 0; row[kOp] < table.size(kOp); ++row[kOp])
      for (row[kDirection] = 0; row[kDirection] < table.size(kDirection); ++row[kDirection])
        for (row[kLayout] = 0; row[kLayout] < table.size(kLayout); ++row[kLayout])
          for (row[kBias] = 0; row[kBias] < table.size(kBias); ++row[kBias])
            if (table.allowed(row) && seen.insert(table.make(row).cell()).second)
              rows.push_back({{kOp, row[kOp]},
                              {kDirection, row[kDirection]},
                              {kLayout, row[kLayout]},
                              {kBias, row[kBias]}});
  return rows;
}

}  // namespace

std::string Case::text() const {
  std::string line;
  for (const std::string& v : values) line += (line.empty() ? "" : " ") + v;
  return line;
}

std::string Case::cell() const {
  const bool dbias = (*this)[Column::bias].find("dbias") != std::string::npos;
  return (*this)[Column::op] + " " + (*this)[Column::direction] + " " + (*this)[Column::mode] +
         " " + (*this)[Column::orientation] + " " + (*this)[Column::layout] +
         (dbias ? " dbias" : " -");
}

ShapeCase parse_shape(const std::string& text) {
  ShapeCase s;
  char* end = nullptr;
  s.rows = std::strtoll(text.c_str(), &end, 10);
  s.cols = std::strtoll(end + 1, nullptr, 10);
  s.strided = text.find("+strided") != std::string::npos;
  s.unaligned = text.find("+unaligned") != std::string::npos;
  return s;
}

std::vector<std::string> cells() {
  const Table table;
  std::vector<std::string> result;
  for (const auto& fixed : cell_rows(table)) {
    Indices row{};
    for (const auto& [column, value] : fixed) row[column] = value;
    result.push_back(table.make(row).cell());
  }
  return result;
}

std::vector<Case> cases() {
  const Table table;
  Cover cover(table);
  std::vector<Case> result;
  std::set<std::string> seen;
  const auto add = [&](const Indices& row) {
    cover.take(row);
    Case c = table.make(row);
    if (seen.insert(c.text()).second) result.push_back(std::move(c));
  };
  Indices row{};
  for (const auto& fixed : cell_rows(table))
    if (cover.complete(fixed, row)) add(row);
  // What the cells left open; a pair that no allowed case has is left out.
  const std::vector<Pair> rest(cover.open().begin(), cover.open().end());
  for (const Pair& p : rest)
    if (cover.open().count(p) && cover.complete({{p[0], p[1]}, {p[2], p[3]}}, row)) add(row);
  return result;
}

}  // namespace tenon::cli
