// The conformance list against what the specification allows, enumerated here again.
#include "cli/cases.h"

#include <map>
#include <set>
#include <string>
#include <tuple>

#include "support.h"

namespace tenon::test {
namespace {

using cli::Case;
using cli::Column;
using cli::kColumns;

// Section 1 of the specification, by hand.
const std::vector<std::string> kUnary{"gelu",      "gelu_erf",   "silu", "qgelu",    "relu",
                                      "srelu",     "sigmoid",    "tanh", "softplus", "mish",
                                      "hardswish", "leaky_relu", "elu"};
const std::vector<std::string> kGated{"glu",    "geglu",  "geglu_erf",      "swiglu", "reglu",
                                      "qgeglu", "sreglu", "clamped_swiglu", "situglu"};
const std::vector<std::string> kLayouts{"stacked",        "swapped",         "interleaved(1)",
                                        "interleaved(8)", "interleaved(32)", "separate"};
const std::string kNorm = "l2normalization";

// Op to whether it is gated.
std::map<std::string, bool> ops() {
  std::map<std::string, bool> result{{kNorm, false}};
  for (const std::string& f : kUnary)
    result[f] = false, result["scaled(" + f + ")"] = false, result["gated(" + f + ")"] = true;
  for (const std::string& f : kGated) result[f] = true, result["scaled(" + f + ")"] = true;
  return result;
}

bool has_dbias(const std::string& bias) { return bias.find("dbias") != std::string::npos; }

const std::vector<Case>& list() {
  static const std::vector<Case> kList = cli::cases();
  return kList;
}

TEST(Cases, TheRegistryIsTheSpecifications) {
  std::set<std::string> expected(kUnary.begin(), kUnary.end());
  expected.insert(kGated.begin(), kGated.end());
  const auto names = activation_names();
  EXPECT_EQ(expected, std::set<std::string>(names.begin(), names.end()));
}

TEST(Cases, CellsAreAllThatTheSpecificationAllows) {
  std::set<std::string> expected;
  for (const auto& [op, gated] : ops())
    for (const std::string direction : {"fwd", "bwd"})
      for (const std::string& layout : gated ? kLayouts : std::vector<std::string>{"-"}) {
        expected.insert(op + " " + direction + " none row " + layout + " -");
        if (direction == "bwd" && op != kNorm)
          expected.insert(op + " " + direction + " none row " + layout + " dbias");
      }
  const std::vector<std::string> cells = cli::cells();
  const std::set<std::string> got(cells.begin(), cells.end());
  EXPECT_EQ(got.size(), cells.size()) << "a cell is listed twice";
  EXPECT_EQ(got, expected);
}

TEST(Cases, EveryCellHasACase) {
  std::set<std::string> covered;
  for (const Case& c : list()) covered.insert(c.cell());
  for (const std::string& cell : cli::cells()) EXPECT_TRUE(covered.contains(cell)) << cell;
  EXPECT_EQ(covered.size(), cli::cells().size());
}

TEST(Cases, NoTwoAreEqualAndTheListIsStable) {
  std::set<std::string> seen;
  for (const Case& c : list()) EXPECT_TRUE(seen.insert(c.text()).second) << c.text();
  const std::vector<Case> again = cli::cases();
  ASSERT_EQ(again.size(), list().size());
  for (size_t i = 0; i < again.size(); ++i) EXPECT_EQ(again[i].values, list()[i].values);
}

// Rows and columns of "7x13+strided", read apart from the library.
std::pair<long, long> sizes(const std::string& shape) {
  const size_t x = shape.find('x');
  return {std::stol(shape.substr(0, x)), std::stol(shape.substr(x + 1))};
}

// Columns that restrict each other; the rest combine freely.
struct Choice {
  std::string op, direction, layout, shape, bias;
};

bool allowed(const Choice& c, const std::map<std::string, bool>& gated) {
  const bool is_gated = gated.at(c.op);
  if (is_gated == (c.layout == "-")) return false;
  if (has_dbias(c.bias) && c.direction == "fwd") return false;
  if (c.op == kNorm && c.bias != "-") return false;
  if (!c.layout.starts_with("interleaved(")) return true;
  return sizes(c.shape).second % std::stol(c.layout.substr(12)) == 0;
}

TEST(Cases, AllCasesAreAllowed) {
  const auto gated = ops();
  for (const Case& c : list()) {
    ASSERT_TRUE(gated.contains(c[Column::op])) << c.text();
    EXPECT_TRUE(allowed(
        {c[Column::op], c[Column::direction], c[Column::layout], c[Column::shape], c[Column::bias]},
        gated))
        << c.text();
    const cli::ShapeCase s = cli::parse_shape(c[Column::shape]);
    EXPECT_TRUE((std::pair<long, long>(s.rows, s.cols)) == sizes(c[Column::shape]));
    EXPECT_EQ(s.strided, c[Column::shape].find("strided") != std::string::npos);
    EXPECT_EQ(s.unaligned, c[Column::shape].find("unaligned") != std::string::npos);
  }
}

TEST(Cases, ColumnsHaveTheValuesOfTheSpecification) {
  const auto values = [](Column column) {
    std::set<std::string> result;
    for (const Case& c : list()) result.insert(c[column]);
    return result;
  };
  using Set = std::set<std::string>;
  EXPECT_EQ(values(Column::input), (Set{"f32", "f16", "bf16"}));
  EXPECT_EQ(values(Column::output), (Set{"f32", "f16", "bf16"}));
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

TEST(Cases, EveryTwoValuesThatMayMeetDoMeet) {
  using Pair = std::tuple<size_t, std::string, size_t, std::string>;
  std::array<std::set<std::string>, kColumns> values;
  std::set<Pair> met;
  for (const Case& c : list())
    for (size_t a = 0; a < kColumns; ++a) {
      values[a].insert(c.values[a]);
      for (size_t b = a + 1; b < kColumns; ++b) met.insert({a, c.values[a], b, c.values[b]});
    }
  // All allowed choices of the columns that restrict each other, by brute force.
  const auto gated = ops();
  const auto at = [&](Column c) -> const std::set<std::string>& {
    return values[static_cast<size_t>(c)];
  };
  std::set<Pair> possible;
  constexpr std::array kBound{Column::op, Column::direction, Column::layout, Column::shape,
                              Column::bias};
  for (const std::string& op : at(Column::op))
    for (const std::string& direction : at(Column::direction))
      for (const std::string& layout : at(Column::layout))
        for (const std::string& shape : at(Column::shape))
          for (const std::string& bias : at(Column::bias)) {
            if (!allowed({op, direction, layout, shape, bias}, gated)) continue;
            const std::array<const std::string*, 5> v{&op, &direction, &layout, &shape, &bias};
            for (size_t i = 0; i < v.size(); ++i)
              for (size_t j = i + 1; j < v.size(); ++j)
                possible.insert(
                    {static_cast<size_t>(kBound[i]), *v[i], static_cast<size_t>(kBound[j]), *v[j]});
          }
  size_t missing = 0, expected = 0;
  for (size_t a = 0; a < kColumns; ++a)
    for (size_t b = a + 1; b < kColumns; ++b) {
      const auto bound = [&](size_t c) {
        return std::find(kBound.begin(), kBound.end(), static_cast<Column>(c)) != kBound.end();
      };
      for (const std::string& va : values[a])
        for (const std::string& vb : values[b]) {
          if (bound(a) && bound(b) && !possible.contains({a, va, b, vb})) continue;
          ++expected;
          if (met.contains({a, va, b, vb})) continue;
          if (++missing <= 5) ADD_FAILURE() << "never together: " << va << " and " << vb;
        }
    }
  EXPECT_EQ(missing, 0U);
  EXPECT_GT(expected, 2500U);  // the enumeration above is not empty by mistake
}

}  // namespace
}  // namespace tenon::test
