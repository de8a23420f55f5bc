// Tests of plans with encoded inputs, weights and outputs, in every scaling mode.
#include "lower/data.h"
#include "support/plan_support.h"
#include "tenon/tenon.hpp"

namespace tenon::test {
namespace {

constexpr int64_t kRows = 37, kCols = 72, kOut = 40;  // no multiples of a block

struct Kind {
  Format format;
  bool rowwise, columnwise;
};
std::string name_of(const testing::TestParamInfo<Kind>& info) {
  const Kind& k = info.param;
  return str(tenon::info(k.format.scaling).name, k.format.swizzled ? "_swizzled" : "", "_",
             tenon::info(k.format.dtype).name, k.rowwise ? "_row" : "", k.columnwise ? "_col" : "");
}

std::vector<Kind> kinds(bool with_swizzled) {
  std::vector<Kind> all;
  for (size_t s = 1; s < kScalings.size(); ++s)
    for (const bool swizzled : {false, true})
      for (const auto& [row, col] : {std::pair{true, false}, {false, true}, {true, true}}) {
        const auto scaling = static_cast<Scaling>(s);
        if (swizzled && (!with_swizzled || info(scaling).scale != DType::e8m0)) continue;
        const DType dtype = col && !row ? DType::e5m2 : DType::e4m3;
        Format f{.dtype = dtype, .scaling = scaling, .swizzled = swizzled};
        // A product multiplies its sum by a single scale. With powers of two this is exact.
        if (f.fp32_rule()) f.power_of_two = true;
        all.push_back({f, row, col});
      }
  return all;
}

Options strict() { return {.precision = Precision::strict}; }

// The buffers of an encoded tensor of a session as a Tensor of rows x cols.
class Encoded {
 public:
  Encoded(Session& s, const std::string& name, const Kind& k, int64_t rows, int64_t cols) {
    tensor.format = k.format;
    const auto encoding = [&](Orientation o, const std::string& of) {
      const Shape data = k.format.data_shape(rows, cols, o);
      const Shape scale = k.format.scale_shape(rows, cols, o);
      return Encoding{matrix(s.data(s.number(of)), k.format.dtype, data.rows, data.cols),
                      matrix(s.data(s.number(of + ".scale_inv")), info(k.format.scaling).scale,
                             scale.rows, scale.cols)};
    };
    if (k.rowwise) tensor.rowwise = encoding(Orientation::rowwise, name);
    if (k.columnwise) tensor.columnwise = encoding(Orientation::columnwise, name + ".t");
    if (info(k.format.scaling).scale_given) {
      tensor.scale = matrix(&scale_, DType::f32, 1, 1);
      tensor.amax = matrix(&amax_, DType::f32, 1, 1);
    }
  }
  Encoded(const Encoded&) = delete;
  Encoded& operator=(const Encoded&) = delete;

  // Encodes the values, and returns the numbers that the codes represent.
  Numbers write(const Numbers& values, int64_t rows, int64_t cols) {
    std::vector<float> from(values.begin(), values.end()), to(values.size());
    quantize(matrix(from.data(), DType::f32, rows, cols), tensor, strict());
    return read(to, rows, cols);
  }
  Numbers read(std::vector<float>& to, int64_t rows, int64_t cols) {
    Tensor codes = tensor;
    codes.scale = codes.amax = {};
    dequantize(codes, matrix(to.data(), DType::f32, rows, cols), strict());
    return {to.begin(), to.end()};
  }

  Tensor tensor;

 private:
  float scale_ = 8, amax_ = 0;
};

class PlanEncoded : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Modes, PlanEncoded, testing::ValuesIn(kinds(true)), name_of);
// A plan chooses the order of the scales that it writes itself.
class PlanEncodedOutput : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Modes, PlanEncodedOutput, testing::ValuesIn(kinds(false)), name_of);

GivenEncoding given(const Kind& k) { return {k.format, k.rowwise, k.columnwise}; }

// The same plan with the decoded numbers as a plain x. All values are f32, so no rounding differs.
TEST_P(PlanEncoded, InputsGiveTheResultsOfTheirNumbers) {
  const Kind& k = GetParam();
  for (const char* chain : {"linear(72,40) bias gelu", "gelu", "swiglu linear(36,40)",
                            "make_extra_output rmsnorm linear(72,40)"})
    for (const Rounding rounding : {Rounding::once, Rounding::eager}) {
      SCOPED_TRACE(chain);
      PlanRequest r{.cols = kCols,
                    .options = {.precision = Precision::strict, .rounding = rounding}};
      Session plain(chain, r, kRows);
      r.input_encoding = given(k);
      Session encoded(chain, r, kRows);
      std::map<std::string, Numbers> values;
      fill(plain, values);
      for (const auto& [name, v] : values)
        if (name != "x") encoded.set(name, v);
      plain.set("x", Encoded(encoded, "x", k, kRows, kCols).write(values["x"], kRows, kCols));
      for (Session* s : {&plain, &encoded}) {
        s->run(Pass::forward);
        s->run(Pass::backward);
      }
      EXPECT_EQ(plain.get("y"), encoded.get("y"));
      EXPECT_EQ(plain.gradients(), encoded.gradients());
      EXPECT_FALSE(encoded.has("linear0.x")) << "x was encoded again";
    }
}

TEST_P(PlanEncoded, WeightsGiveTheResultsOfTheirNumbers) {
  const Kind& k = GetParam();
  const char* const chain = "gelu linear(72,40) bias";
  PlanRequest r{.cols = kCols, .options = strict()};
  Session plain(chain, r, kRows);
  r.op_requests = {{.weight = given(k)}};
  r.parameter_dtypes = {DType::f32, DType::f32};
  r.parameter_grads = {{.dtype = DType::f32, .accumulate = true}, {}};
  Session encoded(chain, r, kRows);
  std::map<std::string, Numbers> values;
  fill(plain, values);
  for (const auto& [name, v] : values)
    if (name != "linear1.weight") encoded.set(name, v);
  plain.set("linear1.weight", Encoded(encoded, "linear1.weight", k, kOut, kCols)
                                  .write(values["linear1.weight"], kOut, kCols));
  encoded.set("dlinear1.weight", Numbers(kOut * kCols, 0.0));
  for (Session* s : {&plain, &encoded}) {
    s->run(Pass::forward);
    s->run(Pass::backward);
  }
  EXPECT_EQ(plain.get("y"), encoded.get("y"));
  EXPECT_EQ(plain.get("dx"), encoded.get("dx"));
  EXPECT_EQ(plain.get("dbias2.bias"), encoded.get("dbias2.bias"));
  EXPECT_EQ(plain.get("dlinear1.weight"), encoded.get("dlinear1.weight"));
}

// Bit for bit what the single call writes.
TEST_P(PlanEncodedOutput, IsThatOfTheSingleCall) {
  const Kind& k = GetParam();
  for (const Rounding rounding : {Rounding::once, Rounding::eager}) {
    PlanRequest r{.cols = kCols, .options = {.precision = Precision::strict, .rounding = rounding}};
    r.op_requests = {{.recipe = Recipe{"own", k.format, {}, k.format},
                      .rowwise = k.rowwise,
                      .columnwise = k.columnwise}};
    Session s("silu quantize", r, kRows);
    std::map<std::string, Numbers> values;
    fill(s, values);
    s.run(Pass::forward);
    Session again("silu quantize", r, kRows);  // memory for the single call
    Encoded want(again, "y", k, kRows, kCols);
    std::vector<float> x(values["x"].begin(), values["x"].end());
    forward(activation("silu"), {.x = matrix(x.data(), DType::f32, kRows, kCols), .y = want.tensor},
            strict());
    size_t parts = 0;
    for (const Buffer& b : s.plan.buffers()) {
      if (b.role != Role::output) continue;
      ++parts;
      const size_t i = s.number(b.name);
      EXPECT_EQ(std::memcmp(s.data(i), again.data(i), static_cast<size_t>(b.bytes(kRows))), 0)
          << b.name;
    }
    EXPECT_EQ(parts, 2U * (static_cast<size_t>(k.rowwise) + static_cast<size_t>(k.columnwise)));
    // The decoded output on request. The rounding to the chain's dtype f32 changes nothing.
    r.output_encoded = false;
    Session decoded("silu quantize", r, kRows);
    decoded.set("x", values["x"]);
    decoded.run(Pass::forward);
    std::vector<float> to(x.size());
    EXPECT_EQ(decoded.get("y"), want.read(to, kRows, kCols));
  }
}

// The gradient of an encoded output is plain, and that of an encoded input too.
TEST(PlanEncodings, CodesOfTheCallerAreNoOutput) {
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::current};
  PlanRequest r{.cols = kCols, .recipe = recipe("current"), .options = strict()};
  r.input_encoding = GivenEncoding{f};
  Session s("quantize", r, kRows);
  const Kind k{f, true, false};
  const Numbers x = Encoded(s, "x", k, kRows, kCols).write(normal(kRows * kCols, 3), kRows, kCols);
  s.run(Pass::forward);
  std::vector<float> to(x.size());
  EXPECT_EQ(Encoded(s, "y", k, kRows, kCols).read(to, kRows, kCols), x);
  EXPECT_EQ(s.plan.buffers()[s.number("dx")].dtype, DType::f32);
}

// On Hopper, products read the encodings that the caller gives. With the rowwise one alone, a step
// decodes the operand that needs the other.
TEST(PlanEncodings, ProductsOnHopperReadTheCodes) {
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::delayed};
  for (const bool both : {true, false}) {
    PlanRequest r{
        .cols = 256, .dtype = DType::bf16, .recipe = recipe("delayed"), .target = "sm_90a"};
    r.options.device = Device::cuda;
    r.input_encoding = GivenEncoding{f, true, both};
    r.op_requests = {{.weight = GivenEncoding{f, true, both}}};
    const std::string text = Plan::build("linear(256,512) bias", r).describe(1024);
    EXPECT_EQ(text.find("maker  plain"), std::string::npos) << text;
    EXPECT_EQ(text.find("decoded operand") == std::string::npos, both) << text;
  }
}

// Where one operand is plain, or the target has no product of the codes, rowwise codes are decoded.
// The decoder of transposed codes is slow, so no plan for a GPU may need it.
TEST(PlanEncodings, NoRecipeRunsOnThePlainMaker) {
  for (const char* target : {"sm_80", "sm_90a", "sm_100a", "sm_120a"})
    for (size_t s = 1; s < kScalings.size(); ++s)
      for (unsigned quantised = 1; quantised < 8; ++quantised) {
        const auto format = [&](unsigned operand) {
          return quantised >> operand & 1U
                     ? Format{.dtype = DType::e4m3, .scaling = static_cast<Scaling>(s)}
                     : Format{};
        };
        PlanRequest r{.dtype = DType::bf16, .target = target};
        r.options.device = Device::cuda;
        r.recipe = {"own", format(0), format(1), format(2)};
        const std::string text =
            Plan::build("linear(256,512) bias gelu linear(512,256)", r).describe(1024);
        EXPECT_EQ(text.find("maker  plain"), std::string::npos) << text;
      }
}

// The blocks of MXFP8 are along the inner dimension of every product that multiplies the codes.
TEST(PlanEncodings, BlocksAlongTheOtherDimensionAreDecoded) {
  for (const bool rowwise : {true, false}) {
    const GivenEncoding given{
        {.dtype = DType::e4m3, .scaling = Scaling::mxfp8, .swizzled = true}, rowwise, !rowwise};
    PlanRequest r{
        .cols = 256, .dtype = DType::bf16, .recipe = recipe("mxfp8"), .target = "sm_100a"};
    r.options.device = Device::cuda;
    r.input_encoding = given;
    r.op_requests = {{.weight = given}};
    const Plan p = Plan::build("linear(256,512)", r);
    size_t products = 0;
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const PlanStep& s : data_of(p).steps(pass))
        if (const Gemm* const g = s.step.gemm())
          for (const Matrix* m : {&g->a, &g->b}) {
            ++products;
            if (m->format.scaling != Scaling::mxfp8) continue;
            const bool rows_inside = m == &g->a ? m->transposed : !m->transposed;
            EXPECT_EQ(m->orientation == Orientation::columnwise, rows_inside) << p.describe(1024);
          }
    EXPECT_EQ(products, 6U);
    EXPECT_NE(p.describe(1024).find("decoded operand"), std::string::npos);
  }
}

// The picture draws the codes of the input and of the output, in every encoding.
TEST_P(PlanEncodedOutput, ThePageShowsIt) {
  const Kind& k = GetParam();
  PlanRequest r{.cols = kCols, .recipe = {"own", k.format, {}, k.format}};
  r.input_encoding = given(k);
  r.op_requests = {{.rowwise = k.rowwise, .columnwise = k.columnwise}};
  const std::string page = Plan::build("gelu quantize", r).html(kRows);
  for (const char* name : {"x", "y"})
    EXPECT_NE(page.find(str(name, k.rowwise ? "" : ".t", "   ")), std::string::npos) << page;
}

void expect_error(const char* chain, const PlanRequest& r, const std::string& part) {
  try {
    Plan::build(chain, r);
    ADD_FAILURE() << "no error: " << part;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(PlanEncodings, WrongRequestsAreErrors) {
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::delayed};
  const auto with_input = [](const GivenEncoding& e) {
    return PlanRequest{.cols = kCols, .input_encoding = e};
  };
  expect_error("gelu", with_input({{.dtype = DType::e4m3}}), "scaling mode none");
  expect_error("gelu", with_input({{.dtype = DType::bf16, .scaling = Scaling::delayed}}), "bf16");
  expect_error("gelu", with_input({f, false, false}), "neither");
  expect_error("gelu",
               with_input({{.dtype = DType::e4m3, .scaling = Scaling::delayed, .swizzled = true}}),
               "swizzled");
  PlanRequest r{.cols = kCols};
  r.op_requests = {{.weight = GivenEncoding{f}}};
  expect_error("quantize", r, "quantize0");
  r.op_requests = {{.rowwise = false}};
  expect_error("quantize", r, "neither");
}

}  // namespace
}  // namespace tenon::test
