// Tests of the conformance list against an independent enumeration of the specification.
#include "support/cases.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "support/modes.h"
#include "support/support.h"

namespace tenon::test {
namespace {

using support::Case;
using support::Column;
using support::kColumns;

// The activations that the registry must have.
const std::vector<std::string> kUnary{"gelu",      "gelu_erf",   "silu", "qgelu",    "relu",
                                      "srelu",     "sigmoid",    "tanh", "softplus", "mish",
                                      "hardswish", "leaky_relu", "elu"};
const std::vector<std::string> kGated{"glu",    "geglu",  "geglu_erf",      "swiglu", "reglu",
                                      "qgeglu", "sreglu", "clamped_swiglu", "situglu"};
const std::vector<std::string> kLayouts{"stacked",        "swapped",         "interleaved(1)",
                                        "interleaved(8)", "interleaved(32)", "separate"};
const std::vector<std::string> kModes = [] {
  std::vector<std::string> names;
  for (const Mode& mode : kSpecified) names.emplace_back(mode.name);
  return names;
}();
const std::vector<std::string> kSides{"row", "col", "rowcol"};
const std::vector<std::string> kBiases{"-", "bias", "dbias", "bias+dbias"};
const std::string kNorm = "l2normalization";
const std::vector<std::string> kDropouts{"bias_dropout_add", "bias_dropout_add(inference)"};

// Activations: op -> whether it is gated.
std::map<std::string, bool> activations() {
  std::map<std::string, bool> result;
  for (const std::string& f : activation_names()) {
    const bool gated = activation(f).inputs == 2;
    result[f] = result["scaled(" + f + ")"] = gated;
    if (!gated) result["gated(" + f + ")"] = true;
  }
  return result;
}

std::string requantize(const std::string& mode) { return "requantize(" + mode + ")"; }

bool has_dbias(const std::string& bias) { return bias.find("dbias") != std::string::npos; }

// Both lists must follow all rules: the full one, and the one for devices that compile.
class Cases : public testing::TestWithParam<bool> {
 protected:
  static std::vector<Case> made() {
    return GetParam() ? support::cases_of_few_kernels() : support::cases();
  }
  static const std::vector<Case>& list() {
    static std::map<bool, std::vector<Case>> lists;
    const auto [at, added] = lists.try_emplace(GetParam());
    if (added) at->second = made();
    return at->second;
  }
};
INSTANTIATE_TEST_SUITE_P(Lists, Cases, testing::Bool());

TEST(CaseTable, TheRegistryHasTheActivationsOfTheSpecification) {
  const auto names = activation_names();
  for (const auto& [list, inputs] : {std::pair(&kUnary, 1), std::pair(&kGated, 2)})
    for (const std::string& name : *list) {
      ASSERT_NE(std::ranges::find(names, name), names.end()) << name;
      EXPECT_EQ(activation(name).inputs, inputs) << name;
    }
}

TEST(CaseTable, CellsAreAllThatTheSpecificationAllows) {
  std::set<std::string> expected;
  const auto add = [&](const std::string& op, const std::string& rest) {
    EXPECT_TRUE(expected.insert(op + " " + rest).second) << op << " " << rest;
  };
  for (const std::string& mode : kModes)
    for (const std::string& side : kSides) {
      const std::string place = mode + " " + side + " ";
      for (const auto& [op, gated] : activations())
        for (const std::string& layout : gated ? kLayouts : std::vector<std::string>{"-"}) {
          add(op, "fwd " + place + layout + " -");
          add(op, "bwd " + place + layout + " -");
          add(op, "bwd " + place + layout + " dbias");
        }
      add("quantize", "fwd " + place + "- -");
      add("quantize", "bwd " + place + "- dbias");
      if (mode == "none") continue;
      add("dequantize", "fwd " + place + "- -");
      for (const std::string& source : kModes)
        if (source != "none") add(requantize(source), "fwd " + place + "- -");
    }
  for (const std::string direction : {"fwd", "bwd"}) {
    add(kNorm, direction + " none row - -");
    for (const std::string& op : kDropouts) add(op, direction + " none row - -");
  }
  for (const std::string& op : kDropouts) add(op, "bwd none row - dbias");
  const std::vector<std::string> cells = support::cells();
  const std::set<std::string> got(cells.begin(), cells.end());
  EXPECT_EQ(got.size(), cells.size()) << "a cell is listed twice";
  EXPECT_EQ(got, expected);
}

TEST_P(Cases, EveryCellHasACase) {
  std::set<std::string> covered;
  for (const Case& c : list()) covered.insert(c.cell());
  for (const std::string& cell : support::cells()) EXPECT_TRUE(covered.contains(cell)) << cell;
  EXPECT_EQ(covered.size(), support::cells().size());
}

TEST_P(Cases, NoTwoAreEqualAndTheListIsStable) {
  std::set<std::string> seen;
  for (const Case& c : list()) EXPECT_TRUE(seen.insert(c.text()).second) << c.text();
  const std::vector<Case> again = made();
  ASSERT_EQ(again.size(), list().size());
  for (size_t i = 0; i < again.size(); ++i) EXPECT_EQ(again[i].values, list()[i].values);
}

// Parses rows and columns of "7x13+strided", independently of the library.
std::pair<long, long> sizes(const std::string& shape) {
  const size_t x = shape.find('x');
  return {std::stol(shape.substr(0, x)), std::stol(shape.substr(x + 1))};
}

bool is_plain(const std::string& number) { return number[0] != 'e'; }

// Whether a mode supports an option.
bool option_fits(const std::string& number, const std::string& name) {
  const Mode& mode = *std::ranges::find(kSpecified, name, &Mode::name);
  if (number.ends_with("+swizzled")) return mode.e8m0;
  if (number.ends_with("+pow2")) return mode.rule && !mode.pow2;
  if (number.ends_with("+exact")) return mode.rule && mode.pow2;
  return true;
}

// All columns except the shape: (op, direction, mode, orientation, layout, bias), then dtypes.
bool allowed_cell(const Case& c) {
  static const std::map<std::string, bool> kActivations = activations();
  const std::string& op = c[Column::op];
  const std::string& bias = c[Column::bias];
  const bool backward = c[Column::direction] == "bwd";
  const auto found = kActivations.find(op);
  const bool gated = found != kActivations.end() && found->second;
  if (gated == (c[Column::layout] == "-")) return false;
  if (has_dbias(bias) && !backward) return false;
  if (found != kActivations.end()) return true;
  if (op == "quantize") return bias == (backward ? "dbias" : "-");
  if (op == "dequantize" || op.starts_with("requantize"))
    return c[Column::mode] != "none" && !backward && bias == "-";
  if (c[Column::mode] != "none" || c[Column::orientation] != "row") return false;
  if (op == kNorm) return bias == "-";
  return bias == "-" || bias == (backward ? "dbias" : "bias");
}

bool allowed_numbers(const std::string& op, const std::string& mode, const std::string& input,
                     const std::string& output) {
  const bool reads = op == "dequantize" || op.starts_with("requantize");
  static const std::map<std::string, bool> kActivations = activations();
  const bool either = kActivations.contains(op);
  if (!either && is_plain(input) == reads) return false;
  if (either && input.find('+') != std::string::npos) return false;
  if (reads && input.find('+') != std::string::npos &&
      (op == "dequantize" ? mode : op) != (op == "dequantize" ? "mxfp8" : requantize("mxfp8")))
    return false;
  const bool writes = mode != "none" && op != "dequantize";
  return is_plain(output) != writes && option_fits(output, mode);
}

bool allowed_shape(const std::string& layout, const std::string& shape) {
  if (!layout.starts_with("interleaved(")) return true;
  return sizes(shape).second % std::stol(layout.substr(12)) == 0;
}

TEST_P(Cases, AllCasesAreAllowed) {
  for (const Case& c : list()) {
    EXPECT_TRUE(
        allowed_cell(c) &&
        allowed_numbers(c[Column::op], c[Column::mode], c[Column::input], c[Column::output]) &&
        allowed_shape(c[Column::layout], c[Column::shape]))
        << c.text();
    const support::ShapeCase s = support::parse_shape(c[Column::shape]);
    EXPECT_TRUE((std::pair<long, long>(s.rows, s.cols)) == sizes(c[Column::shape]));
    EXPECT_EQ(s.pad, c[Column::shape].find("strided") != std::string::npos ? 3 : 0);
    EXPECT_EQ(s.shift, c[Column::shape].find("unaligned") != std::string::npos ? 1 : 0);
  }
  EXPECT_GE(list().size(), 5000U);
}

TEST_P(Cases, ColumnsHaveTheValuesOfTheSpecification) {
  const auto values = [](Column column) {
    std::set<std::string> result;
    for (const Case& c : list()) result.insert(c[column]);
    return result;
  };
  using Set = std::set<std::string>;
  EXPECT_EQ(values(Column::input), (Set{"f32", "f16", "bf16", "e4m3", "e5m2", "e4m3+swizzled"}));
  EXPECT_EQ(values(Column::output), (Set{"f32", "f16", "bf16", "e4m3", "e5m2", "e4m3+swizzled",
                                         "e4m3+pow2", "e5m2+exact"}));
  EXPECT_EQ(values(Column::mode), Set(kModes.begin(), kModes.end()));
  EXPECT_EQ(values(Column::orientation), Set(kSides.begin(), kSides.end()));
  EXPECT_EQ(values(Column::direction), (Set{"fwd", "bwd"}));
  EXPECT_EQ(values(Column::precision), (Set{"native", "strict"}));
  EXPECT_EQ(values(Column::rounding), (Set{"once", "eager"}));
  EXPECT_EQ(values(Column::bias), (Set{"-", "bias", "dbias", "bias+dbias"}));
  bool no_rows = false, no_cols = false, strided = false, unaligned = false, long_rows = false;
  for (const std::string& s : values(Column::shape)) {
    no_rows |= sizes(s).first == 0;
    no_cols |= sizes(s).second == 0;
    long_rows |= sizes(s).second > 4096;
    strided |= s.find("strided") != std::string::npos;
    unaligned |= s.find("unaligned") != std::string::npos;
  }
  EXPECT_TRUE(no_rows && no_cols && strided && unaligned && long_rows);
}

// Indices of the values of a column, so that pairs are a few bits.
struct Numbering {
  std::array<std::vector<std::string>, kColumns> values;
  [[nodiscard]] size_t of(size_t column, const std::string& v) const {
    const auto& list = values[column];
    return static_cast<size_t>(std::lower_bound(list.begin(), list.end(), v) - list.begin());
  }
};

using Met = std::vector<bool>;
constexpr size_t kMost = 128;  // values per column

size_t pair_index(size_t a, size_t i, size_t b, size_t j) {
  return ((a * kColumns + b) * kMost + i) * kMost + j;
}

TEST_P(Cases, EveryTwoValuesThatMayMeetDoMeet) {
  Numbering number;
  for (size_t c = 0; c < kColumns; ++c) {
    std::set<std::string> seen;
    for (const Case& k : list()) seen.insert(k.values[c]);
    number.values[c].assign(seen.begin(), seen.end());
    ASSERT_LE(seen.size(), kMost);
  }
  Met met(kColumns * kColumns * kMost * kMost), possible = met;
  for (const Case& k : list()) {
    std::array<size_t, kColumns> row{};
    for (size_t c = 0; c < kColumns; ++c) row[c] = number.of(c, k.values[c]);
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b) met[pair_index(a, row[a], b, row[b])] = true;
  }
  // All allowed combinations by brute force. Precision and rounding combine with everything.
  constexpr std::array kOrder{Column::op,          Column::direction, Column::mode,
                              Column::orientation, Column::layout,    Column::bias};
  std::array<size_t, kColumns> row{};
  Case k;
  const auto set = [&](Column c, size_t i) {
    row[static_cast<size_t>(c)] = i;
    k.values[static_cast<size_t>(c)] = number.values[static_cast<size_t>(c)][i];
  };
  const auto count = [&](Column c) { return number.values[static_cast<size_t>(c)].size(); };
  // A shape depends only on the layout, so it is paired with each other column separately.
  constexpr auto kShape = static_cast<size_t>(Column::shape);
  const auto mark_all = [&] {
    for (size_t a = 0; a < kColumns; ++a)
      for (size_t b = a + 1; b < kColumns; ++b)
        if (a != kShape && b != kShape) possible[pair_index(a, row[a], b, row[b])] = true;
    for (size_t s = 0; s < count(Column::shape); ++s) {
      if (!allowed_shape(k[Column::layout], number.values[kShape][s])) continue;
      for (size_t c = 0; c < kColumns; ++c)
        if (c != kShape)
          possible[c < kShape ? pair_index(c, row[c], kShape, s)
                              : pair_index(kShape, s, c, row[c])] = true;
    }
  };
  const std::function<void(size_t)> walk = [&](size_t depth) {
    if (depth < kOrder.size()) {
      for (size_t i = 0; i < count(kOrder[depth]); ++i) set(kOrder[depth], i), walk(depth + 1);
      return;
    }
    if (!allowed_cell(k)) return;
    for (size_t i = 0; i < count(Column::input); ++i)
      for (size_t o = 0; o < count(Column::output); ++o) {
        set(Column::input, i), set(Column::output, o);
        if (!allowed_numbers(k[Column::op], k[Column::mode], k[Column::input], k[Column::output]))
          continue;
        for (size_t q = 0; q < 4; ++q) {
          set(Column::precision, q / 2), set(Column::rounding, q % 2);
          mark_all();
        }
      }
  };
  walk(0);
  size_t missing = 0, expected = 0;
  for (size_t a = 0; a < kColumns; ++a)
    for (size_t b = a + 1; b < kColumns; ++b)
      for (size_t i = 0; i < number.values[a].size(); ++i)
        for (size_t j = 0; j < number.values[b].size(); ++j) {
          if (!possible[pair_index(a, i, b, j)]) continue;
          ++expected;
          if (met[pair_index(a, i, b, j)]) continue;
          if (++missing <= 5)
            ADD_FAILURE() << "never together: " << number.values[a][i] << " and "
                          << number.values[b][j];
        }
  EXPECT_EQ(missing, 0U);
  EXPECT_GT(expected, 5000U);  // checks that the enumeration above is not empty
}

// Cells with the same kernel: the layout of the halves of one tensor is an argument.
TEST(CaseTable, LayoutsShareKernels) {
  const auto kernels = [](const std::vector<Case>& list) {
    std::set<std::string> all;
    for (Case c : list) {
      c.values[static_cast<size_t>(Column::shape)].clear();
      std::string& layout = c.values[static_cast<size_t>(Column::layout)];
      if (layout != "separate") layout.clear();
      all.insert(c.text());
    }
    return all.size();
  };
  EXPECT_LT(2 * kernels(support::cases_of_few_kernels()), kernels(support::cases()));
}

TEST(CaseTable, RandomCasesAreOfFewFormsAndTheSeedDecides) {
  const std::vector<Case> all = support::random_cases(2000, 50, 7);
  ASSERT_EQ(all.size(), 2000U);
  std::set<std::string> forms, shapes, layouts;
  bool no_rows = false, no_cols = false, pad = false, shift = false, parameters = false;
  for (const Case& c : all) {
    EXPECT_EQ(c[Column::precision], "strict");
    EXPECT_TRUE(allowed_shape(c[Column::layout], c[Column::shape])) << c.text();
    const std::string op = c[Column::op].substr(0, c[Column::op].find('='));
    forms.insert(c[Column::direction] + c[Column::input] + c[Column::output] + c[Column::mode] +
                 c[Column::orientation] + c[Column::bias] + c[Column::rounding]);
    shapes.insert(c[Column::shape]);
    layouts.insert(c[Column::layout]);
    const support::ShapeCase s = support::parse_shape(c[Column::shape]);
    no_rows |= s.rows == 0, no_cols |= s.cols == 0;
    pad |= s.pad != 0, shift |= s.shift != 0;
    parameters |= op.size() < c[Column::op].size();
  }
  EXPECT_LE(forms.size(), 50U);
  EXPECT_GT(forms.size(), 30U);
  EXPECT_GT(shapes.size(), 1000U);
  EXPECT_GT(layouts.size(), 10U);
  EXPECT_TRUE(no_rows && no_cols && pad && shift && parameters);
  const std::vector<Case> again = support::random_cases(2000, 50, 7);
  const std::vector<Case> other = support::random_cases(2000, 50, 8);
  EXPECT_EQ(again[1999].text(), all[1999].text());
  EXPECT_NE(other[0].text() + other[1].text(), all[0].text() + all[1].text());
}

}  // namespace
}  // namespace tenon::test
