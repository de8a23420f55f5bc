// Tests of the C ABI with tenon.h only: full functionality, codes and messages, and no exceptions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tenon/tenon.h"
#include "tenon/tenon.hpp"

namespace {

constexpr int64_t kRows = 5, kCols = 8;

struct Floats {
  std::vector<float> v;
  tenon_view view;
  Floats(int64_t rows, int64_t cols, float start)
      : v(static_cast<size_t>(rows * cols)), view{v.data(), rows, cols, cols, TENON_F32} {
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = start + 0.37F * static_cast<float>(i % 11) - 0.21F * static_cast<float>(i % 5);
  }
  Floats(const Floats&) = delete;
  [[nodiscard]] bool untouched(float start) const {
    return v == Floats(view.rows, view.cols, start).v;
  }
};

float tree(std::vector<float> v) {
  while (v.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i + 1 < v.size(); i += 2) next.push_back(v[i] + v[i + 1]);
    if (v.size() % 2) next.push_back(v.back());
    v = next;
  }
  return v.empty() ? 0.0F : v[0];
}

void expect_fails(int code, int expected, std::initializer_list<const char*> parts) {
  EXPECT_EQ(code, expected) << tenon_last_error();
  for (const char* part : parts)
    EXPECT_NE(std::strstr(tenon_last_error(), part), nullptr)
        << "no '" << part << "' in: " << tenon_last_error();
}

double silu(double x) { return x / (1 + std::exp(-x)); }

constexpr float kMark = -77;

struct Call {
  Floats x{kRows, kCols, -1}, bias{1, kCols, 0.25F}, grad{kRows, kCols, 0.5F},
      y{kRows, kCols, kMark}, dx{kRows, kCols, kMark}, dbias{1, kCols, kMark}, amax{1, 1, kMark};
  tenon_forward_args forward{};
  tenon_backward_args backward{};
  tenon_options options{};
  Call() {
    forward.size = sizeof forward;
    forward.x = &x.view, forward.bias = &bias.view, forward.y = &y.view, forward.amax = &amax.view;
    backward.size = sizeof backward;
    backward.grad = &grad.view, backward.x = &x.view, backward.bias = &bias.view;
    backward.dx = &dx.view, backward.dbias = &dbias.view;
    options.size = sizeof options;
    options.precision = TENON_STRICT;
  }
  void untouched() const {
    for (const Floats* f : {&y, &dx, &dbias, &amax}) EXPECT_TRUE(f->untouched(kMark));
  }
};

TEST(CApi, ForwardAndBackward) {
  Call c;
  ASSERT_EQ(tenon_forward("silu", &c.forward, &c.options), TENON_OK) << tenon_last_error();
  EXPECT_STREQ(tenon_last_error(), "");
  double most = 0;
  for (size_t i = 0; i < c.y.v.size(); ++i) {
    const double z = c.x.v[i] + c.bias.v[i % kCols];
    EXPECT_NEAR(c.y.v[i], silu(z), 1e-6 * (1 + std::fabs(z)));
    most = std::max(most, std::fabs(silu(z)));
  }
  EXPECT_NEAR(c.amax.v[0], most, 1e-5);
  ASSERT_EQ(tenon_backward("silu", &c.backward, nullptr), TENON_OK) << tenon_last_error();
  for (size_t k = 0; k < kCols; ++k) {
    std::vector<float> column;
    for (size_t r = 0; r < kRows; ++r) {
      const size_t i = r * kCols + k;
      const double z = c.x.v[i] + c.bias.v[k], h = 1e-5;
      EXPECT_NEAR(c.dx.v[i], c.grad.v[i] * (silu(z + h) - silu(z - h)) / (2 * h), 1e-5);
      column.push_back(c.dx.v[i]);
    }
    EXPECT_EQ(c.dbias.v[k], tree(column));
  }
}

TEST(CApi, LayoutsAreText) {
  Call c;
  Floats y(kRows, kCols / 2, kMark);
  c.forward.bias = c.forward.amax = nullptr;
  c.forward.y = &y.view;
  const struct {
    const char* text;
    size_t a, b, step;  // column 1 of each half
  } kLayouts[] = {{nullptr, 1, 5, 0},          {"stacked", 1, 5, 0},
                  {"swapped", 5, 1, 0},        {"interleaved(1)", 2, 3, 0},
                  {"interleaved(2)", 1, 3, 0}, {"interleaved(4)", 1, 5, 0}};
  for (const auto& l : kLayouts) {
    c.forward.layout = l.text;
    ASSERT_EQ(tenon_forward("reglu", &c.forward, nullptr), TENON_OK) << tenon_last_error();
    for (size_t r = 0; r < kRows; ++r) {
      const float a = c.x.v[r * kCols + l.a], b = c.x.v[r * kCols + l.b];
      EXPECT_EQ(y.v[r * 4 + 1], std::max(0.0F, a) * b) << (l.text ? l.text : "NULL");
    }
  }
  for (const char* text :
       {"", "other", "interleaved", "interleaved()", "interleaved(0)", "interleaved(-1)",
        "interleaved(2", "interleaved(2)x", "interleaved(99999999999999999999)"}) {
    c.forward.layout = text;
    expect_fails(tenon_forward("reglu", &c.forward, nullptr), TENON_INVALID_ARGUMENT,
                 {"tenon_forward", "layout", text});
  }
}

TEST(CApi, NullInEveryPlace) {
  Call c;
  expect_fails(tenon_forward(nullptr, &c.forward, nullptr), TENON_INVALID_ARGUMENT,
               {"act", "NULL"});
  expect_fails(tenon_forward("relu", nullptr, nullptr), TENON_INVALID_ARGUMENT, {"args", "NULL"});
  expect_fails(tenon_backward(nullptr, &c.backward, nullptr), TENON_INVALID_ARGUMENT, {"act"});
  expect_fails(tenon_backward("relu", nullptr, nullptr), TENON_INVALID_ARGUMENT, {"args"});
  const auto without = [](auto& args, auto member) {
    auto copy = args;
    copy.*member = nullptr;
    return copy;
  };
  const auto no_x = without(c.forward, &tenon_forward_args::x);
  expect_fails(tenon_forward("relu", &no_x, nullptr), TENON_INVALID_ARGUMENT, {"x is NULL"});
  auto no_y = without(c.forward, &tenon_forward_args::y);
  no_y.amax = nullptr;  // an amax alone is valid
  expect_fails(tenon_forward("relu", &no_y, nullptr), TENON_INVALID_ARGUMENT, {"no output", "y"});
  for (const auto member : {&tenon_backward_args::grad, &tenon_backward_args::x}) {
    const auto args = without(c.backward, member);
    expect_fails(tenon_backward("relu", &args, nullptr), TENON_INVALID_ARGUMENT, {"is NULL"});
  }
  c.untouched();
  const tenon_view* x = &c.x.view;
  const tenon_view* y = &c.y.view;
  expect_fails(tenon_fused_forward(nullptr, "x", x, 1, y, nullptr), 1, {"formula"});
  expect_fails(tenon_fused_forward("x", nullptr, x, 1, y, nullptr), 1, {"arguments"});
  expect_fails(tenon_fused_forward("x", "x", nullptr, 1, y, nullptr), 1, {"in is NULL"});
  expect_fails(tenon_fused_forward("x", "x", x, 1, nullptr, nullptr), 1, {"y is NULL"});
  expect_fails(tenon_fused_forward("x", "x", x, 0, y, nullptr), 1, {"0 views"});
  expect_fails(tenon_fused_forward("x", "x", x, SIZE_MAX, y, nullptr), 1, {"at most 64"});
  expect_fails(tenon_fused_backward(nullptr, "x", x, 1, x, y, nullptr), 1, {"formula"});
  expect_fails(tenon_fused_backward("x", nullptr, x, 1, x, y, nullptr), 1, {"arguments"});
  expect_fails(tenon_fused_backward("x", "x", nullptr, 1, x, y, nullptr), 1, {"in is NULL"});
  expect_fails(tenon_fused_backward("x", "x", x, 1, nullptr, y, nullptr), 1, {"grad is NULL"});
  expect_fails(tenon_fused_backward("x", "x", x, 1, x, nullptr, nullptr), 1, {"gradients is NULL"});
  expect_fails(tenon_run(nullptr, x, 1, y, 1, nullptr), 1, {"name", "NULL"});
  expect_fails(tenon_run("relu", nullptr, 1, y, 1, nullptr), 1, {"in is NULL"});
  expect_fails(tenon_run("relu", x, 1, nullptr, 1, nullptr), 1, {"out is NULL"});
  expect_fails(tenon_define(nullptr, "x"), 1, {"name", "NULL"});
  expect_fails(tenon_define("capi_null", nullptr), 1, {"formula", "NULL"});
  c.untouched();
}

TEST(CApi, BadNumbersInEveryPlace) {
  Call c;
  for (const int32_t dtype : {-1, 6, 1000}) {
    c.x.view.dtype = dtype;
    expect_fails(tenon_forward("relu", &c.forward, nullptr), 1, {"dtype number"});
  }
  c.x.view.dtype = 3;  // an FP8 format, which requires a scale
  expect_fails(tenon_forward("relu", &c.forward, nullptr), TENON_UNSUPPORTED, {"x is e4m3"});
  c.x.view.dtype = TENON_F32;
  const auto bad_option = [&](auto member, int32_t value, const char* name) {
    tenon_options o = c.options;
    o.*member = value;
    expect_fails(tenon_forward("relu", &c.forward, &o), 1, {name, "tenon_forward"});
    expect_fails(tenon_backward("relu", &c.backward, &o), 1, {name, "tenon_backward"});
    expect_fails(tenon_run("relu", &c.x.view, 1, &c.y.view, 1, &o), 1, {name, "tenon_run"});
  };
  for (const int32_t value : {-1, 2, 99}) {
    bad_option(&tenon_options::precision, value, "precision");
    bad_option(&tenon_options::rounding, value, "rounding");
    bad_option(&tenon_options::device, value, "device");
  }
  for (const size_t size : {size_t{0}, size_t{7}, size_t{5000}, SIZE_MAX}) {
    Call s;
    s.forward.size = s.backward.size = s.options.size = size;
    expect_fails(tenon_forward("relu", &s.forward, nullptr), 1, {"size", "sizeof"});
    expect_fails(tenon_backward("relu", &s.backward, nullptr), 1, {"size", "sizeof"});
    expect_fails(tenon_forward("relu", &c.forward, &s.options), 1, {"options", "size"});
    s.untouched();
  }
  expect_fails(tenon_set_threads(-1), 1, {"-1 threads"});
  expect_fails(tenon_set_threads(100000), 1, {"100000"});
  c.untouched();
}

// A struct that ends inside of a field would contain half a pointer.
TEST(CApi, ShorterStructsAreRefused) {
  for (const size_t size : {size_t{9}, offsetof(tenon_forward_args, amax)}) {
    Call c;
    c.forward.size = size;
    expect_fails(tenon_forward("relu", &c.forward, nullptr), 1, {"sizeof(tenon_forward_args)"});
    c.untouched();
  }
}

// A caller with a newer header has longer structs. The additional bytes must be zero.
TEST(CApi, LongerStructsMustEndInZeros) {
  Call c;
  struct Longer {
    tenon_forward_args args;
    uint64_t news;
  } longer{c.forward, 0};
  longer.args.size = sizeof longer;
  EXPECT_EQ(tenon_forward("relu", &longer.args, nullptr), TENON_OK) << tenon_last_error();
  longer.news = 1;
  expect_fails(tenon_forward("relu", &longer.args, nullptr), 1, {"does not know"});
}

TEST(CApi, ErrorsAreTheThreadsOwn) {
  Call c;
  expect_fails(tenon_forward("gelo", &c.forward, nullptr), 1, {"'gelo'", "did you mean 'gelu'"});
  std::thread([] {
    EXPECT_STREQ(tenon_last_error(), "");
    EXPECT_EQ(tenon_define("2bad", "x"), TENON_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(tenon_last_error(), "2bad"), nullptr);
  }).join();
  EXPECT_NE(std::strstr(tenon_last_error(), "gelo"), nullptr);
  expect_fails(tenon_forward("x +", &c.forward, nullptr), 1, {"line 1, column 4"});
  c.y.view.rows = 4;
  expect_fails(tenon_forward("relu", &c.forward, nullptr), 1, {"y is 4x8", "5x8"});
  c.y.view.rows = kRows;
  c.untouched();
  EXPECT_GT(std::strlen(tenon_version()), 0U);
}

TEST(CApi, NamesWithAnyBuffer) {
  size_t size = 0;
  ASSERT_EQ(tenon_names(nullptr, 0, &size), TENON_OK);
  std::vector<char> all(size);
  ASSERT_EQ(tenon_names(all.data(), all.size(), nullptr), TENON_OK);
  const std::string text = all.data();
  EXPECT_EQ(text.size() + 1, size);
  EXPECT_NE(text.find("gelu\n"), std::string::npos);
  for (const size_t capacity : {size_t{0}, size_t{1}, size_t{2}, size_t{10}, size, size + 9}) {
    std::vector<char> buffer(capacity + 4, '#');
    size_t needed = 0;
    ASSERT_EQ(tenon_names(buffer.data(), capacity, &needed), TENON_OK);
    EXPECT_EQ(needed, size);
    const size_t kept = capacity ? std::min(capacity, size) : 0;
    if (kept) {
      EXPECT_EQ(std::string(buffer.data()), text.substr(0, kept - 1));
    }
    for (size_t i = kept; i < buffer.size(); ++i) EXPECT_EQ(buffer[i], '#');
  }
}

TEST(CApi, ActivationInfo) {
  tenon_activation found{};
  ASSERT_EQ(tenon_activation_info("gelu", &found), TENON_OK) << tenon_last_error();
  EXPECT_STREQ(found.name, "gelu");
  EXPECT_EQ(found.formula, tenon::formula(tenon::activation("gelu")));
  EXPECT_TRUE(found.inputs == 1 && found.scaled == 0 && found.parameter_count == 0);
  const char* text = "scaled(clamped_swiglu(alpha=1.5))";
  ASSERT_EQ(tenon_activation_info(text, &found), TENON_OK) << tenon_last_error();
  const tenon::Activation f = tenon::activation(text);
  EXPECT_TRUE(found.inputs == 2 && found.scaled != 0);
  ASSERT_EQ(found.parameter_count, f.parameters.size());
  ASSERT_GT(f.parameters.size(), 1U);
  for (size_t i = 0; i < f.parameters.size(); ++i) {
    const tenon_parameter& p = found.parameters[i];
    EXPECT_EQ(p.name, f.parameters[i].name);
    EXPECT_EQ(p.value, f.parameters[i].value) << p.name;
    EXPECT_EQ(p.least, f.parameters[i].least) << p.name;
    EXPECT_EQ(p.most, f.parameters[i].most) << p.name;
  }
  // Results are per thread.
  std::thread([] {
    tenon_activation other{};
    EXPECT_EQ(tenon_activation_info("x*x; k = 1", &other), TENON_OK) << tenon_last_error();
  }).join();
  EXPECT_EQ(found.formula, tenon::formula(f));
  EXPECT_EQ(found.parameters[0].name, f.parameters[0].name);
  tenon_activation untouched{};
  expect_fails(tenon_activation_info("gelo", &untouched), 1, {"gelo"});
  expect_fails(tenon_activation_info(nullptr, &untouched), 1,
               {"tenon_activation_info: act is NULL"});
  EXPECT_EQ(untouched.name, nullptr);
  expect_fails(tenon_activation_info("gelu", nullptr), 1, {"tenon_activation_info: info is NULL"});
}

TEST(CApi, DefineRunAndRedefine) {
  Call c;
  ASSERT_EQ(tenon_define("capi_own", "k*x*x; k = 3"), TENON_OK) << tenon_last_error();
  ASSERT_EQ(tenon_run("capi_own", &c.x.view, 1, &c.y.view, 1, nullptr), TENON_OK);
  for (size_t i = 0; i < c.y.v.size(); ++i) EXPECT_EQ(c.y.v[i], 3.0F * c.x.v[i] * c.x.v[i]);
  ASSERT_EQ(tenon_define("capi_own", "x + 1"), TENON_OK);
  ASSERT_EQ(tenon_run("capi_own", &c.x.view, 1, &c.y.view, 1, nullptr), TENON_OK);
  for (size_t i = 0; i < c.y.v.size(); ++i) EXPECT_EQ(c.y.v[i], c.x.v[i] + 1.0F);
  const tenon_view in[] = {c.grad.view, c.x.view, c.bias.view}, out[] = {c.dbias.view, c.dx.view};
  ASSERT_EQ(tenon_run("bgrad_dcapi_own", in, 3, out, 2, nullptr), TENON_OK) << tenon_last_error();
  EXPECT_EQ(c.dx.v, c.grad.v);
  expect_fails(tenon_define("gelu", "x"), 1, {"built in"});
  expect_fails(tenon_run("nothing_like_it", in, 1, out, 1, nullptr), 1, {"nothing_like_it"});
}

TEST(CApi, FusedForwardAndBackward) {
  Call c;
  Floats number(1, 1, 2), dnumber(1, 1, kMark);
  const tenon_view in[] = {c.x.view, c.bias.view, number.view};
  ASSERT_EQ(tenon_fused_forward("x*s + row*c; c = 2", "x, row,s", in, 3, &c.y.view, nullptr), 0)
      << tenon_last_error();
  for (size_t i = 0; i < c.y.v.size(); ++i)
    EXPECT_EQ(c.y.v[i], c.x.v[i] * number.v[0] + c.bias.v[i % kCols] * 2.0F);
  const tenon_view out[] = {{nullptr, 0, 0, 0, 0}, c.dbias.view, dnumber.view};
  ASSERT_EQ(
      tenon_fused_backward("x*s + row*c; c = 2", "x, row,s", in, 3, &c.grad.view, out, nullptr), 0)
      << tenon_last_error();
  std::vector<float> products;
  for (size_t i = 0; i < c.x.v.size(); ++i) products.push_back(c.grad.v[i] * c.x.v[i]);
  EXPECT_EQ(dnumber.v[0], tree(products));
  for (size_t k = 0; k < kCols; ++k) {
    std::vector<float> column;
    for (size_t r = 0; r < kRows; ++r) column.push_back(c.grad.v[r * kCols + k] * 2.0F);
    EXPECT_EQ(c.dbias.v[k], tree(column));
  }
  EXPECT_TRUE(c.dx.untouched(kMark));
  expect_fails(tenon_fused_forward("x", "x, y", in, 1, &c.y.view, nullptr), 1,
               {"2 argument names"});
  expect_fails(tenon_fused_forward("x", "x,x", in, 2, &c.y.view, nullptr), 1, {"two arguments"});
}

}  // namespace
