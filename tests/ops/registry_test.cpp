// Tests of every op of the registry against its float64 form, alone and between products: values,
// gradients, and the list of the C ABI.
#include <cmath>
#include <cstring>

#include "core/philox.h"
#include "ops/op.h"
#include "support/reference.h"
#include "support/session.h"
#include "support/support.h"
#include "tenon/tenon.h"

namespace tenon::test {
namespace {

using support::Reference;
using support::Session;
using support::Tensors64;

constexpr int64_t kCols = 24, kRows = 12;

// The op with its required arguments.
std::string text_of(const OpSchema& s) {
  std::string arguments;
  for (const ArgumentSchema& a : s.arguments) {
    if (a.missing.empty()) continue;
    double value = 0.25;
    if (a.kind == ArgumentSchema::Kind::count) value = 8;
    arguments += str(arguments.empty() ? "" : ",", a.name, "=", value);
  }
  return str(s.name, arguments.empty() ? "" : "(", arguments, arguments.empty() ? "" : ")");
}

// Values in [-1, 1), different for each buffer.
void fill(const Session& s, const Buffer& b, uint64_t stream) {
  if (b.random) {
    const support::RandomState state{7, 0, 0, 0, 256};
    std::memcpy(s.at(b.name), state.data(), sizeof state);
    return;
  }
  auto* const to = static_cast<float*>(s.at(b.name));
  const int64_t n = b.bytes(s.rows()) / 4;
  for (int64_t i = 0; i < n; ++i)
    to[i] = static_cast<float>(philox(5, static_cast<uint64_t>(i), stream).w[0]) * 0x1p-31F - 1;
}

Matrix64 read(const Session& s, const Buffer& b) {
  Matrix64 m{b.rows(s.rows()), b.cols, {}};
  const auto* const from = static_cast<const float*>(s.at(b.name));
  m.v.assign(from, from + m.rows * m.cols);
  return m;
}

bool is_given(Role r) { return r == Role::input || r == Role::param || r == Role::extra_in; }
bool is_made(Role r) { return r == Role::output || r == Role::extra_out || r == Role::grad; }

// The tolerance is four times the rounding error of float64 runs with noise, as in `tenon run`.
void expect_close(const std::string& chain, const PlanRequest& request) {
  SCOPED_TRACE(chain);
  Session s(Plan::build(chain, request), kRows);
  const std::vector<Buffer>& buffers = s.plan().buffers();
  Reference reference{.chain = parse_chain(chain), .request = request, .given = {}};
  reference.random = {7, 0, 0, 0, 256};
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.role == Role::rng || is_given(b.role)) fill(s, b, i);
    if (is_given(b.role)) reference.given[b.name] = read(s, b);
  }
  s.run(Pass::forward);
  s.run(Pass::backward);
  const Tensors64 exact = reference.run();
  for (const Buffer& b : buffers) {
    if (!is_made(b.role)) continue;
    double allowed = 0;
    const Matrix64& want = exact.at(b.name);
    for (uint64_t seed = 1; seed <= 4; ++seed)
      allowed = std::max(allowed,
                         support::distance(reference.run(seed).at(b.name), want, DType::f32).worst);
    Matrix64 got = read(s, b);
    got.rows = want.rows;
    got.cols = want.cols;
    const support::Distance d = support::distance(got, want, DType::f32);
    EXPECT_FALSE(d.lost) << b.name;
    EXPECT_LE(d.worst, 4 * allowed) << b.name;
  }
}

TEST(Registry, EveryOpIsItsFloat64Form) {
  for (const OpSchema& s : op_schemas()) {
    PlanRequest request{.cols = kCols};
    request.options.precision = Precision::strict;
    expect_close(text_of(s), request);
  }
}

TEST(Registry, EveryOpBetweenProducts) {
  for (const OpSchema& s : op_schemas()) {
    PlanRequest request;
    request.options.precision = Precision::strict;
    expect_close(str("linear(16,", kCols, ") ", text_of(s), " linear(out=8)"), request);
  }
}

// A session updates the scales for the format of the codes, also those of an encoded output.
TEST(Registry, SessionsUpdateTheScalesOfEveryFormat) {
  for (const DType d : {DType::e4m3, DType::e5m2}) {
    const Format f{.dtype = d, .scaling = Scaling::delayed};
    PlanRequest r{.cols = kCols, .op_requests = {{.recipe = Recipe{"own", f, {}, f}}}};
    Session s(Plan::build("quantize", r), kRows);
    std::fill_n(static_cast<float*>(s.at("x")), kRows * kCols, 0.5F);
    s.run(Pass::forward);
    s.update_scales();
    EXPECT_EQ(*static_cast<const float*>(s.at("quantize0.scale")), info(d).max / 0.5F)
        << info(d).name;
  }
}

TEST(Registry, TheCAbiListsEveryOp) {
  size_t count = 0;
  ASSERT_EQ(tenon_ops(nullptr, 0, &count), TENON_OK);
  const std::span<const OpSchema> schemas = op_schemas();
  ASSERT_EQ(count, schemas.size());
  std::vector<tenon_op> list(count);
  ASSERT_EQ(tenon_ops(list.data(), count, &count), TENON_OK);
  for (size_t i = 0; i < count; ++i) {
    EXPECT_EQ(list[i].name, schemas[i].name);
    EXPECT_STRNE(list[i].summary, "") << list[i].name;
    ASSERT_EQ(list[i].argument_count, schemas[i].arguments.size());
    ASSERT_EQ(list[i].parameter_count, schemas[i].parameters.size());
    ASSERT_EQ(list[i].extra_input_count, schemas[i].extra_inputs.size());
    EXPECT_EQ(list[i].extra_output_count, schemas[i].extra_outputs.size());
    for (size_t k = 0; k < list[i].argument_count; ++k) {
      EXPECT_EQ(list[i].arguments[k].name, schemas[i].arguments[k].name);
      EXPECT_EQ(list[i].arguments[k].required != 0, !schemas[i].arguments[k].missing.empty());
    }
    for (size_t k = 0; k < list[i].parameter_count; ++k)
      EXPECT_EQ(list[i].parameters[k].name, schemas[i].parameters[k].name);
  }
}

// A name in a chain must be unique.
TEST(Registry, NoOpIsAnActivation) {
  for (const OpSchema& s : op_schemas()) EXPECT_FALSE(is_activation(s.name)) << s.name;
}

}  // namespace
}  // namespace tenon::test
