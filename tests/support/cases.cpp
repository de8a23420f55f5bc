// Generates conformance cases: a greedy covering array over the columns of a case.
#include "support/cases.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string_view>

#include "tenon/activation.h"
#include "tenon/format.h"

namespace tenon::support {

namespace {

constexpr size_t at(Column c) { return static_cast<size_t>(c); }

using Indices = std::array<size_t, kColumns>;

enum class Kind : uint8_t { activation, norm, quantize, dequantize, requantize, dropout };

struct Op {
  std::string name;
  Kind kind;
  bool gated = false;
  std::string source = {};  // requantize: the input mode
};

struct Number {
  std::string name;
  bool plain = false;
  std::string_view option = {};  // after the plus sign
};

// The values that a row of the table may combine.
class Table {
 public:
  Table() {
    for (const std::string& name : activation_names()) {
      const bool gated = activation(name).inputs == 2;
      ops_.push_back({name, Kind::activation, gated});
      if (!gated) ops_.push_back({"gated(" + name + ")", Kind::activation, true});
      ops_.push_back({"scaled(" + name + ")", Kind::activation, gated});
    }
    ops_.push_back({"l2normalization", Kind::norm});
    ops_.push_back({"quantize", Kind::quantize});
    ops_.push_back({"dequantize", Kind::dequantize});
    for (const ScalingInfo& s : kScalings) {
      const std::string mode(s.name);
      values_[at(Column::mode)].push_back(mode);
      if (mode != "none")
        ops_.push_back({"requantize(" + mode + ")", Kind::requantize, false, mode});
    }
    ops_.push_back({"bias_dropout_add", Kind::dropout});
    ops_.push_back({"bias_dropout_add(inference)", Kind::dropout});
    for (const Op& op : ops_) values_[at(Column::op)].push_back(op.name);
    values_[at(Column::direction)] = {"fwd", "bwd"};
    values_[at(Column::input)] = {"f32", "f16", "bf16", "e4m3", "e5m2", "e4m3+swizzled"};
    values_[at(Column::output)] = {"f32",  "f16",           "bf16",      "e4m3",
                                   "e5m2", "e4m3+swizzled", "e4m3+pow2", "e5m2+exact"};
    values_[at(Column::orientation)] = {"row", "col", "rowcol"};
    values_[at(Column::layout)] = {
        "-",       "stacked", "swapped", "interleaved(1)", "interleaved(8)", "interleaved(32)",
        "separate"};
    values_[at(Column::shape)] = {"0x32",
                                  "3x0",
                                  "1x1",
                                  "1x777",
                                  "7x13",
                                  "31x33",
                                  "32x32",
                                  "33x31",
                                  "127x129",
                                  "129x127",
                                  "2x1031",
                                  "513x3",
                                  "16x512",
                                  "9x1024",
                                  "5x4160",
                                  "300x8",
                                  "130x64+strided",
                                  "19x32+unaligned",
                                  "23x61+strided+unaligned",
                                  "3x4608+strided",
                                  "33x608",
                                  "129x160",
                                  "128x256",
                                  "144x1000"};
    values_[at(Column::bias)] = {"-", "bias", "dbias", "bias+dbias"};
    values_[at(Column::precision)] = {"native", "strict"};
    values_[at(Column::rounding)] = {"once", "eager"};
    for (const std::string& s : values_[at(Column::shape)]) shapes_.push_back(parse_shape(s));
    for (const std::string& s : values_[at(Column::layout)])
      piece_.push_back(s.starts_with("interleaved(") ? std::atoll(s.c_str() + 12) : 0);
    for (const Column c : {Column::input, Column::output})
      for (const std::string& s : values_[at(c)]) {
        const std::string_view name = s;
        const size_t plus = std::min(name.find('+'), name.size());
        const bool plain = info(*dtype_named(name.substr(0, plus))).plain;
        (c == Column::input ? inputs_ : outputs_)
            .push_back({s, plain, name.substr(std::min(plus + 1, name.size()))});
      }
  }

  [[nodiscard]] size_t size(size_t column) const { return values_[column].size(); }
  [[nodiscard]] const std::string& value(const Indices& row, Column c) const {
    return values_[at(c)][row[at(c)]];
  }

  // The columns of a cell, and the bias.
  [[nodiscard]] bool allowed_cell(const Indices& row) const {
    const Op& op = ops_[row[at(Column::op)]];
    const bool backward = value(row, Column::direction) == "bwd";
    const std::string& bias = value(row, Column::bias);
    const bool no_bias = bias == "-";
    const bool dbias = bias.find("dbias") != std::string::npos;
    const bool quantised = value(row, Column::mode) != "none";
    const bool plain = !quantised && value(row, Column::orientation) == "row";
    if (op.gated == (value(row, Column::layout) == "-")) return false;
    if (dbias && !backward) return false;
    switch (op.kind) {
      case Kind::activation:
        return true;
      case Kind::norm:
        return plain && no_bias;
      case Kind::quantize:  // backward: a gradient and its column sums
        return backward ? bias == "dbias" : no_bias;
      case Kind::dequantize:
      case Kind::requantize:
        return quantised && !backward && no_bias;
      case Kind::dropout:
        return plain && (no_bias || dbias == backward) && bias != "bias+dbias";
    }
    return false;
  }

  [[nodiscard]] bool allowed(const Indices& row) const {
    if (!allowed_cell(row)) return false;
    const Op& op = ops_[row[at(Column::op)]];
    const std::string& mode = value(row, Column::mode);
    const Number& input = inputs_[row[at(Column::input)]];
    const Number& output = outputs_[row[at(Column::output)]];
    const bool reads_codes = op.kind == Kind::dequantize || op.kind == Kind::requantize;
    const bool either = op.kind == Kind::activation;  // the input may be encoded in any mode
    if (!either && input.plain == reads_codes) return false;
    if (!fits(input.option, op.kind == Kind::dequantize ? mode : op.source)) return false;
    const bool writes_codes = mode != "none" && op.kind != Kind::dequantize;
    if (output.plain == writes_codes || !fits(output.option, mode)) return false;
    const int64_t piece = piece_[row[at(Column::layout)]];
    return piece == 0 || shapes_[row[at(Column::shape)]].cols % piece == 0;
  }

  [[nodiscard]] bool is_activation(const Indices& row) const {
    return ops_[row[at(Column::op)]].kind == Kind::activation;
  }

  [[nodiscard]] Case make(const Indices& row) const {
    Case c;
    for (size_t i = 0; i < kColumns; ++i) c.values[i] = values_[i][row[i]];
    return c;
  }

 private:
  // Whether a mode supports an option.
  static bool fits(std::string_view option, const std::string& mode) {
    const Format f{.scaling = scaling_named(mode).value_or(Scaling::none)};
    if (option == "swizzled") return info(f.scaling).scale == DType::e8m0;
    if (option == "pow2") return f.fp32_rule() && !info(f.scaling).power_of_two;
    if (option == "exact") return f.fp32_rule() && info(f.scaling).power_of_two;
    return true;
  }

  std::array<std::vector<std::string>, kColumns> values_;
  std::vector<Op> ops_;
  std::vector<ShapeCase> shapes_;
  std::vector<int64_t> piece_;
  std::vector<Number> inputs_, outputs_;
};

// A custom generator, so that lists are the same on all platforms.
class Random {
 public:
  Random() = default;
  explicit Random(uint64_t seed) : state_((seed + 1) * 0x9E3779B97F4A7C15ULL | 1) {
    for (int i = 0; i < 16; ++i) below(2);  // separates seeds that are close
  }

  size_t below(size_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<size_t>(state_ % n);
  }
  template <class T, size_t n>
  T of(const std::array<T, n>& values) {
    return values[below(n)];
  }

 private:
  uint64_t state_ = 0x2545F4914F6CDD1DULL;
};

// All pairs of values of two columns, as bits.
class Pairs {
 public:
  explicit Pairs(const Table& table) {
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b) {
        first_[a][b] = count_;
        width_[b] = table.size(b);
        count_ += table.size(a) * table.size(b);
      }
    open_.assign(count_, true);
  }

  [[nodiscard]] size_t index(size_t a, size_t i, size_t b, size_t j) const {
    return first_[a][b] + i * width_[b] + j;
  }
  [[nodiscard]] bool open(size_t index) const { return open_[index]; }
  void close(size_t index) { open_[index] = false; }

 private:
  std::array<std::array<size_t, kColumns>, kColumns> first_{};
  std::array<size_t, kColumns> width_{};
  size_t count_ = 0;
  std::vector<bool> open_;
};

using Fixed = std::vector<std::pair<Column, size_t>>;

class Cover {
 public:
  explicit Cover(const Table& table) : table_(table), pairs_(table) {}

  // Finds the allowed completion of the fixed columns that covers most open pairs.
  bool complete(const Fixed& fixed, Indices& best, int tries) {
    constexpr int kEnough = 16;
    int found = 0;
    size_t most = 0;
    for (int i = 0; i < tries && found < kEnough; ++i) {
      Indices row{};
      for (size_t c = 0; c < kColumns; ++c) row[c] = random_.below(table_.size(c));
      for (const auto& [column, value] : fixed) row[at(column)] = value;
      if (!table_.allowed(row)) continue;
      size_t gain = 1;
      for_pairs(row, [&](size_t p) { gain += pairs_.open(p) ? 1 : 0; });
      if (gain > most) most = gain, best = row;
      ++found;
    }
    return found > 0;
  }

  void take(const Indices& row) {
    for_pairs(row, [&](size_t p) { pairs_.close(p); });
  }

  [[nodiscard]] bool open(size_t a, size_t i, size_t b, size_t j) const {
    return pairs_.open(pairs_.index(a, i, b, j));
  }

 private:
  template <class F>
  void for_pairs(const Indices& row, F f) const {
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b) f(pairs_.index(a, row[a], b, row[b]));
  }

  const Table& table_;
  Pairs pairs_;
  Random random_;
};

// All cells. If a cell does not fix the bias, cells alternate with and without it.
std::vector<Fixed> cell_rows(const Table& table) {
  constexpr std::array kCell{Column::op, Column::direction, Column::mode, Column::orientation,
                             Column::layout};
  std::vector<Fixed> rows;
  Indices row{};
  size_t& bias = row[at(Column::bias)];
  const auto add = [&] {
    std::map<std::string, std::vector<size_t>> choices;
    for (bias = 0; bias < table.size(at(Column::bias)); ++bias)
      if (table.allowed_cell(row)) choices[table.make(row).cell()].push_back(bias);
    for (const auto& [cell, values] : choices) {
      Fixed fixed{{Column::bias, values[rows.size() % values.size()]}};
      for (const Column c : kCell) fixed.emplace_back(c, row[at(c)]);
      rows.push_back(std::move(fixed));
    }
  };
  const std::function<void(size_t)> walk = [&](size_t depth) {
    if (depth == kCell.size()) return add();
    size_t& value = row[at(kCell[depth])];
    for (value = 0; value < table.size(at(kCell[depth])); ++value) walk(depth + 1);
  };
  walk(0);
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
  const auto number = [&](const std::string& name, int64_t otherwise) {
    const size_t found = text.find(name);
    return found == std::string::npos ? otherwise : std::atoll(text.c_str() + found + name.size());
  };
  s.pad = number("+pad", text.find("+strided") != std::string::npos ? 3 : 0);
  s.shift = number("+shift", text.find("+unaligned") != std::string::npos ? 1 : 0);
  return s;
}

std::vector<std::string> cells() {
  const Table table;
  std::vector<std::string> result;
  for (const Fixed& fixed : cell_rows(table)) {
    Indices row{};
    for (const auto& [column, value] : fixed) row[at(column)] = value;
    result.push_back(table.make(row).cell());
  }
  return result;
}

namespace {

// The cell without its layout, if the kernel does not depend on it. Two tensors are another kernel.
std::string kernel_cell(const Case& c) {
  Case same = c;
  std::string& layout = same.values[at(Column::layout)];
  if (layout != "separate") layout = "-";
  return same.cell();
}

std::vector<Case> covering(bool few_kernels) {
  constexpr int kTries = 2000;       // cells are never empty, and most tries succeed
  constexpr int kPairTries = 20000;  // a pair may be rare, or impossible
  constexpr int kCellTries = 30;
  constexpr std::array kOfKernels{Column::bias, Column::input, Column::output, Column::precision,
                                  Column::rounding};
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
  std::map<std::string, Indices> first;  // first cell with the same kernels
  for (Fixed& fixed : cell_rows(table)) {
    for (const auto& [column, value] : fixed) row[at(column)] = value;
    const std::string kernel = kernel_cell(table.make(row));
    const auto found = few_kernels ? first.find(kernel) : first.end();
    if (found != first.end())
      for (const Column c : kOfKernels) fixed.emplace_back(c, found->second[at(c)]);
    if (!cover.complete(fixed, row, kTries)) continue;
    add(row);
    first.try_emplace(kernel, row);
  }
  const auto for_open_pairs = [&](const auto& f) {
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b)
        for (size_t i = 0; i < table.size(a); ++i)
          for (size_t j = 0; j < table.size(b); ++j)
            if (cover.open(a, i, b, j))
              f(Fixed{{static_cast<Column>(a), i}, {static_cast<Column>(b), j}});
  };
  // Covers the pairs that the cells left open. Skips pairs that no allowed case has.
  for_open_pairs([&](const Fixed& pair) {
    if (cover.complete(pair, row, kPairTries)) add(row);
  });
  // Random tries may miss a rare pair, so each cell is searched for it.
  const std::vector<Fixed> cells = cell_rows(table);
  for_open_pairs([&](const Fixed& pair) {
    for (const Fixed& cell : cells) {
      const auto differs = [&](const auto& value) {
        return std::ranges::any_of(cell, [&](const auto& other) {
          return other.first == value.first && other.second != value.second;
        });
      };
      if (std::ranges::any_of(pair, differs)) continue;
      Fixed both = cell;
      both.insert(both.end(), pair.begin(), pair.end());
      if (cover.complete(both, row, kCellTries)) return add(row);
    }
  });
  return result;
}

// Half of the shapes are whole vectors and tiles. The other half is arbitrary.
std::string random_shape(Random& random) {
  constexpr std::array<int64_t, 8> kPads{0, 0, 0, 8, 16, 1, 3, 7};
  constexpr std::array<int64_t, 8> kShifts{0, 0, 0, 0, 16, 1, 2, 8};
  const bool whole = random.below(2) == 0;
  int64_t rows = static_cast<int64_t>(random.below(4) == 0 ? random.below(4) : random.below(300));
  int64_t cols = static_cast<int64_t>(random.below(8) == 0 ? random.below(9) : random.below(700));
  if (random.below(16) == 0) cols += 4000, rows %= 8;
  if (whole) cols = (cols / 8 + 1) * 8;
  if (whole && random.below(2) == 0) rows = (rows + 15) / 16 * 16;
  const int64_t pad = whole ? kPads[random.below(5)] : random.of(kPads);
  const int64_t shift = whole ? kShifts[random.below(5)] : random.of(kShifts);
  std::string text = std::to_string(rows) + "x" + std::to_string(cols);
  if (pad) text += "+pad" + std::to_string(pad);
  if (shift) text += "+shift" + std::to_string(shift);
  return text;
}

// Another layout of a gated tensor. Two separate tensors stay separate.
std::string random_layout(const std::string& layout, int64_t cols, Random& random) {
  constexpr std::array<std::string_view, 2> kHalves{"stacked", "swapped"};
  if (layout == "-" || layout == "separate") return layout;
  std::vector<int64_t> pieces;
  for (int64_t k = 1; k <= cols; ++k)
    if (cols % k == 0) pieces.push_back(k);
  if (pieces.empty() || random.below(2) == 0) return std::string(random.of(kHalves));
  return "interleaved(" + std::to_string(pieces[random.below(pieces.size())]) + ")";
}

// `name(parameter=value)` inside of gated() and scaled(). Values near 1 are valid for all
// parameters.
std::string random_parameters(const std::string& op, Random& random) {
  const size_t open = op.rfind('(');
  const size_t begin = open == std::string::npos ? 0 : open + 1;
  const size_t end = op.find(')');
  const std::string name = op.substr(begin, end == std::string::npos ? end : end - begin);
  std::string values;
  for (const Parameter& p : activation(name).parameters)
    values += (values.empty() ? "" : ",") + p.name + "=" +
              std::to_string(static_cast<float>(1 + random.below(400)) / 64.0F);
  if (values.empty() || random.below(4) == 0) return op;
  return op.substr(0, begin) + name + "(" + values + ")" + op.substr(begin + name.size());
}

}  // namespace

std::vector<Case> cases() { return covering(false); }
std::vector<Case> cases_of_few_kernels() { return covering(true); }

std::vector<Case> random_cases(size_t count, size_t forms, uint64_t seed) {
  const Table table;
  Random random(seed);
  std::vector<Indices> kinds;
  while (kinds.size() < forms) {
    Indices row{};
    for (size_t c = 0; c < kColumns; ++c) row[c] = random.below(table.size(c));
    if (!table.allowed(row)) continue;
    const Case c = table.make(row);
    // Every second kind is one that the fast kernels support.
    const bool fast =
        c[Column::input].find("e") == std::string::npos && !c[Column::op].starts_with("scaled(");
    if (kinds.size() % 2 == 0 && !fast) continue;
    kinds.push_back(row);
  }
  std::vector<Case> result;
  while (result.size() < count) {
    const Indices& kind = kinds[random.below(kinds.size())];
    Case c = table.make(kind);
    const auto set = [&](Column column, std::string value) {
      c.values[at(column)] = std::move(value);
    };
    set(Column::precision, "strict");
    set(Column::shape, random_shape(random));
    set(Column::layout,
        random_layout(c[Column::layout], parse_shape(c[Column::shape]).cols, random));
    if (table.is_activation(kind)) set(Column::op, random_parameters(c[Column::op], random));
    result.push_back(std::move(c));
  }
  return result;
}

}  // namespace tenon::support
