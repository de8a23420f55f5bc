// The pages in docs/ against the library: every table marked `checked`, every snippet marked
// `code`, every picture and link. TENON_DOCS_WRITE=1 writes the marked blocks again.
#include <gtest/gtest.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/philox.h"
#include "core/scaling.h"
#include "lower/single_dropout.h"
#include "support/quantize_reference.h"
#include "tenon/tenon.h"
#include "tenon/tenon.hpp"

namespace {

namespace fs = std::filesystem;
namespace ref = tenon::test::ref;
using tenon::DType;
using tenon::Format;
using tenon::Orientation;
using tenon::Scaling;
using tenon::str;
using tenon::Tensor;
using tenon::View;
using tenon::test::kInf;
using tenon::test::kNan;
using tenon::test::Quantised;
using tenon::test::Spec;

// Pages -------------------------------------------------------------------------------------------

const fs::path kDocs = TENON_DOCS_DIR;
const fs::path kRoot = kDocs.parent_path();

std::string read(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) ADD_FAILURE() << file << " cannot be read";
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The block after a marker line: a fence to its end, or a table to the next empty line.
struct Block {
  size_t begin = 0, end = 0;
  std::string text = {};
};
Block block_after(const std::string& page, const std::string& marker) {
  const size_t at = page.find(marker + "\n");
  if (at == std::string::npos) return {};
  Block b{.begin = at + marker.size() + 1};
  const bool fence = page.compare(b.begin, 3, "```") == 0;
  b.end = page.find(fence ? "\n```\n" : "\n\n", b.begin);
  if (b.end == std::string::npos) b.end = page.size() - 1;
  b.end += fence ? 5 : 1;
  b.text = page.substr(b.begin, b.end - b.begin);
  return b;
}

// The page shows this text after its marker.
void expect_block(const fs::path& file, const std::string& marker, const std::string& text) {
  std::string page = read(file);
  const Block b = block_after(page, marker);
  ASSERT_NE(b.end, 0U) << file << " has no line " << marker;
  if (b.text == text) return;
  if (std::getenv("TENON_DOCS_WRITE")) {
    page.replace(b.begin, b.end - b.begin, text);
    std::ofstream(file, std::ios::binary) << page;
    return;
  }
  ADD_FAILURE() << file << ", " << marker << " shows\n" << b.text << "but must show\n" << text;
}

// The page shows the lines of this file between [code: NAME] and [end].
void expect_code(const fs::path& file, const std::string& name, const std::string& language) {
  const std::vector<std::string> lines = lines_of(read(kRoot / "tests" / "docs" / "docs_test.cpp"));
  const auto trimmed = [](const std::string& s) {
    return s.substr(std::min(s.size(), s.find_first_not_of(' ')));
  };
  std::string code = "```" + language + "\n";
  size_t i = 0;
  while (i < lines.size() && trimmed(lines[i]) != str("// [code: ", name, "]")) ++i;
  ASSERT_LT(i, lines.size()) << "no snippet " << name;
  const size_t indent = lines[i].find('/');
  for (++i; i < lines.size() && trimmed(lines[i]) != "// [end]"; ++i)
    code += (lines[i].empty() ? "" : lines[i].substr(indent)) + "\n";
  expect_block(file, str("<!-- code: ", name, " -->"), code + "```\n");
}

// A table of a page, cell by cell.
class Table {
 public:
  explicit Table(std::vector<std::string> head) : width_(head.size()) {
    row(std::move(head));
    std::string line = "|---";
    for (size_t i = 1; i < width_; ++i) line += "|--:";
    text_ += line + "|\n";
  }
  void row(const std::vector<std::string>& cells) {
    EXPECT_EQ(cells.size(), width_);
    for (const std::string& c : cells) text_ += "| " + c + (c.empty() ? "" : " ");
    text_ += "|\n";
  }
  void expect_in(const fs::path& file, const std::string& name) const {
    expect_block(file, str("<!-- checked: ", name, " -->"), text_);
  }

 private:
  size_t width_;
  std::string text_;
};

// Numbers -----------------------------------------------------------------------------------------

// The shortest text that gives this fp32 number again.
std::string text(float v) {
  if (v != v) return "NaN";
  if (std::isinf(v)) return v < 0 ? "−∞" : "∞";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, std::fabs(v)).ptr;
  return (std::signbit(v) ? "−" : "") + std::string(buffer, end);
}
std::string text(int64_t v) { return std::to_string(v); }
std::string hex(uint32_t code, int digits = 2) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "%0*X", digits, code);
  return buffer;
}
std::string codes_text(const uint8_t* codes, int64_t n) {
  std::string t;
  for (int64_t i = 0; i < n; ++i) t += (i ? " " : "") + hex(codes[i]);
  return "`" + t + "`";
}
std::string floats_text(const std::vector<float>& v) {
  std::string t;
  for (size_t i = 0; i < v.size(); ++i) t += (i ? ", " : "") + text(v[i]);
  return t;
}
std::string shape_text(tenon::Shape s) { return str("[", s.rows, ", ", s.cols, "]"); }
std::string place(int64_t r, int64_t c) { return str("(", r, ", ", c, ")"); }

View f32(const float* p, int64_t rows, int64_t cols) {
  return tenon::matrix(p, DType::f32, rows, cols);
}

std::string note(float x, float scaled, uint8_t code, DType d) {
  if (x != x) return "NaN";
  if (std::isinf(x)) return "not finite";
  if (std::fabs(scaled) > (d == DType::e4m3 ? 464 : 61440)) return "saturated";
  return x != 0 && (code & 0x7f) == 0 ? "flushed to zero" : "";
}

// A tensor of one row in memory, quantised and read again, and held against the reference.
struct Quantise {
  std::vector<uint8_t> codes, scales;
  std::vector<float> back;
  float amax = 0, multiplier = 0, scale_inv = 0, health[3] = {};
  Quantise(const Format& f, const std::vector<float>& x, float delayed = 1) {
    const auto n = static_cast<int64_t>(x.size());
    const tenon::ScalingInfo& mode = tenon::info(f.scaling);
    const tenon::Shape s = f.scale_shape(1, n, Orientation::rowwise);
    codes.resize(x.size());
    back.resize(x.size());
    scales.resize(static_cast<size_t>(s.rows * s.cols * tenon::info(mode.scale).bytes));
    Tensor y(f, {tenon::matrix(codes.data(), f.dtype, 1, n),
                 tenon::matrix(scales.data(), mode.scale, s.rows, s.cols)});
    if (f.scaling == Scaling::delayed) y.scale = f32(&delayed, 1, 1);
    y.health = f32(health, 1, 3);
    tenon::quantize({.x = f32(x.data(), 1, n), .y = y, .amax = f32(&amax, 1, 1)});
    tenon::dequantize(y, f32(back.data(), 1, n));
    Spec spec{.dtype = f.dtype, .mode = f.scaling, .eps = f.eps, .pow2 = f.power_of_two};
    spec.scale = delayed;
    const Quantised q = quantise_ref(spec, x, 1, n);
    EXPECT_EQ(q.row.data, codes);
    EXPECT_EQ(q.row.scales, scales);
    EXPECT_EQ(q.amax, tenon::test::bits(amax));
    if (f.scaling == Scaling::mxfp8) {
      multiplier = ref::e8m0_multiplier(scales[0]);
      scale_inv = tenon::decode(DType::e8m0, scales[0]);
    } else {
      multiplier = f.scaling == Scaling::delayed
                       ? delayed
                       : ref::multiplier(q.amax, f.dtype, f.eps, f.powers());
      std::memcpy(&scale_inv, scales.data(), sizeof scale_inv);
    }
  }
};

// What one block makes of special values; the blocks are the tensors of the list.
void expect_specials(const fs::path& file, const std::string& name, const Format& f,
                     const std::vector<std::vector<float>>& list, float delayed = 1) {
  const bool mx = f.scaling == Scaling::mxfp8;
  Table t({"x", "amax", mx ? "e" : "scale", mx ? "2^(e−127)" : "scale_inv", "codes", "dequantised",
           "health"});
  for (const auto& x : list) {
    const Quantise q(f, x, delayed);
    t.row({floats_text(x), text(q.amax), mx ? text(int64_t{q.scales[0]}) : text(q.multiplier),
           text(q.scale_inv), codes_text(q.codes.data(), static_cast<int64_t>(x.size())),
           floats_text(q.back), floats_text({q.health[0], q.health[1], q.health[2]})});
  }
  t.expect_in(file, name);
}

void expect_shapes(const fs::path& file, const std::string& name, Scaling s) {
  const Format f{.dtype = DType::e4m3, .scaling = s};
  Table t(
      {"M x K", "rowwise data", "rowwise scale_inv", "columnwise data", "columnwise scale_inv"});
  constexpr tenon::Shape kShapes[] = {{1, 1}, {128, 128}, {200, 300}, {4096, 14336}, {0, 300}};
  for (const auto& [m, k] : kShapes) {
    std::vector<std::string> cells{str(m, " x ", k)};
    for (const auto o : {Orientation::rowwise, Orientation::columnwise}) {
      const ref::Size data = ref::data_size(s, m, k, o == Orientation::columnwise);
      const ref::Size scales = ref::scale_size(s, m, k, o == Orientation::columnwise);
      EXPECT_EQ(f.data_shape(m, k, o), (tenon::Shape{data.rows, data.cols}));
      EXPECT_EQ(f.scale_shape(m, k, o), (tenon::Shape{scales.rows, scales.cols}));
      cells.push_back(shape_text(f.data_shape(m, k, o)));
      cells.push_back(shape_text(f.scale_shape(m, k, o)));
    }
    t.row(cells);
  }
  t.expect_in(file, name);
}

// The elements of a sparse tensor that are not 0, in one encoding; all others must be 0.
void expect_elements(const fs::path& file, const std::string& name, const Tensor& y, Orientation o,
                     const std::vector<float>& x) {
  const Format& f = y.format;
  const auto [m, k] = y.shape();
  const bool column = o == Orientation::columnwise;
  const bool mx = f.scaling == Scaling::mxfp8;
  const tenon::Encoding& e = y.encoding(o);
  const Spec spec{.dtype = f.dtype,
                  .mode = f.scaling,
                  .row = !column,
                  .column = column,
                  .eps = f.eps,
                  .pow2 = f.power_of_two};
  const Quantised q = quantise_ref(spec, x, m, k);
  const tenon::test::SideBytes& expected = column ? q.column : q.row;
  EXPECT_EQ(std::memcmp(e.data.data, expected.data.data(), expected.data.size()), 0);
  EXPECT_EQ(std::memcmp(e.scale_inv.data, expected.scales.data(), expected.scales.size()), 0);
  std::vector<float> back(x.size());
  tenon::dequantize(column ? Tensor(f, {}, e) : Tensor(f, e), f32(back.data(), m, k));

  const tenon::Blocks blocks = f.blocks(o);
  Table t({"element", "x", "amax of its block", "scale_inv at", mx ? "e" : "scale_inv",
           mx ? "scale" : "scale", "x·scale", "code", "dequantised", ""});
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < k; ++c) {
      const float v = x[static_cast<size_t>(r * k + c)];
      const int64_t at = column && tenon::info(f.scaling).transposes ? c * m + r : r * k + c;
      const uint8_t code = static_cast<const uint8_t*>(e.data.data)[at];
      if (v == 0) {
        EXPECT_EQ(code, 0) << place(r, c);
        continue;
      }
      const int64_t i = r / blocks.rows, j = c / blocks.cols;
      uint32_t amax = 0;
      for (int64_t a = i * blocks.rows; a < std::min(m, (i + 1) * blocks.rows); ++a)
        for (int64_t b = j * blocks.cols; b < std::min(k, (j + 1) * blocks.cols); ++b)
          amax = std::max(amax, tenon::test::bits(std::fabs(x[static_cast<size_t>(a * k + b)])));
      const tenon::Scale s = tenon::scale_of(amax, f);
      const int64_t offset =
          tenon::scale_offset(f, o, i, j, {e.scale_inv.rows, e.scale_inv.cols}, e.scale_inv.stride);
      std::string inverse;
      if (mx) {
        const uint8_t stored = static_cast<const uint8_t*>(e.scale_inv.data)[offset];
        EXPECT_EQ(stored, s.inverse);
        inverse = text(int64_t{stored});
      } else {
        const float stored = static_cast<const float*>(e.scale_inv.data)[offset];
        EXPECT_EQ(tenon::test::bits(stored), s.inverse);
        inverse = text(stored);
      }
      const float scaled = v * s.multiplier;
      const int64_t width = e.scale_inv.cols;
      t.row({place(r, c), text(v), text(tenon::test::from_bits(amax)),
             str("[", offset / width, ", ", offset % width, "]"), inverse, text(s.multiplier),
             text(scaled), "`" + hex(code) + "`", text(back[static_cast<size_t>(r * k + c)]),
             note(v, scaled, code, f.dtype)});
    }
  t.expect_in(file, name);
}

// Examples ----------------------------------------------------------------------------------------

TEST(Docs, Formats) {
  const fs::path file = kDocs / "scaling.md";
  Table t({"format", "largest", "least normal", "least subnormal", "flushed at and below",
           "codes of ±largest", "NaN"});
  for (const DType d : tenon::test::kFp8) {
    const tenon::DTypeInfo& i = tenon::info(d);
    const float least = tenon::decode(d, 1);
    EXPECT_EQ(tenon::encode(d, least / 2), 0U);
    EXPECT_EQ(tenon::encode(d, std::nextafter(least / 2, 1.0F)), 1U);
    EXPECT_EQ(static_cast<double>(i.max), ref::fp8_max(d));
    t.row({"`" + std::string(i.name) + "`", text(i.max),
           text(tenon::decode(d, 1U << i.mantissa_bits)), text(least), text(least / 2),
           "`" + hex(tenon::encode(d, kInf)) + "` `" + hex(tenon::encode(d, -kInf)) + "`",
           "`" + hex(tenon::encode(d, kNan)) + "`"});
  }
  t.expect_in(file, "formats");

  Table casts({"x", "e4m3", "as a number", "e5m2", "as a number"});
  for (const float v : {1.0F, 1.06F, 448.0F, 464.0F, 1e6F, kInf, -kInf, kNan, 0.0F, -0.0F, 0x1p-9F,
                        0x1p-10F, 1e-9F}) {
    std::vector<std::string> cells{text(v)};
    for (const DType d : tenon::test::kFp8) {
      const uint32_t code = tenon::encode(d, v);
      EXPECT_EQ(code, ref::fp8_code(ref::fp8_steps(d), v));
      cells.insert(cells.end(), {"`" + hex(code) + "`", text(tenon::decode(d, code))});
    }
    casts.row(cells);
  }
  casts.expect_in(file, "casts");
}

TEST(Docs, Compare) {
  const int64_t m = 2, k = 256;
  // [code: compare]
  std::vector<float> x(2 * 256);  // 2 x 256, zero, except
  x[0] = 0.000001F;               // (0, 0)
  x[64] = 0.0001F;                // (0, 64)
  x[100] = 1;                     // (0, 100)
  x[200] = 300;                   // (0, 200)
  x[256] = 50;                    // (1, 0)
  // [end]
  const fs::path file = kDocs / "scaling.md";
  expect_code(file, "compare", "cpp");
  const std::array<size_t, 5> at{0, 64, 100, 200, 256};
  Table t({"mode", "(0, 0)", "(0, 64)", "(0, 100)", "(0, 200)", "(1, 0)", "flushed to zero",
           "bytes of scales"});
  std::vector<std::string> given{"x"};
  for (const size_t i : at) given.push_back(text(x[i]));
  given.insert(given.end(), {"", ""});
  t.row(given);
  for (const Scaling mode : tenon::test::kModes) {
    const Format f{.dtype = DType::e4m3, .scaling = mode};
    const tenon::Shape s = f.scale_shape(m, k, Orientation::rowwise);
    const DType scale_type = tenon::info(mode).scale;
    std::vector<uint8_t> codes(x.size());
    std::vector<float> scales(static_cast<size_t>(s.rows * s.cols)), back(x.size());
    float warm = 448.0F / 300.0F, health[3] = {};
    Tensor y(f, {tenon::matrix(codes.data(), f.dtype, m, k),
                 tenon::matrix(scales.data(), scale_type, s.rows, s.cols)});
    if (mode == Scaling::delayed) y.scale = f32(&warm, 1, 1);
    y.health = f32(health, 1, 3);
    tenon::quantize(f32(x.data(), m, k), y);
    tenon::dequantize(y, f32(back.data(), m, k));
    const Spec spec{.mode = mode, .scale = warm};
    const Quantised q = quantise_ref(spec, x, m, k);
    EXPECT_EQ(q.row.data, codes);
    EXPECT_EQ(dequantise_ref(spec, q, m, k, false), back);
    EXPECT_EQ(health[1], static_cast<float>(q.flushed));
    const tenon::Shape used = f.blocks(Orientation::rowwise).count(m, k);
    std::vector<std::string> cells{"`" + std::string(tenon::info(mode).name) + "`"};
    for (const size_t i : at) cells.push_back(text(back[i]));
    cells.push_back(text(health[1]));
    cells.push_back(text(used.rows * used.cols * tenon::info(scale_type).bytes));
    t.row(cells);
  }
  t.expect_in(file, "compare");
}

TEST(Docs, EncodedInputs) {
  // [code: requantize]
  constexpr int64_t m = 4, k = 256;
  const auto e4m3 = tenon::DType::e4m3;
  const tenon::Format blocks{.dtype = e4m3, .scaling = tenon::Scaling::block1x128};
  const tenon::Format mx{.dtype = e4m3, .scaling = tenon::Scaling::mxfp8};
  std::vector<float> x(m * k, 1.5F), y(m * k), dx(m * k);
  std::vector<uint8_t> a(m * k), b(m * k), b_scales(128 * 8);
  std::vector<float> a_scales(2 * 4);
  const auto f32 = [&](std::vector<float>& v) {
    return tenon::matrix(v.data(), tenon::DType::f32, m, k);
  };
  const tenon::Tensor first(blocks, {tenon::matrix(a.data(), e4m3, m, k),
                                     tenon::matrix(a_scales.data(), tenon::DType::f32, 2, 4)});
  const tenon::Tensor second(mx, {tenon::matrix(b.data(), e4m3, m, k),
                                  tenon::matrix(b_scales.data(), tenon::DType::e8m0, 128, 8)});
  tenon::quantize(f32(x), first);     // f32 to block1x128
  tenon::quantize(first, second);     // block1x128 to mxfp8, one pass, no f32 copy
  tenon::dequantize(second, f32(y));  // mxfp8 to f32
  const auto gelu = tenon::activation("gelu");
  tenon::forward(gelu, {.x = first, .y = f32(y)});  // reads the encoded input
  tenon::backward(gelu, {.grad = second, .x = first, .dx = f32(dx)});
  // [end]
  expect_code(kDocs / "scaling.md", "requantize", "cpp");
  std::vector<float> value(1), slope(1), x1{1.5F};
  tenon::forward(gelu, {.x = ::f32(x1.data(), 1, 1), .y = ::f32(value.data(), 1, 1)});
  tenon::backward(gelu, {.grad = ::f32(x1.data(), 1, 1),
                         .x = ::f32(x1.data(), 1, 1),
                         .dx = ::f32(slope.data(), 1, 1)});
  for (size_t i = 0; i < x.size(); ++i) {  // 1.5 is a number of every encoding
    ASSERT_EQ(y[i], value[0]);
    ASSERT_EQ(dx[i], slope[0]);
  }
}

TEST(Docs, Current) {
  const fs::path file = kDocs / "scaling_current.md";
  // [code: current]
  const std::vector<float> x{0.1F, -0.5F, 2, 6, -3, 0.25F, 0.0001F, 0.00001F};  // 2 x 4
  std::vector<uint8_t> row(8), column(8);
  std::vector<float> back(8);
  float scale_inv = 0, amax = 0, health[3];
  const auto f32 = [](const float* p, int64_t rows, int64_t cols) {
    return tenon::matrix(p, tenon::DType::f32, rows, cols);
  };
  tenon::Tensor y({.dtype = tenon::DType::e4m3, .scaling = tenon::Scaling::current},
                  {tenon::matrix(row.data(), tenon::DType::e4m3, 2, 4), f32(&scale_inv, 1, 1)},
                  {tenon::matrix(column.data(), tenon::DType::e4m3, 4, 2)});
  y.amax = f32(&amax, 1, 1);
  y.health = f32(health, 1, 3);
  tenon::quantize(f32(x.data(), 2, 4), y);
  tenon::dequantize(y, f32(back.data(), 2, 4));
  // [end]
  expect_code(file, "current", "cpp");
  const Spec spec{.mode = Scaling::current, .column = true};
  const Quantised q = quantise_ref(spec, x, 2, 4);
  EXPECT_EQ(q.row.data, row);
  EXPECT_EQ(q.column.data, column);
  EXPECT_EQ(q.amax, tenon::test::bits(amax));
  EXPECT_EQ(dequantise_ref(spec, q, 2, 4, false), back);
  const float scale = ref::multiplier(q.amax, DType::e4m3, 0, false);
  EXPECT_EQ(scale_inv, ref::quotient(1, scale));

  Table whole({"amax", "scale = fl32(448/amax)", "scale_inv = fl32(1/scale)", "rowwise data [2, 4]",
               "columnwise data [4, 2]", "health"});
  whole.row({text(amax), text(scale), text(scale_inv), codes_text(row.data(), 8),
             codes_text(column.data(), 8), floats_text({health[0], health[1], health[2]})});
  whole.expect_in(file, "current");

  Table each({"element", "x", "x·scale", "code", "code as a number", "dequantised", ""});
  for (int64_t i = 0; i < 8; ++i) {
    const auto n = static_cast<size_t>(i);
    each.row({place(i / 4, i % 4), text(x[n]), text(x[n] * scale), "`" + hex(row[n]) + "`",
              text(tenon::decode(DType::e4m3, row[n])), text(back[n]),
              note(x[n], x[n] * scale, row[n], DType::e4m3)});
  }
  each.expect_in(file, "current_elements");

  // [code: shards]
  float group = 0;
  for (int rank = 0; rank < 2; ++rank) {  // each rank holds one row
    float own = 0;
    tenon::quantize({.x = f32(x.data() + 4 * rank, 1, 4), .amax = f32(&own, 1, 1)});
    group = std::max(group, own);  // an all-reduce by maximum of the bits
  }
  std::vector<uint8_t> sharded(8);
  for (int rank = 0; rank < 2; ++rank) {
    tenon::Tensor part({.dtype = tenon::DType::e4m3, .scaling = tenon::Scaling::current},
                       {tenon::matrix(sharded.data() + 4 * rank, tenon::DType::e4m3, 1, 4),
                        f32(&scale_inv, 1, 1)});
    part.amax = f32(&group, 1, 1);
    part.amax_given = true;
    tenon::quantize(f32(x.data() + 4 * rank, 1, 4), part);
  }
  // [end]
  expect_code(file, "shards", "cpp");
  EXPECT_EQ(sharded, row);
  Table shards({"rank", "own amax", "group amax", "codes", "codes with its own amax"});
  for (int64_t r = 0; r < 2; ++r) {
    const std::vector<float> part(x.begin() + 4 * r, x.begin() + 4 * r + 4);
    const Quantise alone({.dtype = DType::e4m3, .scaling = Scaling::current}, part);
    shards.row({text(r), text(alone.amax), text(group), codes_text(sharded.data() + 4 * r, 4),
                codes_text(alone.codes.data(), 4)});
  }
  shards.expect_in(file, "shards");
}

TEST(Docs, CurrentSpecials) {
  const fs::path file = kDocs / "scaling_current.md";
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::current};
  expect_specials(
      file, "current_specials", f,
      {{0, -0.0F}, {1, kNan, 1000}, {1, kInf, -1000}, {3.3F, 1}, {1, 1e-7F}, {1e-40F, 0}});
  Format eps = f;
  eps.eps = 0.001F;
  expect_specials(file, "current_eps", eps, {{0, -0.0F}, {1e-6F, 2e-5F}, {1, 1e-6F}});
  Format powers = f;
  powers.power_of_two = true;
  expect_specials(file, "current_powers", powers, {{6, 1}, {7, 1}, {7.1F, 1}});
  expect_shapes(file, "current_shapes", Scaling::current);
}

TEST(Docs, Delayed) {
  const fs::path file = kDocs / "scaling_delayed.md";
  // [code: delayed]
  float history[3] = {0, 0, 0}, scale = 1, scale_inv = 0, back[4];  // L = 3, one tensor
  uint8_t codes[4];
  const auto f32 = [](const float* p, int64_t rows, int64_t cols) {
    return tenon::matrix(p, tenon::DType::f32, rows, cols);
  };
  tenon::Tensor y({.dtype = tenon::DType::e4m3, .scaling = tenon::Scaling::delayed},
                  {tenon::matrix(codes, tenon::DType::e4m3, 1, 4), f32(&scale_inv, 1, 1)});
  y.scale = f32(&scale, 1, 1);  // read
  y.amax = f32(history, 1, 1);  // slot 0, joined by maximum
  const auto step = [&](const float* x) {
    tenon::quantize(f32(x, 1, 4), y);
    tenon::dequantize(y, f32(back, 1, 4));
    tenon::update({.history = f32(history, 3, 1), .scale = f32(&scale, 1, 1)});
  };
  // [end]
  expect_code(file, "delayed", "cpp");
  const std::vector<std::vector<float>> steps{{0.5F, -2, 1, 0.001F},
                                              {1, -8, 0.5F, 2},
                                              {3, 1, -1, 0.25F},
                                              {1, 0.5F, 0, -1},
                                              {0.5F, 1, 1, 0}};
  Table roll({"step", "scale used", "amax found = slot 0", "history after the update",
              "largest of the window", "scale after the update"});
  Table each({"x", "x·scale", "code", "code as a number", "dequantised", ""});
  for (size_t s = 0; s < steps.size(); ++s) {
    const float used = scale;
    std::array<float, 3> old{history[0], history[1], history[2]};
    step(steps[s].data());
    // The specification's text once more.
    const Spec spec{.mode = Scaling::delayed, .scale = used};
    const Quantised q = quantise_ref(spec, steps[s], 1, 4);
    EXPECT_EQ(std::memcmp(codes, q.row.data.data(), 4), 0);
    const float last = tenon::test::from_bits(q.amax);
    const float most = std::max({last, old[1], old[2]});
    EXPECT_EQ(history[0], 0);
    EXPECT_EQ(history[1], old[2]);
    EXPECT_EQ(history[2], last);
    EXPECT_EQ(scale, ref::quotient(448, most));
    roll.row({text(static_cast<int64_t>(s) + 1), text(used), text(last),
              floats_text({history[0], history[1], history[2]}), text(most), text(scale)});
    if (s != 1) continue;
    EXPECT_EQ(scale_inv, ref::quotient(1, used));
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(back[i], ref::product(tenon::decode(DType::e4m3, codes[i]), scale_inv));
      each.row({text(steps[s][i]), text(steps[s][i] * used), "`" + hex(codes[i]) + "`",
                text(tenon::decode(DType::e4m3, codes[i])), text(back[i]),
                note(steps[s][i], steps[s][i] * used, codes[i], DType::e4m3)});
    }
  }
  roll.expect_in(file, "delayed_history");
  each.expect_in(file, "delayed_elements");
}

TEST(Docs, DelayedSpecials) {
  const fs::path file = kDocs / "scaling_delayed.md";
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::delayed};
  expect_specials(file, "delayed_specials", f,
                  {{0, -0.0F}, {1, kNan}, {1, kInf, -kInf}, {3, -100}, {1, 1e-6F}}, 224);
  expect_shapes(file, "delayed_shapes", Scaling::delayed);

  Table t({"history before", "margin", "rule", "scale before", "history after", "scale after"});
  struct Case {
    std::vector<float> history;
    int margin;
    bool most_recent;
    float scale;
  };
  const Case cases[] = {{{2, 7, 1}, 0, false, 5},       {{2, 7, 1}, 0, true, 5},
                        {{2, 7, 1}, 2, false, 5},       {{0, 7, 1}, 0, false, 5},
                        {{kNan, 4, 1}, 0, false, 5},    {{kInf, 4, 1}, 0, true, 5},
                        {{kInf, 0, kNan}, 0, false, 5}, {{1e-38F, 0, 0}, 0, false, 5}};
  for (const Case& c : cases) {
    std::vector<float> h = c.history;
    float scale = c.scale;
    tenon::update({.history = f32(h.data(), 3, 1),
                   .scale = f32(&scale, 1, 1),
                   .margin = c.margin,
                   .most_recent = c.most_recent});
    t.row({floats_text(c.history), std::to_string(c.margin), c.most_recent ? "most recent" : "max",
           text(c.scale), floats_text(h), text(scale)});
  }
  t.expect_in(file, "delayed_updates");
}

TEST(Docs, Mxfp8) {
  const fs::path file = kDocs / "scaling_mxfp8.md";
  // [code: mxfp8]
  constexpr int64_t m = 33, k = 34;
  std::vector<float> x(m * k);                                         // zero, except
  x[0] = 1, x[1] = -0.3F, x[31] = 500, x[32] = 0.02F, x[33] = -0.01F;  // row 0
  x[k] = 3, x[32 * k] = 0.001F;                                        // (1, 0) and (32, 0)
  const auto e4m3 = tenon::DType::e4m3, e8m0 = tenon::DType::e8m0;
  std::vector<uint8_t> row(m * k), column(m * k), row_scales(128 * 4), column_scales(4 * 128);
  const tenon::Tensor y(
      {.dtype = e4m3, .scaling = tenon::Scaling::mxfp8},
      {tenon::matrix(row.data(), e4m3, m, k), tenon::matrix(row_scales.data(), e8m0, 128, 4)},
      {tenon::matrix(column.data(), e4m3, m, k),
       tenon::matrix(column_scales.data(), e8m0, 4, 128)});
  tenon::quantize(tenon::matrix(x.data(), tenon::DType::f32, m, k), y);
  // [end]
  expect_code(file, "mxfp8", "cpp");
  expect_elements(file, "mxfp8_rowwise", y, Orientation::rowwise, x);
  expect_elements(file, "mxfp8_columnwise", y, Orientation::columnwise, x);
  expect_shapes(file, "mxfp8_shapes", Scaling::mxfp8);
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::mxfp8};
  expect_specials(file, "mxfp8_specials", f,
                  {{0, -0.0F},
                   {1, kNan, 1000},
                   {1, kInf, -kInf},
                   {448, 1},
                   {449, 1},
                   {1, 1e-6F},
                   {1e-40F, 1e-38F},
                   {3.3e38F, 1e37F}});

  Table rule({"amax", "p = amax·fl32(1/448)", "E", "m", "e", "2^(e−127)", "amax·2^(127−e)"});
  for (const float amax : {1.0F, 3.0F, 448.0F, 449.0F, 500.0F, 0.0F, 1e-38F, 3e38F}) {
    const float p = amax * (1.0F / 448.0F);
    const uint32_t b = tenon::test::bits(p);
    const uint8_t e = ref::e8m0(tenon::test::bits(amax), DType::e4m3);
    EXPECT_EQ(tenon::scale_e8m0(tenon::test::bits(amax), DType::e4m3).inverse, e);
    rule.row({text(amax), text(p), text(int64_t{b >> 23}), "`" + hex(b & 0x7fffffU, 6) + "`",
              text(int64_t{e}), text(ref::e8m0_value(e)), text(amax * ref::e8m0_multiplier(e))});
  }
  rule.expect_in(file, "mxfp8_rule");

  Format swizzled = f;
  swizzled.swizzled = true;
  Table order({"row i", "block j", "plain offset", "swizzled offset"});
  const tenon::Shape s = f.scale_shape(256, 256, Orientation::rowwise);
  for (const auto& [i, j] : {std::pair{0, 0},
                             {0, 3},
                             {0, 4},
                             {1, 0},
                             {31, 3},
                             {32, 0},
                             {64, 0},
                             {96, 0},
                             {127, 7},
                             {128, 0},
                             {255, 7}}) {
    const int64_t a = scale_offset(f, Orientation::rowwise, i, j, s, s.cols);
    const int64_t b = scale_offset(swizzled, Orientation::rowwise, i, j, s, s.cols);
    const Spec spec{.mode = Scaling::mxfp8, .swizzled = true};
    EXPECT_EQ(b, ref::scale_place(spec, false, i, j, {s.rows, s.cols}));
    order.row({std::to_string(i), std::to_string(j), text(a), text(b)});
  }
  order.expect_in(file, "mxfp8_swizzled");
}

TEST(Docs, Block1x128) {
  const fs::path file = kDocs / "scaling_block1x128.md";
  // [code: block1x128]
  constexpr int64_t m = 130, k = 130;
  std::vector<float> x(m * k);                                            // zero, except
  x[0] = 1, x[1] = -0.3F, x[127] = 100, x[128] = 0.02F, x[129] = -0.01F;  // row 0
  x[k] = 3, x[129 * k] = 0.001F;                                          // (1, 0) and (129, 0)
  const auto e4m3 = tenon::DType::e4m3, f32 = tenon::DType::f32;
  std::vector<uint8_t> row(m * k), column(k * m);
  std::vector<float> row_scales(2 * 132), column_scales(2 * 132);
  const tenon::Tensor y(
      {.dtype = e4m3, .scaling = tenon::Scaling::block1x128},
      {tenon::matrix(row.data(), e4m3, m, k), tenon::matrix(row_scales.data(), f32, 2, 132)},
      {tenon::matrix(column.data(), e4m3, k, m), tenon::matrix(column_scales.data(), f32, 2, 132)});
  tenon::quantize(tenon::matrix(x.data(), f32, m, k), y);
  // [end]
  expect_code(file, "block1x128", "cpp");
  expect_elements(file, "block1x128_rowwise", y, Orientation::rowwise, x);
  expect_elements(file, "block1x128_columnwise", y, Orientation::columnwise, x);
  for (const size_t i : {130, 131, 262, 263})
    EXPECT_EQ(row_scales[i] + column_scales[i], 0);  // padding
  expect_shapes(file, "block1x128_shapes", Scaling::block1x128);
  const std::vector<std::vector<float>> specials{{0, -0.0F},      {1, kNan, 1000}, {1, kInf, -1000},
                                                 {1, 1e-6F},      {448, 1},        {449, 1},
                                                 {1e-40F, 1e-39F}};
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::block1x128};
  expect_specials(file, "block1x128_specials", f, specials);
  Format exact = f;
  exact.power_of_two = false;
  expect_specials(file, "block1x128_exact", exact, {{449, 1}, {3, 0.1F}});
}

TEST(Docs, Block128x128) {
  const fs::path file = kDocs / "scaling_block128x128.md";
  // [code: block128x128]
  constexpr int64_t m = 130, k = 260;
  std::vector<float> x(m * k);          // zero, except
  x[0] = 1, x[127 * k + 127] = 100;     // block (0, 0)
  x[128] = 0.02F, x[259] = -0.01F;      // blocks (0, 1) and (0, 2)
  x[128 * k] = 3, x[129 * k] = 0.001F;  // block (1, 0)
  const auto e4m3 = tenon::DType::e4m3, f32 = tenon::DType::f32;
  std::vector<uint8_t> row(m * k), column(k * m);
  std::vector<float> row_scales(2 * 4), column_scales(3 * 4);
  const tenon::Tensor y(
      {.dtype = e4m3, .scaling = tenon::Scaling::block128x128},
      {tenon::matrix(row.data(), e4m3, m, k), tenon::matrix(row_scales.data(), f32, 2, 4)},
      {tenon::matrix(column.data(), e4m3, k, m), tenon::matrix(column_scales.data(), f32, 3, 4)});
  tenon::quantize(tenon::matrix(x.data(), f32, m, k), y);
  // [end]
  expect_code(file, "block128x128", "cpp");
  expect_elements(file, "block128x128_rowwise", y, Orientation::rowwise, x);
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < k; ++c)
      ASSERT_EQ(row[static_cast<size_t>(r * k + c)], column[static_cast<size_t>(c * m + r)]);
  for (const auto& [name, scales, rows] : {std::tuple{"block128x128_scales", &row_scales, 2},
                                           {"block128x128_transposed", &column_scales, 3}}) {
    Table t({"scale_inv", "0", "1", "2", "3"});
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<std::string> cells{"row " + std::to_string(r)};
      for (int64_t c = 0; c < 4; ++c)
        cells.push_back(text((*scales)[static_cast<size_t>(r * 4 + c)]));
      t.row(cells);
    }
    t.expect_in(file, name);
  }
  const Spec spec{.mode = Scaling::block128x128, .column = true};
  const Quantised q = quantise_ref(spec, x, m, k);
  EXPECT_EQ(std::memcmp(column_scales.data(), q.column.scales.data(), q.column.scales.size()), 0);
  expect_shapes(file, "block128x128_shapes", Scaling::block128x128);
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::block128x128};
  expect_specials(file, "block128x128_specials", f,
                  {{0, -0.0F}, {1, kNan, 1000}, {1, kInf, -1000}, {100, 0.0001F}});
}

TEST(Docs, Dropout) {
  const fs::path file = kDocs / "dropout.md";
  // [code: dropout]
  const std::vector<float> x{1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7, -8};  // 2 x 8
  const std::vector<float> bias(8, 0.5F), residual(16, 100), grad(16, 1);
  std::vector<float> y(16), dx(16), dbias(8);
  const auto f32 = [](const std::vector<float>& v, int64_t rows) {
    return tenon::matrix(v.data(), tenon::DType::f32, rows, static_cast<int64_t>(v.size()) / rows);
  };
  tenon::Random random{.seed = 2024, .columns = 8};
  const tenon::Random before = random;
  tenon::bias_dropout_add({.x = f32(x, 2),
                           .bias = f32(bias, 1),
                           .residual = f32(residual, 2),
                           .y = f32(y, 2),
                           .p = 0.25,
                           .random = &random});
  tenon::bias_dropout_add_backward({.grad = f32(grad, 2),
                                    .dx = f32(dx, 2),
                                    .dbias = f32(dbias, 1),
                                    .p = 0.25,
                                    .random = &before});
  // [end]
  expect_code(file, "dropout", "cpp");
  EXPECT_EQ(random.offset, 1U);
  const tenon::DropoutRule rule = tenon::dropout_rule(0.25);
  Table words({"group i÷8", "counter", "w[0]", "w[1]", "w[2]", "w[3]"});
  Table each({"element", "i", "u16", "kept", "x + bias", "dropped and scaled", "y", "dx"});
  for (uint64_t g = 0; g < 2; ++g) {
    const tenon::RandomWords w = tenon::philox(2024, g, 0);
    words.row({std::to_string(g), str("(", g, ", 0, 0, 0)"), "`" + hex(w.w[0], 8) + "`",
               "`" + hex(w.w[1], 8) + "`", "`" + hex(w.w[2], 8) + "`", "`" + hex(w.w[3], 8) + "`"});
    for (uint64_t c = 0; c < 8; ++c) {
      const size_t i = g * 8 + c;
      const uint32_t u16 = (w.w[c / 2] >> (16 * (c % 2))) & 0xffffU;
      const bool kept = u16 >= 16384;
      const float sum = x[i] + bias[c];
      const float masked = kept ? sum * rule.scale : 0.0F;
      EXPECT_EQ(y[i], 100 + masked);
      EXPECT_EQ(dx[i], kept ? rule.scale : 0.0F);
      each.row({place(static_cast<int64_t>(g), static_cast<int64_t>(c)), std::to_string(i),
                str("`", hex(u16, 4), "` = ", u16), kept ? "yes" : "no", text(sum), text(masked),
                text(y[i]), text(dx[i])});
    }
  }
  words.expect_in(file, "dropout_words");
  each.expect_in(file, "dropout");
  Table sums({"column", "0", "1", "2", "3", "4", "5", "6", "7"});
  std::vector<std::string> cells{"dbias"};
  for (size_t c = 0; c < 8; ++c) {
    EXPECT_EQ(dbias[c], dx[c] + dx[c + 8]);
    cells.push_back(text(dbias[c]));
  }
  sums.row(cells);
  sums.expect_in(file, "dropout_dbias");

  // [code: dropout_shards]
  std::vector<float> right(8);  // columns 4 to 7 on a rank of its own
  tenon::Random shard{.seed = 2024, .col0 = 4, .columns = 8};
  tenon::bias_dropout_add(
      {.x = tenon::matrix(x.data() + 4, tenon::DType::f32, 2, 4, 8),
       .bias = tenon::matrix(bias.data() + 4, tenon::DType::f32, 1, 4),
       .residual = tenon::matrix(residual.data() + 4, tenon::DType::f32, 2, 4, 8),
       .y = f32(right, 2),
       .p = 0.25,
       .random = &shard});
  std::vector<float> second(8);  // row 1 alone
  tenon::Random tile{.seed = 2024, .row0 = 1, .columns = 8};
  tenon::bias_dropout_add({.x = tenon::matrix(x.data() + 8, tenon::DType::f32, 1, 8),
                           .bias = f32(bias, 1),
                           .residual = tenon::matrix(residual.data() + 8, tenon::DType::f32, 1, 8),
                           .y = f32(second, 1),
                           .p = 0.25,
                           .random = &tile});
  // [end]
  expect_code(file, "dropout_shards", "cpp");
  Table shards({"shard", "state", "y"});
  shards.row({"columns 4 to 7", "col0 = 4, columns = 8", floats_text(right)});
  shards.row({"row 1", "row0 = 1, columns = 8", floats_text(second)});
  shards.expect_in(file, "dropout_shards");
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(right[i], y[i / 4 * 8 + 4 + i % 4]);
    EXPECT_EQ(second[i], y[8 + i]);
  }

  Table p({"p", "T", "kept", "scale"});
  for (const double share : {0.0, 0.1, 0.25, 0.5, 0.999999, 1.0}) {
    const tenon::DropoutRule r = tenon::dropout_rule(share);
    char shown[32];
    const auto end = std::to_chars(shown, shown + sizeof shown, share).ptr;
    p.row({std::string(shown, end), text(r.threshold), str(65536 - r.threshold, " of 65536"),
           text(r.scale)});
  }
  p.expect_in(file, "dropout_p");
  EXPECT_EQ(tenon::dropout_rule(0x1p-17).threshold, 0);
  EXPECT_EQ(tenon::dropout_rule(0x1.0001p-17).threshold, 1);
  const tenon::RandomWords w = tenon::philox(0, 0, 0);
  const std::string check =
      str(hex(w.w[0], 8), " ", hex(w.w[1], 8), " ", hex(w.w[2], 8), " ", hex(w.w[3], 8));
  EXPECT_NE(read(file).find(check), std::string::npos) << check;
}

// The programs of the guide and the readme.
TEST(Docs, Guide) {
  const fs::path file = kDocs / "guide.md";
  std::vector<float> numbers(64 * 512), grads(64 * 256);
  for (size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = 0.1F * static_cast<float>(i % 61) - 3 + 0.01F * static_cast<float>(i % 7);
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = 0.03F * static_cast<float>(i % 53) - 0.8F;
  const View x = f32(numbers.data(), 64, 512), dy = f32(grads.data(), 64, 256);
  // [code: guide_fp8]
  const int64_t m = 64, k = 256;
  const tenon::Format format{.dtype = tenon::DType::e4m3, .scaling = tenon::Scaling::mxfp8};
  const auto shape = format.scale_shape(m, k, tenon::Orientation::rowwise);
  std::vector<uint8_t> data(m * k), scales(shape.rows * shape.cols);
  const tenon::Tensor y(format,
                        {tenon::matrix(data.data(), format.dtype, m, k),
                         tenon::matrix(scales.data(), tenon::DType::e8m0, shape.rows, shape.cols)});
  tenon::forward(tenon::activation("swiglu"), {.x = x, .y = y});
  // [end]
  expect_code(file, "guide_fp8", "cpp");
  std::vector<float> exact(m * k), back(m * k);
  tenon::forward(tenon::activation("swiglu"), {.x = x, .y = f32(exact.data(), m, k)});

  // [code: guide_backward]
  std::vector<uint8_t> row(64 * 512), column(512 * 64);
  std::vector<float> dbias(512);
  float scale_inv = 0;
  const auto e5m2 = tenon::DType::e5m2, f32 = tenon::DType::f32;
  const tenon::Tensor dx(
      {.dtype = e5m2, .scaling = tenon::Scaling::current},
      {tenon::matrix(row.data(), e5m2, 64, 512), tenon::matrix(&scale_inv, f32, 1, 1)},
      {tenon::matrix(column.data(), e5m2, 512, 64)});
  tenon::backward(
      tenon::activation("swiglu"),
      {.grad = dy, .x = x, .dx = dx, .dbias = tenon::matrix(dbias.data(), f32, 1, 512)});
  // [end]
  expect_code(file, "guide_backward", "cpp");
  std::vector<float> slopes(64 * 512), sums(512);
  tenon::backward(tenon::activation("swiglu"), {.grad = dy,
                                                .x = x,
                                                .dx = ::f32(slopes.data(), 64, 512),
                                                .dbias = ::f32(sums.data(), 1, 512)});
  EXPECT_EQ(dbias, sums);
  for (int64_t r = 0; r < 64; ++r)
    for (int64_t c = 0; c < 512; ++c) {
      const float v = slopes[static_cast<size_t>(r * 512 + c)];
      const uint8_t code = row[static_cast<size_t>(r * 512 + c)];
      ASSERT_EQ(code, column[static_cast<size_t>(c * 64 + r)]);
      ASSERT_NEAR(tenon::decode(e5m2, code) * scale_inv, v, std::fabs(v) / 8 + 1e-9F);
    }

  // [code: guide_quantize]
  const tenon::View plain = tenon::matrix(back.data(), tenon::DType::f32, m, k);
  tenon::dequantize(y, plain);  // codes to numbers
  tenon::quantize(plain, y);    // numbers to codes
  // [end]
  expect_code(file, "guide_quantize", "cpp");
  // Half a step of e4m3: a 16th of the number, or of the block's subnormals.
  for (size_t i = 0; i < back.size(); ++i)
    ASSERT_NEAR(back[i], exact[i], std::fabs(exact[i]) / 16 + 0x1p-10F * 0.0625F);
  // Powers of two: the numbers are the same again, though amax may have rounded to another power.
  std::vector<float> again(m * k);
  tenon::dequantize(y, ::f32(again.data(), m, k));
  EXPECT_EQ(again, back);
}

TEST(Docs, GuideDelayed) {
  constexpr int64_t m = 8, k = 16;
  std::vector<float> numbers(m * k, 1.25F);
  numbers[7] = 3;
  std::vector<uint8_t> y_codes(m * k), dx_codes(m * k);
  const View x = f32(numbers.data(), m, k), dy = x;
  // [code: guide_delayed]
  std::vector<float> history(1024 * 2), scale(2, 1.0F), scale_inv(2);  // two tensors, L = 1024
  const auto cell = [](std::vector<float>& v, int i) {
    return tenon::matrix(&v[i], tenon::DType::f32, 1, 1);
  };
  const auto delayed = [&](std::vector<uint8_t>& codes, tenon::DType dtype, int i) {
    tenon::Tensor t({.dtype = dtype, .scaling = tenon::Scaling::delayed},
                    {tenon::matrix(codes.data(), dtype, m, k), cell(scale_inv, i)});
    t.scale = cell(scale, i);
    t.amax = cell(history, i);  // row 0, column i
    return t;
  };
  const auto f = tenon::activation("gelu");
  tenon::forward(f, {.x = x, .y = delayed(y_codes, tenon::DType::e4m3, 0)});
  tenon::backward(f, {.grad = dy, .x = x, .dx = delayed(dx_codes, tenon::DType::e5m2, 1)});
  for (int i = 0; i < 2; ++i)  // at the end of the step, each column with its own format
    tenon::update({.history = tenon::matrix(&history[i], tenon::DType::f32, 1024, 1, 2),
                   .scale = cell(scale, i),
                   .dtype = i == 0 ? tenon::DType::e4m3 : tenon::DType::e5m2});
  // [end]
  expect_code(kDocs / "guide.md", "guide_delayed", "cpp");
  std::vector<float> y(m * k), dx(m * k);
  float amax[2];
  tenon::forward(f, {.x = x, .y = f32(y.data(), m, k), .amax = f32(&amax[0], 1, 1)});
  tenon::backward(f, {.grad = dy, .x = x, .dx = f32(dx.data(), m, k), .amax = f32(&amax[1], 1, 1)});
  for (const int i : {0, 1}) {
    EXPECT_EQ(history[static_cast<size_t>(i)], 0);
    EXPECT_NEAR(history[static_cast<size_t>(1023 * 2 + i)], amax[i], 1e-3F);
    EXPECT_EQ(scale[static_cast<size_t>(i)],
              ref::quotient(i ? 57344 : 448, history[static_cast<size_t>(1023 * 2 + i)]));
  }
}

TEST(Docs, GuideDropout) {
  const std::vector<float> ones(8 * 16, 1), zeros(8 * 16);
  std::vector<float> out(8 * 16), slope(8 * 16);
  const View x = f32(ones.data(), 8, 16), residual = f32(zeros.data(), 8, 16);
  const View bias = f32(zeros.data(), 1, 16), y = f32(out.data(), 8, 16), dy = x;
  const View dx = f32(slope.data(), 8, 16);
  // [code: guide_dropout]
  tenon::Random random{.seed = 1234, .columns = 16};  // columns of the whole tensor
  const tenon::Random before = random;
  tenon::bias_dropout_add(
      {.x = x, .bias = bias, .residual = residual, .y = y, .p = 0.1, .random = &random});
  tenon::bias_dropout_add_backward({.grad = dy, .dx = dx, .p = 0.1, .random = &before});
  // [end]
  expect_code(kDocs / "guide.md", "guide_dropout", "cpp");
  EXPECT_EQ(out, slope);
  EXPECT_EQ(random.offset, 1U);
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
int program(uint8_t* codes, float* scale_inv, float* back) {
  // [code: guide_c]
  const float x[8] = {0.1f, -0.5f, 2, 6, -3, 0.25f, 0.0001f, 0.00001f};
  int64_t data[2], scales[2];
  if (tenon_encoding_shape("current", 2, 4, 0, data, scales)) return 1;  // [2, 4] and [1, 1]

  const tenon_view x_view = {(void*)x, 2, 4, 4, TENON_F32};
  const tenon_view data_view = {codes, data[0], data[1], data[1], TENON_E4M3};
  const tenon_view scale_view = {scale_inv, scales[0], scales[1], scales[1], TENON_F32};
  const tenon_view back_view = {back, 2, 4, 4, TENON_F32};
  const tenon_tensor y = {.size = sizeof y,
                          .scaling = "current",
                          .dtype = TENON_E4M3,
                          .data = &data_view,
                          .scale_inv = &scale_view};
  const tenon_quantize_args there = {.size = sizeof there, .x = &x_view, .y_encoded = &y};
  const tenon_quantize_args again = {.size = sizeof again, .y = &back_view, .x_encoded = &y};
  if (tenon_quantize(&there, NULL) || tenon_quantize(&again, NULL)) {
    printf("%s\n", tenon_last_error());
    return 1;
  }
  // [end]
  return 0;
}
#pragma GCC diagnostic pop

int list_program() {
  // [code: guide_c_list]
  size_t count = 0;
  tenon_scaling modes[16];
  if (tenon_scalings(modes, 16, &count)) return 1;
  for (size_t i = 0; i < count; ++i)
    printf("%s: blocks of %dx%d\n", modes[i].name, (int)modes[i].block_rows[0],
           (int)modes[i].block_cols[0]);
  // [end]
  return 0;
}

TEST(Docs, GuideCList) {
  expect_code(kDocs / "guide.md", "guide_c_list", "c");
  testing::internal::CaptureStdout();
  ASSERT_EQ(list_program(), 0);
  const std::string printed = testing::internal::GetCapturedStdout();
  EXPECT_NE(printed.find("mxfp8: blocks of 1x32\n"), std::string::npos) << printed;
}

TEST(Docs, GuideC) {
  expect_code(kDocs / "guide.md", "guide_c", "c");
  std::vector<uint8_t> codes(8);
  std::vector<float> back(8);
  float scale_inv = 0;
  ASSERT_EQ(program(codes.data(), &scale_inv, back.data()), 0);
  const Quantise q({.dtype = DType::e4m3, .scaling = Scaling::current},
                   {0.1F, -0.5F, 2, 6, -3, 0.25F, 0.0001F, 0.00001F});
  EXPECT_EQ(codes, q.codes);
  EXPECT_EQ(scale_inv, q.scale_inv);
  EXPECT_EQ(back, q.back);
}

TEST(Docs, Readme) {
  const std::vector<float> ones(64 * 512, 1);
  const View x = f32(ones.data(), 64, 512);
  // [code: readme_fp8]
  std::vector<uint8_t> codes(64 * 256), scales(128 * 8);
  const tenon::Tensor y({.dtype = tenon::DType::e4m3, .scaling = tenon::Scaling::mxfp8},
                        {tenon::matrix(codes.data(), tenon::DType::e4m3, 64, 256),
                         tenon::matrix(scales.data(), tenon::DType::e8m0, 128, 8)});
  tenon::forward(tenon::activation("swiglu"), {.x = x, .y = y});  // one pass, x is 64 x 512
  // [end]
  expect_code(kRoot / "README.md", "readme_fp8", "cpp");
  // silu(1)·1 = 0.73…, and 448·2^-10 < 0.73… < 448·2^-9 = 0.875.
  EXPECT_EQ(scales[0], 127 - 9);
  EXPECT_EQ(codes[0], tenon::encode(DType::e4m3, 0.731058579F * 512));
}

// [text](target#anchor), outside of fences.
struct Link {
  std::string target, anchor;
  bool picture;
};
std::vector<Link> links_of(const std::string& page) {
  std::vector<Link> all;
  bool fence = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("```")) fence = !fence;
    for (size_t at = line.find("]("); !fence && at != std::string::npos;
         at = line.find("](", at + 1)) {
      const size_t end = line.find(')', at);
      const size_t open = line.rfind('[', at);
      if (end == std::string::npos || open == std::string::npos) continue;
      const std::string whole = line.substr(at + 2, end - at - 2);
      const size_t hash = std::min(whole.find('#'), whole.size());
      all.push_back({whole.substr(0, hash), whole.substr(std::min(hash + 1, whole.size())),
                     open > 0 && line[open - 1] == '!'});
    }
  }
  return all;
}

TEST(Docs, Links) {
  std::vector<fs::path> pages;
  for (const fs::path& dir : {kDocs, kRoot})
    for (const auto& entry : fs::directory_iterator(dir))
      if (entry.path().extension() == ".md") pages.push_back(entry.path());
  ASSERT_GT(pages.size(), 8U);
  const auto slugs = [](const std::string& page) {
    std::set<std::string> all;
    bool fence = false;
    for (const std::string& line : lines_of(page)) {
      if (line.starts_with("```")) fence = !fence;
      if (fence || !line.starts_with("#")) continue;
      std::string slug;
      for (const char c : line.substr(std::min(line.size(), line.find_first_not_of("# "))))
        if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || (c & 0x80))
          slug += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
        else if (c == ' ')
          slug += '-';
      all.insert(slug);
    }
    return all;
  };
  // Every marked block is one that a test of this file looks at.
  const std::string self = read(kRoot / "tests" / "docs" / "docs_test.cpp");
  int marked = 0;
  for (const fs::path& page : pages)
    for (const std::string& line : lines_of(read(page)))
      for (const std::string kind : {"<!-- code: ", "<!-- checked: "}) {
        if (!line.starts_with(kind)) continue;
        const std::string name = line.substr(kind.size(), line.find(" -->") - kind.size());
        EXPECT_NE(self.find(str('"', name, '"')), std::string::npos)
            << page << ": nothing checks " << name;
        ++marked;
      }
  EXPECT_GT(marked, 40);

  std::set<fs::path> pictures;
  for (const fs::path& page : pages)
    for (const Link& l : links_of(read(page))) {
      if (l.target.find("://") != std::string::npos) continue;
      const fs::path to = l.target.empty() ? page : page.parent_path() / l.target;
      EXPECT_TRUE(fs::exists(to)) << page << " links to " << l.target;
      if (l.picture) pictures.insert(fs::weakly_canonical(to));
      if (l.anchor.empty() || !fs::exists(to)) continue;
      EXPECT_TRUE(slugs(read(to)).contains(l.anchor)) << page << ": #" << l.anchor;
    }
  for (const auto& entry : fs::directory_iterator(kDocs / "images"))
    EXPECT_TRUE(pictures.contains(fs::weakly_canonical(entry.path())))
        << entry.path() << " is shown nowhere";
}

// Empty, or why the text is no XML that a browser draws: tags nest, attributes are quoted and
// differ.
std::string xml_fault(const std::string& svg) {
  std::vector<std::string> open;
  size_t i = 0;
  const auto name = [&] {
    const size_t begin = i;
    while (i < svg.size() && (std::isalnum(static_cast<unsigned char>(svg[i])) ||
                              std::string_view("_:-").find(svg[i]) != std::string_view::npos))
      ++i;
    return svg.substr(begin, i - begin);
  };
  const auto spaces = [&] {
    while (i < svg.size() && std::isspace(static_cast<unsigned char>(svg[i]))) ++i;
  };
  while (i < svg.size()) {
    if (svg[i] != '<') {
      if (open.empty() && !std::isspace(static_cast<unsigned char>(svg[i])))
        return str("text outside at ", i);
      if (svg[i] == '&' || svg[i] == '>') return str("a bare ", svg[i], " at ", i);
      ++i;
      continue;
    }
    const size_t begin = i++;
    const bool closes = svg[i] == '/';
    if (closes) ++i;
    const std::string tag = name();
    if (tag.empty()) return str("no tag at ", begin, ": ", svg.substr(begin, 40));
    std::set<std::string> seen;
    for (spaces(); i < svg.size() && svg[i] != '>' && svg[i] != '/'; spaces()) {
      const std::string attribute = name();
      if (attribute.empty() || svg.compare(i, 2, "=\"") != 0)
        return str("<", tag, "> has a broken attribute at ", i);
      if (!seen.insert(attribute).second) return str("<", tag, "> has ", attribute, " twice");
      const size_t end = svg.find('"', i + 2);
      if (end == std::string::npos ||
          svg.substr(i + 2, end - i - 2).find_first_of("<&") != std::string::npos)
        return str("<", tag, "> has a broken value at ", i);
      i = end + 1;
    }
    const bool empty = i < svg.size() && svg[i] == '/';
    if (empty) ++i;
    if (i >= svg.size() || svg[i] != '>') return str("<", tag, "> does not end");
    ++i;
    if (closes) {
      if (open.empty() || open.back() != tag) return str("</", tag, "> closes nothing");
      open.pop_back();
    } else if (!empty) {
      open.push_back(tag);
    }
  }
  return open.empty() ? "" : str("<", open.back(), "> is not closed");
}

TEST(Docs, Pictures) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(kDocs / "images")) {
    const std::string svg = read(entry.path());
    const std::string name = entry.path().filename();
    EXPECT_TRUE(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"")) << name;
    EXPECT_EQ(xml_fault(svg), "") << name;
    for (const char* part : {"viewBox=", "<title>", "<desc>", "prefers-color-scheme: dark"})
      EXPECT_NE(svg.find(part), std::string::npos) << name << " has no " << part;
    EXPECT_EQ(svg.find("<script"), std::string::npos) << name;
    EXPECT_LT(svg.size(), 20000U) << name;
    ++count;
  }
  EXPECT_GE(count, 7);
  EXPECT_NE(xml_fault("<svg><g></svg>"), "");
  EXPECT_NE(xml_fault("<svg><g a=\"1\" a=\"2\"/></svg>"), "");
  EXPECT_NE(xml_fault("<svg>a & b</svg>"), "");
  EXPECT_NE(xml_fault("<svg><g a=1/></svg>"), "");
  EXPECT_EQ(xml_fault("<svg a=\"1\"><g b=\"2\" />text</svg>\n"), "");

  // The pictures of the layouts are those of a tensor of 200 x 300.
  for (const Scaling s : tenon::test::kModes) {
    const Format f{.dtype = DType::e4m3, .scaling = s};
    const std::string svg = read(kDocs / "images" / str(tenon::info(s).name, ".svg"));
    for (const auto o : {Orientation::rowwise, Orientation::columnwise})
      for (const tenon::Shape shape : {f.data_shape(200, 300, o), f.scale_shape(200, 300, o)})
        EXPECT_NE(svg.find(shape_text(shape)), std::string::npos)
            << tenon::info(s).name << " " << shape_text(shape);
  }
}

}  // namespace
