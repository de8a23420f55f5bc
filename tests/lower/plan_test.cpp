// Tests of plans against the same chain in float64, and against their ops run one by one.
#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <set>

#include "lower/data.h"
#include "runtime/execute.h"
#include "runtime/views.h"
#include "step/split.h"
#include "support/plan_support.h"
#include "support/support.h"
#include "tenon/error.h"

namespace tenon::test {
namespace {

struct Case {
  const char* chain;
  int64_t rows, cols;
  DType dtype = DType::f32;
  const char* recipe = "none";
  unsigned frozen = 0;  // bit mask of parameters without a gradient
  bool input_grad = true;

  [[nodiscard]] PlanRequest request() const {
    PlanRequest r;
    r.cols = cols;
    r.dtype = dtype;
    r.recipe = tenon::recipe(recipe);
    r.input_grad = input_grad;
    r.output_encoded = false;  // plan_encoded_test.cpp has encoded outputs
    for (unsigned p = 0; frozen >> p; ++p)
      r.parameter_grads.push_back({.wanted = (frozen >> p & 1U) == 0});
    return r;
  }
};

// Rounding to nearest has an error of at most u/2, and u/sqrt(12) on average. Errors of tensors
// that are rounded on the way are independent. A factor of two covers amplification in a step.
double tolerance(const Case& c) {
  size_t ops = 2, linears = 0;
  for (const char* p = c.chain; *p; ++p) {
    ops += *p == ' ';
    linears +=
        std::string_view(p).starts_with("linear") || std::string_view(p).starts_with("quantize");
  }
  const double plain = c.dtype == DType::f32 ? 0x1p-22 : c.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
  double squares = static_cast<double>(ops) * plain * plain;
  // The derivative is at a point with a relative error of one e4m3 step. The factor |x·f''/f'| is
  // at most about 1.
  if (std::string_view(c.chain).find("keep=fp8") != std::string_view::npos) squares += 0x1p-6;
  if (std::string_view(c.recipe) != "none") {
    const bool hybrid = c.recipe[0] == 'd' || c.recipe[0] == 'c';
    squares += static_cast<double>(linears) * (2 * 0x1p-6 + (hybrid ? 0x1p-4 : 0x1p-6));
  }
  return 2 * std::sqrt(squares / 12) + 1e-6;
}

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.chain << " " << c.rows << "x" << c.cols << " " << info(c.dtype).name << " " << c.recipe
       << " frozen " << c.frozen << (c.input_grad ? "" : " without dx");
}

class Chains : public testing::TestWithParam<Case> {};

TEST_P(Chains, AgreeWithFloat64) {
  const Case& c = GetParam();
  Session s(c.chain, c.request(), c.rows);
  std::map<std::string, Numbers> given;
  fill(s, given);
  s.run(Pass::forward);
  s.run(Pass::backward);
  Chain64 exact(c.chain, c.rows, c.cols, given);
  const double most = tolerance(c);
  EXPECT_LE(distance(s.get("y"), exact.forward(given["x"])), most) << s.plan.describe(c.rows);
  std::map<std::string, Numbers> extra;
  for (const auto& [name, v] : given)
    if (name.starts_with("dextra_out")) extra[name] = v;
  const Numbers dx = exact.backward(given["dy"], extra);
  ASSERT_EQ(s.has("dx"), c.input_grad);
  if (c.input_grad) {
    EXPECT_LE(distance(s.get("dx"), dx), most);
  }
  for (const auto& [name, v] : exact.extra_outputs)
    EXPECT_LE(distance(s.get(name), v), most) << name;
  size_t gradients = 0;
  for (const Buffer& b : s.plan.buffers()) {
    if (b.role != Role::grad || b.name == "dx") continue;
    ++gradients;
    EXPECT_LE(distance(s.get(b.name), exact.grads.at(b.name)), most) << b.name;
  }
  EXPECT_EQ(gradients + static_cast<size_t>(std::popcount(c.frozen)),
            s.plan.with(Role::param).size() + s.plan.with(Role::extra_in).size());
}

// Each op is planned separately. The test passes the tensors on.
struct Alone {
  Op op;
  std::unique_ptr<Session> session;
  std::vector<std::string> extra_in, extra_out;  // names in the whole chain, or channels
};

// Compares element by element. All NaNs are equal.
bool same(const Numbers& a, const Numbers& b) {
  return std::ranges::equal(
      a, b, [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

void expect_equal_to_its_ops(const Case& c) {
  PlanRequest request = c.request();
  request.options.precision = Precision::strict;
  request.options.rounding = Rounding::eager;
  Chain chain = parse_chain(c.chain);
  for (size_t i = 0; i < chain.size(); ++i) chain[i].label = "o" + std::to_string(i);
  Session whole(print_chain(chain), request, c.rows);
  std::map<std::string, Numbers> given;
  fill(whole, given);
  whole.run(Pass::forward);
  whole.run(Pass::backward);

  // A single op computes all gradients. Whether a gradient is requested does not change the others.
  request.parameter_grads.clear();
  request.input_grad = true;
  std::vector<Alone> ops;
  std::map<std::string, Numbers> tensors = given;
  Numbers x = given["x"];
  size_t extra = 0, extra_out = 0;
  uint64_t dropouts = 0;
  int64_t rows = c.rows;
  for (const Op& op : chain) {
    Alone& a = ops.emplace_back();
    a.op = op;
    a.op.reads.clear();
    a.op.writes.clear();
    a.session = std::make_unique<Session>(print_chain(std::span(&a.op, 1)), request, rows);
    Session& s = *a.session;
    for (const Buffer& b : s.plan.buffers())
      if (b.role == Role::param) s.set(b.name, given.at(b.name));
    if (s.has("extra0")) {
      a.extra_in.push_back(op.reads.empty() ? "extra" + std::to_string(extra++) : op.reads[0]);
      s.set("extra0", tensors.at(a.extra_in[0]));
    }
    if (s.has("rng")) {
      const std::array<uint64_t, 5> state{11, 3 + dropouts++, 0, 0, 64};
      std::memcpy(s.data(s.number("rng")), state.data(), sizeof state);
    }
    s.set("x", x);
    s.run(Pass::forward);
    x = s.get("y");
    if (s.has("extra_out0")) {
      const bool caller = op.writes.empty();
      a.extra_out.push_back(caller ? "extra_out" + std::to_string(extra_out++) : op.writes[0]);
      tensors[a.extra_out[0]] = s.get("extra_out0");
    }
    const Buffer& y = s.plan.buffers()[s.number("y")];
    rows = y.rows(rows);
    request.cols = y.cols;
  }
  EXPECT_TRUE(same(whole.get("y"), x)) << whole.plan.describe(c.rows);
  Numbers g = given["dy"];
  for (size_t i = ops.size(); i-- > 0;) {
    Session& s = *ops[i].session;
    s.set("dy", g);
    if (s.has("dextra_out0")) {
      // If nothing before it has a gradient, the whole plan has no such input.
      const auto it = tensors.find("d" + ops[i].extra_out[0]);
      s.set("dextra_out0", it != tensors.end() ? it->second : Numbers(g.size(), 0.0));
    }
    s.run(Pass::backward);
    g = s.get("dx");
    for (const Buffer& b : s.plan.buffers())
      if (b.role == Role::grad && b.name.starts_with("do") && whole.has(b.name)) {
        EXPECT_TRUE(same(whole.get(b.name), s.get(b.name))) << b.name;
      }
    if (!s.has("dextra0")) continue;
    const std::string name = "d" + ops[i].extra_in[0];
    const Numbers more = s.get("dextra0");
    Numbers& sum = tensors[name];  // sum over all readers of a channel, in fp32
    if (sum.empty()) sum.assign(more.size(), -0.0);
    for (size_t k = 0; k < more.size(); ++k)
      sum[k] = static_cast<float>(sum[k]) + static_cast<float>(more[k]);
    if (whole.has(name) && name.starts_with("dextra")) {
      EXPECT_TRUE(same(whole.get(name), tensors[name])) << name;
    }
  }
  if (c.input_grad) {
    EXPECT_TRUE(same(whole.get("dx"), g)) << whole.plan.describe(c.rows);
  }
}

TEST_P(Chains, EqualTheirOpsOneByOne) { expect_equal_to_its_ops(GetParam()); }

TEST_P(Chains, GiveTheSameForwardAloneAndKeepNothing) {
  const Case& c = GetParam();
  PlanRequest request = c.request();
  request.options.precision = Precision::strict;
  request.options.rounding = Rounding::eager;
  Session both(c.chain, request, c.rows);
  request.backward = false;
  Session alone(c.chain, request, c.rows);
  std::map<std::string, Numbers> given;
  fill(both, given);
  fill(alone, given);
  both.run(Pass::forward);
  alone.run(Pass::forward);
  EXPECT_EQ(both.get("y"), alone.get("y")) << alone.plan.describe(c.rows);
  EXPECT_TRUE(data_of(alone.plan).backward.empty());
  EXPECT_TRUE(alone.plan.with(Role::grad).empty());
  // Only the random state of the run is saved.
  EXPECT_EQ(alone.plan.saved_bytes(c.rows), alone.has("rng") ? 40 : 0)
      << alone.plan.describe(c.rows);
}

// Properties of the steps of every plan, on any device.
void expect_thrift(const Case& c) {
  PlanRequest request = c.request();
  for (const Device device : {Device::cpu, Device::null}) {
    request.options.device = device;
    const Plan plan = Plan::build(c.chain, request);
    const auto buffer = [&](int b) -> const Buffer& {
      return plan.buffers()[static_cast<size_t>(b)];
    };
    const auto inner = [&](int b) {
      return buffer(b).role == Role::workspace || buffer(b).role == Role::saved;
    };
    std::set<std::string> names;
    for (const Buffer& b : plan.buffers())
      EXPECT_TRUE(names.insert(b.name).second) << "two buffers are called " << b.name;
    std::set<int> written, read;
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const PlanStep& s : data_of(plan).steps(pass)) {
        for (const BufferView& view : s.in) {
          if (view.buffer == kNoBuffer) continue;
          read.insert(view.buffer);
          EXPECT_TRUE(!inner(view.buffer) || written.contains(view.buffer))
              << s.step.name << " reads " << buffer(view.buffer).name << " before it is there\n"
              << plan.describe(c.rows);
        }
        std::set<int> mine;
        for (const BufferView& view : s.out)
          if (view.buffer != kNoBuffer) mine.insert(view.buffer);
        for (const int b : mine)
          EXPECT_TRUE(written.insert(b).second)
              << s.step.name << " writes " << buffer(b).name << " again\n"
              << plan.describe(c.rows);
      }
    for (const int b : written)
      EXPECT_TRUE(!inner(b) || read.contains(b)) << "nobody reads " << buffer(b).name << "\n"
                                                 << plan.describe(c.rows);
  }
}

TEST_P(Chains, StoreNothingTwiceAndNothingInVain) { expect_thrift(GetParam()); }

constexpr Case kCases[] = {
    // Elementwise.
    {"gelu", 7, 33},
    {"bias gelu", 7, 33, DType::bf16},
    {"bias swiglu scale(0.5)", 9, 66, DType::f16},
    {"bias dropout(0.1) add", 33, 64, DType::bf16},
    {"dropout(0.5) gelu dropout(0.25)", 5, 64},
    {"act(\"x*sigmoid(beta*x) + 0.5*x; beta = 1.25\") scale(-2) identity", 6, 32},
    {"all_reduce gelu all_gather reduce_scatter", 4, 8},
    {"gelu_erf qgelu srelu", 13, 47, DType::f16},
    {"sigmoid tanh softplus mish", 10, 19, DType::bf16},
    {"hardswish leaky_relu(slope=0.25) elu(alpha=0.5)", 21, 65},
    {"glu geglu_erf reglu", 6, 136},
    {"qgeglu(layout=swapped) sreglu(layout=\"interleaved(3)\")", 9, 84, DType::bf16},
    {"clamped_swiglu(limit=2,alpha=1.5,offset=0.5) bias", 31, 62, DType::f16},
    {"situglu(beta1=3,beta2=5,layout=\"interleaved(1)\") scale(3)", 8, 26},
    {"bias act(\"scaled(swiglu)\")", 17, 34, DType::bf16},
    {"act(\"scaled(gelu)\") add", 9, 21},
    {"gelu(keep=fp8) bias swiglu(keep=fp8)", 33, 140, DType::bf16},
    {"silu(keep=recompute) bias", 7, 9, DType::f16},
    // Norms.
    {"rmsnorm(65)", 33, 65},
    {"layernorm(513)", 3, 513, DType::bf16},
    {"l2norm", 17, 31, DType::f16},
    {"rmsnorm(66,eps=0.001,zero_centered_gamma=true) bias", 34, 66, DType::bf16},
    {"layernorm(37,zero_centered_gamma=true) l2norm(eps=0.01)", 65, 37},
    {"add rmsnorm silu", 12, 96, DType::bf16},
    {"bias layernorm add rmsnorm", 20, 33, DType::f16},
    {"scale(2) swiglu rmsnorm relu", 11, 130},
    // Extra tensors, channels, shapes.
    {"make_extra_output>r rmsnorm gelu add<r", 40, 70, DType::bf16},
    {"make_extra_output gelu make_extra_output", 8, 24},
    {"bias make_extra_output silu add make_extra_output add", 19, 23, DType::f16},
    {"make_extra_output>a gelu make_extra_output>b scale(2) add<a add<b add<a", 6, 20},
    {"make_extra_output>a linear(20,20) add<a linear(20,20) add<a rmsnorm add<a", 6, 20},
    {"reshape(16) gelu reshape(64)", 6, 32},
    {"bias reshape(21) add rmsnorm reshape(42)", 8, 63, DType::bf16},
    {"swiglu swiglu", 5, 64},
    // Backward of a gated op before ops that exist only for whole columns.
    {"dropout(0.25) bias glu", 12, 48, DType::f16},
    {"act(\"scaled(silu)\") qgeglu(layout=\"interleaved(1)\") add", 24, 34, DType::bf16},
    {"linear(24,48) swiglu(keep=fp8) geglu(keep=fp8)", 12, 24},
    {"linear(24,48) swiglu(keep=recompute) geglu(keep=recompute) linear(12,8)", 12, 24},
    // Products.
    {"linear(33,65)", 7, 33},
    {"linear(33,65)", 1, 33, DType::bf16},
    {"linear(64,128) bias gelu linear(128,32)", 129, 64},
    {"linear(64,128) bias gelu linear(128,32)", 129, 64, DType::bf16},
    {"linear(64,256) bias swiglu linear(128,64) bias dropout(0.1) add", 65, 64, DType::bf16},
    {"linear(21,34) scale(0.5) add", 18, 21, DType::f16},
    {"linear(32,48) rmsnorm linear(48,32) layernorm", 33, 32},
    {"linear(32,48) reshape(24) gelu reshape(96) linear(96,8)", 10, 32},
    {"linear(7,1) gelu linear(1,5)", 3, 7},
    {"rmsnorm linear(96,64) gelu linear(64,96) add", 50, 96, DType::f16},
    {"make_extra_output>r linear(40,40) bias make_extra_output>s silu linear(40,40) add<s add<r",
     31, 40, DType::bf16},
    {"l2norm linear(24,48) sreglu(layout=swapped) linear(24,9) relu", 13, 24},
    {"linear(40,60) act(\"scaled(silu)\") linear(60,20) add", 25, 40, DType::bf16},
    // Recipes.
    {"linear(64,256) bias geglu linear(128,64)", 65, 64, DType::bf16, "delayed"},
    {"linear(64,256) bias swiglu linear(128,64)", 131, 64, DType::f16, "delayed"},
    {"linear(33,65) bias silu linear(65,7) bias", 19, 33, DType::f32, "delayed"},
    {"linear(64,256) bias swiglu linear(128,64)", 129, 64, DType::bf16, "current"},
    {"quantize linear(64,64) quantize gelu", 33, 64, DType::bf16, "current"},
    {"rmsnorm(35) linear(35,50) bias gelu linear(50,35) add", 37, 35, DType::f16, "current"},
    {"linear(64,256) bias swiglu linear(128,64)", 130, 64, DType::bf16, "mxfp8"},
    {"make_extra_output>r layernorm linear(96,64) bias silu linear(64,96) bias add<r", 50, 96,
     DType::bf16, "mxfp8"},
    {"linear(33,66) swiglu(layout=\"interleaved(1)\") linear(33,65) dropout(0.2) add", 45, 33,
     DType::f32, "mxfp8"},
    {"linear(160,256) bias swiglu linear(128,64)", 131, 160, DType::f32, "block"},
    {"layernorm linear(72,130) bias geglu linear(65,72) make_extra_output", 67, 72, DType::f16,
     "block"},
    {"linear(32,64) reshape(32) bias quantize gelu linear(32,16)", 24, 32, DType::bf16, "delayed"},
    {"bias quantize silu quantize", 35, 67, DType::bf16, "mxfp8"},
    {"quantize gelu quantize rmsnorm", 130, 35, DType::f32, "block"},
    {"linear(64,128) gelu(keep=recompute) linear(128,64)", 40, 64, DType::bf16, "mxfp8"},
    // Not every gradient is requested.
    {"linear(48,96) bias swiglu linear(48,24)", 33, 48, DType::bf16, "none", 0b001},
    {"linear(48,96) bias swiglu linear(48,24)", 33, 48, DType::bf16, "delayed", 0b110},
    {"linear(48,96) bias swiglu linear(48,24)", 33, 48, DType::f32, "none", 0b101, false},
    {"linear(48,96) bias swiglu linear(48,24)", 33, 48, DType::bf16, "mxfp8", 0b011, false},
    {"linear(48,96) bias gelu linear(96,24) bias", 30, 48, DType::f16, "block", 0b0010, false},
    {"rmsnorm(48) linear(48,32) bias gelu", 30, 48, DType::bf16, "current", 0b010},
    {"layernorm(48) linear(48,32) add rmsnorm", 30, 48, DType::f16, "none", 0b1001, false},
    {"gelu bias silu bias add", 30, 48, DType::bf16, "none", 0b01, false},
    {"make_extra_output gelu linear(48,24) make_extra_output", 30, 48, DType::f16, "current", 0,
     false},
};
INSTANTIATE_TEST_SUITE_P(Plans, Chains, testing::ValuesIn(kCases));

// Ops with matching widths, and a residual around some of them.
std::string random_chain(std::mt19937& random, int64_t cols) {
  const auto pick = [&](std::initializer_list<const char*> list) {
    return std::string(list.begin()[random() % list.size()]);
  };
  std::string text;
  int64_t residual = 0;
  const auto linear = [&](int64_t to) {
    text += str("linear(", cols, ",", to, ") ");
    cols = to;
  };
  for (size_t ops = 3 + random() % 9; ops > 0; --ops) {
    switch (random() % 10) {
      case 0:
        text += pick({"bias ", "scale(0.5) ", "add ", "make_extra_output ", "quantize "});
        break;
      case 1:
      case 2:
        text += pick({"gelu ", "silu(keep=fp8) ", "tanh(keep=recompute) ", "mish "});
        break;
      case 3:
        if (cols % 2 != 0) break;
        text += pick({"swiglu ", "geglu(layout=swapped) ", "reglu(layout=\"interleaved(1)\") ",
                      "glu(keep=recompute) ", "swiglu(keep=fp8) "});
        cols /= 2;
        break;
      case 4:
      case 5:
        linear(std::array{16, 24, 40, 66}[random() % 4]);
        break;
      case 6:
        text += pick({"rmsnorm ", "layernorm ", "l2norm "});
        break;
      case 7:
        if (cols <= 64) text += "dropout(0.25) ";  // the width of the test's random numbers
        break;
      case 8:
        text += "act(\"scaled(silu)\") ";
        break;
      default:
        if (residual == 0) text += "make_extra_output>r ";
        if (residual == 0) residual = cols;
    }
  }
  if (residual > 0 && residual != cols) linear(residual);
  return text + (residual > 0 ? "add<r" : "identity");
}

// Seeded: the same chains in every run.
TEST(RandomChains, EqualTheirOpsOneByOneAndStoreNothingInVain) {
  std::mt19937 random(20);
  for (int i = 0; i < 250 && !testing::Test::HasFailure(); ++i) {
    const auto any = [&](auto list) { return *(list.begin() + random() % list.size()); };
    const int64_t cols = any(std::array{24, 33, 48, 64, 66});
    const std::string chain = random_chain(random, cols);
    Case c{chain.c_str(), any(std::array{1, 12, 33, 70}), cols};
    c.dtype = any(std::array{DType::f32, DType::bf16, DType::f16});
    c.recipe = any(std::array{"none", "delayed", "current", "mxfp8", "block"});
    const auto frozen = random() % 2 ? 0 : static_cast<unsigned>(random() % 16);
    const size_t parameters = Plan::build(chain, c.request()).with(Role::param).size();
    c.frozen = frozen & ((1U << std::min<size_t>(parameters, 4)) - 1);
    SCOPED_TRACE(testing::PrintToString(c));
    expect_equal_to_its_ops(c);
    expect_thrift(c);
  }
}

const char* const kMlp = "linear(64,256) bias swiglu linear(128,64)";

PlanRequest mlp(const char* name, Keep keep) {
  PlanRequest r;
  r.dtype = DType::bf16;
  r.recipe = recipe(name);
  r.keep = keep;
  r.options.precision = Precision::strict;
  return r;
}

// The saved bytes: x and the output of the activation as the linears read them, and the input of
// the activation.
TEST(Keeping, BytesFollowThePolicy) {
  constexpr int64_t kRows = 256;
  const auto saved = [](const char* name, Keep keep) {
    PlanRequest r = mlp(name, keep);
    r.options.device = Device::null;
    return Plan::build(kMlp, r).saved_bytes(kRows);
  };
  const int64_t z = kRows * 256 * 2;  // bf16
  const int64_t z_fp8 = kRows * 256 + 2 * kRows * 4;
  // The input of the chain belongs to the caller, so it is not saved.
  EXPECT_EQ(saved("none", Keep::input), z + kRows * 128 * 2);
  EXPECT_EQ(saved("none", Keep::fp8), z_fp8 + kRows * 128 * 2);
  EXPECT_EQ(saved("none", Keep::recompute), z);
  const int64_t x = kRows * 64 + 4;
  EXPECT_EQ(saved("delayed", Keep::input), x + z + kRows * 128 + 4);
  EXPECT_EQ(saved("delayed", Keep::fp8), x + z_fp8 + kRows * 128 + 4);
  EXPECT_EQ(saved("delayed", Keep::recompute), x + z);
  // One additional amax: recomputed values use the same scale.
  EXPECT_EQ(saved("current", Keep::recompute), x + z + 4);
  EXPECT_EQ(saved("current", Keep::input), x + z + kRows * 128 + 4);
  EXPECT_EQ(saved("current", Keep::fp8), x + z_fp8 + kRows * 128 + 4);
  // Of two encodings only the one that backward reads is saved, with its scales.
  const auto columnwise = [](int64_t cols) { return kRows * cols + kRows / 32 * rup(cols, 128); };
  EXPECT_EQ(saved("mxfp8", Keep::input), columnwise(64) + z + columnwise(128));
  EXPECT_EQ(saved("mxfp8", Keep::fp8), columnwise(64) + z_fp8 + columnwise(128));
  EXPECT_EQ(saved("mxfp8", Keep::recompute), columnwise(64) + z);
  const auto block = [](int64_t cols) { return kRows * cols + kRows / 128 * cols * 4; };
  EXPECT_EQ(saved("block", Keep::input), block(64) + z + block(128));
  EXPECT_EQ(saved("block", Keep::fp8), block(64) + z_fp8 + block(128));
  EXPECT_EQ(saved("block", Keep::recompute), block(64) + z);
}

TEST(Keeping, RecomputingGivesTheSameBits) {
  for (const char* name : {"none", "delayed", "current", "mxfp8", "block"}) {
    std::vector<Numbers> first;
    for (const Keep keep : {Keep::input, Keep::recompute}) {
      PlanRequest r = mlp(name, keep);
      r.options.rounding = Rounding::eager;  // then `input` also continues from the stored values
      Session s(kMlp, r, 77);
      std::map<std::string, Numbers> given;
      fill(s, given);
      s.run(Pass::forward);
      s.run(Pass::backward);
      std::vector<Numbers> all{s.get("y"), s.get("dx")};
      for (const size_t g : s.plan.with(Role::grad)) all.push_back(s.get(s.plan.buffers()[g].name));
      if (keep == Keep::input)
        first = all;
      else
        for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], first[i]) << name << " " << i;
    }
  }
}

// Also with `once`: as if the tensor had been stored at that place.
TEST(Keeping, RecomputingStartsFromWhatWasStored) {
  for (const char* name : {"none", "delayed", "current", "mxfp8", "block"}) {
    PlanRequest r = mlp(name, Keep::recompute);
    Session whole("linear(64,256) bias swiglu linear(128,64):down", r, 77);
    EXPECT_NE(whole.plan.describe(77).find("swiglu2.in is carried on as stored"),
              std::string::npos);
    EXPECT_NE(whole.plan.describe(77).find("down.x.again is computed again"), std::string::npos);
    std::map<std::string, Numbers> given;
    fill(whole, given);
    whole.run(Pass::forward);
    whole.run(Pass::backward);
    r.keep = Keep::input;
    r.cols = 64;
    Session first("linear(64,256) bias", r, 77);
    for (const char* tensor : {"x", "linear0.weight", "bias1.bias"})
      first.set(tensor, given[tensor]);
    first.run(Pass::forward);
    r.cols = 256;
    Session second("swiglu linear(128,64):down", r, 77);
    second.set("x", first.get("y"));
    second.set("down.weight", given["down.weight"]);
    second.set("dy", given["dy"]);
    second.run(Pass::forward);
    second.run(Pass::backward);
    EXPECT_EQ(whole.get("y"), second.get("y")) << name;
    EXPECT_EQ(whole.get("ddown.weight"), second.get("ddown.weight")) << name;
  }
}

TEST(Gradients, OnlyThoseThatAreAskedFor) {
  PlanRequest all = mlp("none", Keep::input);
  Session whole(kMlp, all, 33);
  std::map<std::string, Numbers> given;
  fill(whole, given);
  whole.run(Pass::forward);
  whole.run(Pass::backward);
  for (const bool input : {false, true})
    for (size_t frozen = 0; frozen < 8; ++frozen) {
      PlanRequest r = all;
      r.input_grad = input;
      for (size_t p = 0; p < 3; ++p)
        r.parameter_grads.push_back({.wanted = (frozen >> p & 1U) == 0});
      Session s(kMlp, r, 33);
      for (const auto& [name, v] : given)
        if (s.has(name)) s.set(name, v);
      s.run(Pass::forward);
      if (s.has("dy")) s.run(Pass::backward);
      EXPECT_EQ(s.get("y"), whole.get("y"));
      EXPECT_EQ(s.has("dx"), input);
      size_t wanted = input;
      for (size_t p = 0; p < 3; ++p) wanted += (frozen >> p & 1U) == 0;
      EXPECT_EQ(s.plan.with(Role::grad).size(), wanted);
      for (const size_t g : s.plan.with(Role::grad)) {
        const std::string& name = s.plan.buffers()[g].name;
        EXPECT_EQ(s.get(name), whole.get(name)) << name << " frozen " << frozen;
      }
    }
}

TEST(Gradients, AccumulateIntoMainGrads) {
  const char* chain = "rmsnorm(48) linear(48,32) bias gelu";
  PlanRequest r;
  r.dtype = DType::bf16;
  r.parameter_grads.assign(3, {.dtype = DType::f32});
  Session once(chain, r, 40);
  std::map<std::string, Numbers> given;
  fill(once, given);
  once.run(Pass::forward);
  once.run(Pass::backward);
  r.parameter_grads.assign(3, {.dtype = DType::f32, .accumulate = true});
  Session more(chain, r, 40);
  for (const auto& [name, v] : given) more.set(name, v);
  std::map<std::string, Numbers> before;
  for (const size_t g : more.plan.with(Role::grad)) {
    const std::string& name = more.plan.buffers()[g].name;
    if (name == "dx") continue;
    before[name] = rounded(normal(more.get(name).size(), 5), DType::f32);
    more.set(name, before[name]);
  }
  more.run(Pass::forward);
  more.run(Pass::backward);
  ASSERT_EQ(before.size(), 3U);
  for (const auto& [name, v] : before) {
    const Numbers d = once.get(name), sum = more.get(name);
    for (size_t i = 0; i < v.size(); ++i)
      EXPECT_EQ(sum[i], static_cast<double>(static_cast<float>(v[i]) + static_cast<float>(d[i])))
          << name;
  }
}

TEST(Evaluation, HasNoDropout) {
  PlanRequest r;
  r.cols = 24;
  r.training = false;
  Session s("bias dropout(0.5) gelu", r, 9), plain("bias scale(1) gelu", r, 9);
  EXPECT_FALSE(s.has("rng"));
  std::map<std::string, Numbers> given;
  for (Session* one : {&s, &plain}) {
    fill(*one, given);
    one->run(Pass::forward);
    one->run(Pass::backward);
  }
  EXPECT_EQ(s.get("y"), plain.get("y"));
  EXPECT_EQ(s.get("dx"), plain.get("dx"));
  EXPECT_EQ(s.get("dbias0.bias"), plain.get("dbias0.bias"));
}

// Parameters in fp32 with 16-bit activations.
TEST(Parameters, MayHaveADTypeOfTheirOwn) {
  for (const char* name : {"none", "current"}) {
    const Case c{"layernorm(40) linear(40,64) bias geglu linear(32,40)", 33, 40, DType::bf16, name};
    PlanRequest r = c.request();
    r.parameter_dtype = DType::f32;
    Session s(c.chain, r, c.rows);
    std::map<std::string, Numbers> given;
    fill(s, given);
    s.run(Pass::forward);
    s.run(Pass::backward);
    Chain64 exact(c.chain, c.rows, c.cols, given);
    EXPECT_LE(distance(s.get("y"), exact.forward(given["x"])), tolerance(c));
    EXPECT_LE(distance(s.get("dx"), exact.backward(given["dy"])), tolerance(c));
    for (const Buffer& b : s.plan.buffers()) {
      if (b.role != Role::grad || b.name == "dx") continue;
      EXPECT_EQ(b.dtype, DType::f32) << b.name;
      EXPECT_LE(distance(s.get(b.name), exact.grads.at(b.name)), tolerance(c)) << b.name;
    }
  }
}

TEST(Rows, OnePlanServesAnyNumber) {
  const PlanRequest r = mlp("mxfp8", Keep::input);
  const Plan plan = Plan::build(kMlp, r);
  std::vector<Numbers> first_rows;
  for (const int64_t rows : {0, 1, 7, 4096}) {
    Session s(kMlp, r, rows);
    EXPECT_EQ(&data_of(s.plan), &data_of(plan));
    std::map<std::string, Numbers> given;
    fill(s, given);
    s.run(Pass::forward);
    s.run(Pass::backward);
    if (rows == 0) {
      for (const char* sum : {"dlinear0.weight", "dbias1.bias", "dlinear3.weight"})
        for (const double v : s.get(sum)) ASSERT_EQ(v, 0) << sum;
      continue;
    }
    // Seeds do not depend on the number of rows, so the first row is always the same.
    Numbers first = s.get("y"), dx = s.get("dx");
    first.resize(64);
    first.insert(first.end(), dx.begin(), dx.begin() + 64);
    first_rows.push_back(first);
  }
  EXPECT_EQ(first_rows[0], first_rows[1]);
  EXPECT_EQ(first_rows[0], first_rows[2]);
}

TEST(Opaque, RunsBetweenTwoSegmentsAndIsNamedInItsErrors) {
  PlanRequest r;
  r.cols = 24;
  OpaqueOp twice;
  twice.forward = [](int64_t rows, const View& x, const View& y) {
    for (int64_t i = 0; i < rows * x.cols; ++i)
      static_cast<float*>(y.data)[i] = 2 * static_cast<const float*>(x.data)[i];
  };
  twice.backward = [](int64_t rows, const View&, const View& dy, const View& dx) {
    for (int64_t i = 0; i < rows * dy.cols; ++i)
      static_cast<float*>(dx.data)[i] = 2 * static_cast<const float*>(dy.data)[i];
  };
  r.opaque["twice"] = twice;
  Session s("gelu twice silu", r, 9);
  EXPECT_EQ(data_of(s.plan).forward.size(), 3U) << s.plan.describe(9);
  EXPECT_EQ(data_of(s.plan).backward.size(), 3U) << s.plan.describe(9);
  std::map<std::string, Numbers> given;
  fill(s, given);
  s.run(Pass::forward);
  s.run(Pass::backward);
  Chain64 exact("gelu scale(2) silu", 9, 24, given);
  EXPECT_LE(distance(s.get("y"), exact.forward(given["x"])), 1e-6);
  EXPECT_LE(distance(s.get("dx"), exact.backward(given["dy"])), 1e-6);
  r.opaque["twice"].forward = [](int64_t, const View&, const View&) {
    throw std::runtime_error("no luck today");
  };
  Session bad("gelu twice:lucky silu", r, 9);
  fill(bad, given);
  try {
    bad.run(Pass::forward);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "lucky: no luck today");
  }
}

// Expects the error of an op's callback in the message of the run.
template <class Throw>
void expect_named(Pass pass, Throw thrower, Code code, const char* message) {
  PlanRequest r;
  r.cols = 6;
  r.opaque["mine"].forward = [=](int64_t, const View&, const View&) {
    if (pass == Pass::forward) thrower();
  };
  r.opaque["mine"].backward = [=](int64_t, const View&, const View&, const View&) {
    if (pass == Pass::backward) thrower();
  };
  Session s("gelu mine silu", r, 3);
  std::map<std::string, Numbers> given;
  fill(s, given);
  if (pass == Pass::backward) s.run(Pass::forward);
  try {
    s.run(pass);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), message);
    EXPECT_EQ(static_cast<int>(e.code()), static_cast<int>(code));
  }
}

TEST(Opaque, WhateverIsThrownComesBackWithTheName) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    expect_named(
        pass, [] { throw std::out_of_range("row 7"); }, Code::runtime, "mine1: row 7");
    expect_named(
        pass, [] { fail(Code::unsupported, "not on mondays"); }, Code::unsupported,
        "mine1: not on mondays");
    expect_named(
        pass, [] { throw 7; }, Code::runtime,  // NOLINT: tests a type other than std::exception
        "mine1: it threw something that is no std::exception");
  }
}

// Sums two rows to one, and three columns to one.
TEST(Opaque, MayChangeRowsAndColumns) {
  PlanRequest r;
  r.cols = 6;
  OpaqueOp pool;
  pool.cols = 2;
  pool.rows_div = 2;
  pool.forward = [](int64_t rows, const View& x, const View& y) {
    ASSERT_EQ(rows, x.rows);
    ASSERT_EQ(y.rows, rows / 2);
    for (int64_t i = 0; i < y.rows * y.cols; ++i) static_cast<float*>(y.data)[i] = 0;
    for (int64_t i = 0; i < rows * 6; ++i)
      static_cast<float*>(y.data)[i / 12 * 2 + i % 6 / 3] += static_cast<const float*>(x.data)[i];
  };
  pool.backward = [](int64_t rows, const View&, const View& dy, const View& dx) {
    for (int64_t i = 0; i < rows * 6; ++i)
      static_cast<float*>(dx.data)[i] = static_cast<const float*>(dy.data)[i / 12 * 2 + i % 6 / 3];
  };
  r.opaque["pool"] = pool;
  Session s("scale(2) pool bias", r, 4);
  std::map<std::string, Numbers> given;
  fill(s, given);
  s.run(Pass::forward);
  s.run(Pass::backward);
  Numbers y(4, 0.0), dbias(2, 0.0);
  for (size_t i = 0; i < 24; ++i) y[i / 12 * 2 + i % 6 / 3] += 2 * given["x"][i];
  for (size_t i = 0; i < 4; ++i) {
    y[i] += given["bias2.bias"][i % 2];
    dbias[i % 2] += given["dy"][i];
  }
  EXPECT_LE(distance(s.get("y"), y), 1e-6);
  EXPECT_LE(distance(s.get("dbias2.bias"), dbias), 1e-6);
  for (size_t i = 0; i < 24; ++i)
    EXPECT_EQ(s.get("dx")[i], 2 * given["dy"][i / 12 * 2 + i % 6 / 3]) << i;
  expect_error([&] { s.plan.check_rows(3); }, Code::invalid_argument,
               {"pool1: of 3 rows it makes 3*1/2"});
}

TEST(Opaque, WithoutABackwardPlansForwardOnly) {
  PlanRequest r;
  r.cols = 6;
  r.opaque["mine"].forward = [](int64_t, const View&, const View&) {};
  expect_error([&] { Plan::build("gelu mine", r); }, Code::invalid_argument,
               {"line 1, column 6: mine1: it has no backward; give one, or plan the forward pass"});
  r.backward = false;
  EXPECT_EQ(data_of(Plan::build("gelu mine silu", r)).forward.size(), 3U);
  r.opaque["mine"].rows_div = 0;
  expect_error([&] { Plan::build("mine", r); }, Code::invalid_argument,
               {"mine0: the row factor is 1/0; both must be positive"});
}

TEST(Opaque, IsRefusedWhenItCannotRun) {
  PlanRequest r;
  r.cols = 6;
  r.backward = false;
  OpaqueOp& mine = r.opaque["mine"];
  const auto refused = [&](const char* chain, std::string_view why) {
    expect_error([&] { Plan::build(chain, r); }, Code::invalid_argument, {why});
  };
  refused("gelu mine", "line 1, column 6: mine1: it has no forward; give one");
  mine.forward = [](int64_t, const View&, const View&) {};
  mine.cols = -8;
  refused("mine", "mine0: cols is -8; it must be from 0, which keeps those of its input, to 1099");
  mine.cols = 0;
  mine.rows_mul = int64_t{1} << 40;
  refused("mine mine", "mine1: its output has 1099511627776/1*1099511627776/1 times");
  mine.rows_mul = 1;
  r.opaque["linear"] = mine;
  refused("mine linear(6,6)", "linear1: the opaque op 'linear' is called as one of the library's");
}

// The gradient of an extra input may be accumulated into existing values.
TEST(Plans, TextsOfOneChainShareOne) {
  const auto plan = [](const char* chain, bool backward) {
    PlanRequest r;
    r.backward = backward;
    return &Plan::build(chain, r).buffers();
  };
  const auto* const first = plan("linear(8,16) bias gelu", true);
  EXPECT_EQ(first, plan("linear(8,16) bias gelu", true));
  EXPECT_EQ(first, plan("linear( 8, 16 )\n  bias   gelu", true));
  EXPECT_NE(first, plan("linear(8,16) bias gelu", false));
  EXPECT_NE(first, plan("linear(8,16) bias gelu_erf", true));
}

TEST(Plans, ExtraGradientsAccumulate) {
  PlanRequest request;
  request.cols = 24;
  request.extra_grads = {{.accumulate = true}};
  Session s("gelu add", request, 5);
  std::map<std::string, Numbers> given;
  fill(s, given);
  const Numbers before = rounded(normal(5 * 24, 77), DType::f32);
  s.set("dextra0", before);
  s.run(Pass::forward);
  s.run(Pass::backward);
  const Numbers after = s.get("dextra0");
  for (size_t i = 0; i < after.size(); ++i)
    EXPECT_EQ(after[i], static_cast<double>(static_cast<float>(before[i]) +
                                            static_cast<float>(given["dy"][i])));
  request.extra_grads = {{.accumulate = true}};
  request.cols = 24;
  expect_error([&] { Plan::build("act(\"scaled(gelu)\")", request); }, Code::invalid_argument,
               {"extra0", "sum over a row"});
}

TEST(Mistakes, NameTheOpTheValueAndTheRule) {
  const std::pair<const char*, const char*> kMistakes[] = {
      {"linear(512,64)", "1: linear0: input has 64 columns, weight wants 512"},
      {"linear:fc1", "1: fc1: it has no width; write linear(in,out) or linear(out=n)"},
      {"linear(64,0)", "1: linear0: out is 0; it must be a whole number, at least 1"},
      {"bias(1,2)", "1: bias0: 2 arguments; it takes n keep"},
      {"gelu(alpha=2)", "1: gelu0: there is no argument 'alpha'; it takes layout keep"},
      {"scale(2) linear(63,2)", "10: linear1: input has 64 columns, weight wants 63"},
      {"linear(out=7) swiglu",
       "15: swiglu1: its input has 7 columns; a gated input holds a and b, so its columns must be "
       "even"},
      {"swiglu(layout=\"interleaved(5)\")",
       "1: swiglu0: interleaved(5) needs a half width divisible by 5, it is 32"},
      {"gelu(keep=all)", "1: gelu0: keep is 'all'; it must be input, fp8 or recompute"},
      {"linear(64,8,keep=fp8)", "1: linear0: keep is for ops with a formula; take it away"},
      {"dropout(2)", "1: dropout0: p is 2; it must be from 0 to 1"},
      {"add<r", "1: add0: nothing before it writes the channel 'r'; add make_extra_output>r"},
      {"make_extra_output>r gelu",
       "1: make_extra_output0: nothing after it reads the channel 'r'; read it with '<', or take "
       "'>' away to give it to the caller"},
      {"gelu<r", "1: gelu0: it reads 1 channels, but has 0 extra inputs; take '<' away"},
      {"rmsnorm(65)", "1: rmsnorm0: input has 64 columns, gamma wants 65"},
      {"linear(64,8) bias(5)", "14: bias1: input has 8 columns, bias wants 5"},
      {"bias(foo)",
       "1: bias0: n is 'foo'; it must be a number of fp32, at most 3.4028235e38 in size"},
      {"linear(64,8,in=5)", "1: linear0: 'in' is given twice; keep one"},
      {"rmsnorm(64,n=16)", "1: rmsnorm0: 'n' is given twice; keep one"},
      {"silu(layout=swapped)", "1: silu0: it has no halves, so no layout; take the argument away"},
      {"reshape(1e18)", "1: reshape0: cols is 1e+18; it must be at most 1099511627776"},
  };
  for (const auto& [chain, message] : kMistakes) {
    PlanRequest r;
    r.cols = 64;
    try {
      Plan::build(chain, r);
      ADD_FAILURE() << chain;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()), std::string("chain: line 1, column ") + message) << chain;
    }
  }
  PlanRequest r;
  // The same if the chain defines the width of its input.
  for (const auto& [chain, message] : {std::pair{"lineer(4,4)", "1: lineer0: there is no op of"},
                                       {"gelu linear(-1,4)", "6: linear1: in is -1; it must be"},
                                       {"linear(8,8,8)", "1: linear0: 3 arguments; it takes in"},
                                       {"rmsnorm(8,epsilon=1)", "1: rmsnorm0: there is no arg"},
                                       {"bias(8) scale(1e300)", "9: scale1: c is '1e+300'; it"}})
    expect_error([&, chain = chain] { Plan::build(chain, r); }, Code::invalid_argument,
                 {str("chain: line 1, column ", message).c_str()});
  expect_error([&] { Plan::build("linear(4,8) geglu # halves\n\n linear(5,6)", r); },
               Code::invalid_argument,
               {"chain: line 3, column 2: linear2: input has 4 columns, weight wants 5"});
  expect_error([&] { Plan::build("linear(4,4):a gelu linear(4,4):a", r); }, Code::invalid_argument,
               {"two tensors are called 'a.weight'; give an op another label"});
  EXPECT_THROW(Plan::build("gelu", r), Error);
  r.cols = 6;
  const Plan p = Plan::build("reshape(4) gelu", r);
  expect_error([&] { p.check_rows(3); }, Code::invalid_argument,
               {"reshape0: of 3 rows it makes 3*3/2, which is not whole: give a multiple of 2"});
  EXPECT_NO_THROW(p.check_rows(4));
}

TEST(Mistakes, GradientsThatAreNotThere) {
  const auto refused = [](const PlanRequest& r, std::string_view why) {
    expect_error([&] { Plan::build("linear(4,8) bias add", r); }, Code::invalid_argument, {why});
  };
  refused({.parameter_grads = std::vector<GradRequest>(3)},
          "plan: parameter_grads has 3 entries; the chain has 2 parameters");
  refused({.extra_grads = std::vector<GradRequest>(2)},
          "plan: extra_grads has 2 entries; the chain has 1 extra inputs");
  refused({.parameter_grads = {{}, {.dtype = DType::e4m3}}},
          "plan: the dtype of parameter_grads[1] is e4m3; it must be f32, f16 or bf16");
  refused({.extra_grads = {{.dtype = DType::e8m0}}}, "plan: the dtype of extra_grads[0] is e8m0");
  for (const DType d : {DType::e4m3, DType::e5m2, DType::e8m0})
    refused({.parameter_dtype = d}, str("plan: parameter_dtype is ", info(d).name, "; it must be"));
}

TEST(Mistakes, SizesThatNoNumberHolds) {
  constexpr int64_t kMany = int64_t{1} << 60;
  const Plan p = Plan::build("linear(4,8) bias swiglu", {});
  const auto refused = [](auto call, std::string_view why) {
    expect_error(call, Code::invalid_argument, {why});
  };
  const char* why =
      "plan: with 'x' of 4 columns its tensors have more than 72057594037927936 bytes, the most "
      "that a plan may have, at 1152921504606846976 rows; give fewer rows or columns";
  refused([&] { p.check_rows(kMany); }, why);
  refused([&] { return p.workspace_bytes(kMany); }, why);
  refused([&] { return p.saved_bytes(kMany); }, why);
  refused([&] { return p.describe(kMany); }, why);
  refused([&] { return p.json(kMany); }, why);
  refused([&] { return p.html(kMany); }, why);
  refused([&] { return p.buffers()[0].bytes(kMany); }, why);
  const std::vector<void*> none(p.buffers().size());
  refused([&] { p.run(Pass::forward, kMany, none, nullptr); }, why);
  // Each size fits in 64 bits, but their sum does not.
  const int64_t whole = int64_t{1} << 52;
  EXPECT_EQ(p.buffers()[0].bytes(whole), int64_t{1} << 56);
  refused([&] { p.check_rows(whole); }, "at 4503599627370496 rows");
  refused(
      [] { Plan::build("linear(2000000000,2000000000)", {}); },
      "line 1, column 1: plan: with 'linear0.weight' of 2000000000 columns its tensors have more "
      "than 72057594037927936 bytes, the most that a plan may have, without any rows");
  refused([] { Plan::build("gelu", {.cols = int64_t{1} << 62}); },
          "plan: the input has 4611686018427387904 columns; it may have at most 1099511627776");
  const Plan wide = Plan::build("linear(1000000,1000000)", {.dtype = DType::bf16});
  EXPECT_NO_THROW(wide.check_rows(4'000'000));
  refused([&] { wide.check_rows(5'000'000); },
          "plan: linear has more than 9223372036854775807 operations at 5000000 rows");
  // Few elements, but the computation of their number overflows.
  PlanRequest r{.cols = 1, .backward = false};
  OpaqueOp& mine = r.opaque["mine"];
  mine.rows_mul = (int64_t{1} << 31) - 1;
  mine.rows_div = int64_t{1} << 31;
  mine.forward = [](int64_t, const View&, const View&) {};
  refused([&] { Plan::build("mine", r).check_rows(int64_t{1} << 40); },
          "mine0: of 1099511627776 rows it makes 1099511627776*2147483647/2147483648; the first "
          "product must be at most 72057594037927936");
}

TEST(Mistakes, PassesThatAreNotPlanned) {
  const auto refused = [](const PlanRequest& r, std::string_view why) {
    Session s("gelu", r, 2);
    expect_error([&] { s.run(Pass::backward); }, Code::invalid_argument, {why});
  };
  refused({.cols = 4, .backward = false},
          "plan: it has no backward pass, since it was planned for the forward pass alone");
  refused({.cols = 4, .input_grad = false},
          "plan: it has no backward pass, since no gradient is wanted; ask for one");
}

TEST(Mistakes, WorkspacesOfPassesThatAreNotPlanned) {
  const Plan p = Plan::build("linear(4,8) bias", {.backward = false});
  EXPECT_GE(p.workspace_bytes(2), p.workspace_bytes(2, Pass::forward));
  expect_error([&] { return p.workspace_bytes(2, Pass::backward); }, Code::invalid_argument,
               {"plan: it has no backward pass", "planned for the forward pass alone"});
}

TEST(Mistakes, NoAddressOfTheRandomState) {
  Session s("dropout(0.5)", {.cols = 4}, 2);
  std::map<std::string, Numbers> given;
  fill(s, given);
  s.run(Pass::forward);
  std::vector<char> space(static_cast<size_t>(s.plan.workspace_bytes(2)) + 1);
  const std::pair<Pass, const char*> kNeeds[] = {
      {Pass::forward, "rng"}, {Pass::forward, "rng.saved"}, {Pass::backward, "rng.saved"}};
  for (const auto& [pass, name] : kNeeds) {
    std::vector<void*> memory;
    for (size_t i = 0; i < s.plan.buffers().size(); ++i)
      memory.push_back(i == s.number(name) ? nullptr : s.data(i));
    expect_error([&, pass = pass] { s.plan.run(pass, 2, memory, space.data()); },
                 Code::invalid_argument, {str("plan: no address for '", name, "', which")});
  }
}

Format fp8(Scaling s, DType d = DType::e4m3) { return {.dtype = d, .scaling = s}; }

// The scaling modes of the operands of the products of a pass, in order.
std::vector<std::pair<std::string, std::string>> operands(const Plan& plan, Pass pass) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const PlanStep& s : data_of(plan).steps(pass))
    if (const Gemm* const g = s.step.gemm())
      all.emplace_back(info(g->a.format.scaling).name, info(g->b.format.scaling).name);
  return all;
}
using Modes = std::vector<std::pair<std::string, std::string>>;

// x·wᵀ of the stored numbers in float64, or the sums of the magnitudes of its terms.
Numbers product64(Session& s, const char* x, const char* w, size_t rows, size_t cols, size_t inner,
                  bool magnitudes = false) {
  const Numbers a = s.get(x), b = s.get(w);
  Numbers made(rows * cols);
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < cols; ++c)
      for (size_t k = 0; k < inner; ++k) {
        const double term = a[r * inner + k] * b[c * inner + k];
        made[r * cols + c] += magnitudes ? std::abs(term) : term;
      }
  return made;
}

// The request for an op takes precedence over its text, and the text over the recipe of the plan.
TEST(Recipes, OfSingleOps) {
  constexpr const char* kChain = "linear(64,64,recipe=mxfp8) gelu linear(64,64) linear(64,64)";
  PlanRequest r;
  r.recipe = recipe("current");
  r.input_grad = false;
  EXPECT_EQ(operands(Plan::build(kChain, r), Pass::forward),
            (Modes{{"mxfp8", "mxfp8"}, {"current", "current"}, {"current", "current"}}));
  r.op_requests.resize(3);
  r.op_requests[0].recipe = recipe("block");
  r.op_requests[2].recipe = Recipe{};
  const Plan plan = Plan::build(kChain, r);
  EXPECT_EQ(operands(plan, Pass::forward),
            (Modes{{"block1x128", "block128x128"}, {"current", "current"}, {"none", "none"}}));
  EXPECT_EQ(operands(plan, Pass::backward), (Modes{{"none", "none"},
                                                   {"none", "none"},
                                                   {"current", "current"},
                                                   {"current", "current"},
                                                   {"block1x128", "block1x128"}}));
  EXPECT_EQ(print_chain(parse_chain(kChain)),
            "linear(64,64,recipe=mxfp8) gelu linear(64,64) linear(64,64)");
  r.op_requests.resize(4);
  expect_error([&] { Plan::build(kChain, r); }, Code::invalid_argument,
               {"op_requests has 4 entries", "3 linears"});
  expect_error([&] { Plan::build("linear(8,8,recipe=fp4)", {}); }, Code::invalid_argument,
               {"'fp4' is not a recipe"});
  r.op_requests = {{.recipe = Recipe{"mine", {DType::f16, Scaling::current}, {}, {}}}};
  expect_error([&] { Plan::build(kChain, r); }, Code::invalid_argument,
               {"recipe 'mine'", "current for f16", "e4m3 or e5m2"});
}

// Each operand is quantised or not, independently. The results match float64.
TEST(Recipes, OfSingleOperands) {
  const Format x = fp8(Scaling::current), w = fp8(Scaling::block128x128),
               g = fp8(Scaling::mxfp8, DType::e5m2);
  for (unsigned mask = 0; mask < 8; ++mask) {
    Recipe mine{"mine", mask & 1 ? x : Format{}, mask & 2 ? w : Format{}, mask & 4 ? g : Format{}};
    PlanRequest r;
    r.op_requests = {{.recipe = mine}};
    Session s("linear(96,160) bias gelu", r, 37);
    const auto name = [](const Format& f) { return std::string(info(f.scaling).name); };
    EXPECT_EQ(operands(s.plan, Pass::forward), (Modes{{name(mine.input), name(mine.weight)}}));
    std::map<std::string, Numbers> given;
    fill(s, given);
    s.run(Pass::forward);
    s.run(Pass::backward);
    // Half a step of e4m3 per quantised operand of the product, for the terms without cancellation.
    const double allowed = 0x1p-4 * (mask & 1) + 0x1.2p-4 * (mask >> 1 & 1) + 1e-6;
    const Numbers terms = product64(s, "x", "linear0.weight", 37, 160, 96, true);
    const Numbers exact = product64(s, "x", "linear0.weight", 37, 160, 96);
    const Numbers got = s.get("y");
    const Numbers bias = s.get("bias1.bias");
    for (size_t i = 0; i < got.size(); ++i) {
      const double z = exact[i] + bias[i % 160];
      const double want = z / (1 + std::exp(-1.5957691 * (z + 0.044715 * z * z * z)));
      // The slope of gelu is at most 1.13.
      EXPECT_LE(std::abs(want - got[i]), 1.13 * allowed * (terms[i] + 1)) << mask;
    }
  }
}

// A gradient that is dy, or another gradient, is not written.
TEST(Sharing, GradientsOfResiduals) {
  PlanRequest r;
  r.cols = 64;
  const Plan sum = Plan::build("bias dropout(0.5) add", r);
  const auto number = [](const Plan& p, std::string_view name) {
    for (size_t i = 0; i < p.buffers().size(); ++i)
      if (p.buffers()[i].name == name) return i;
    return p.buffers().size();
  };
  EXPECT_EQ(sum.owner(number(sum, "dextra0")), number(sum, "dy"));
  EXPECT_EQ(sum.uses()[number(sum, "dextra0")].same_as, static_cast<int>(number(sum, "dy")));
  EXPECT_EQ(data_of(sum).backward.size(), 1U);
  const Plan norm = Plan::build("add make_extra_output rmsnorm(64)", r);
  EXPECT_EQ(norm.owner(number(norm, "dx")), number(norm, "dextra0"));
  EXPECT_TRUE(norm.uses()[number(norm, "extra_out0")].reads[1]);
  EXPECT_EQ(number(norm, "rmsnorm2.in"), norm.buffers().size());
  // Another dtype, or memory that is added to, is written.
  r.extra_grads = {{.dtype = DType::bf16}};
  const Plan cast = Plan::build("bias add", r);
  EXPECT_EQ(cast.owner(number(cast, "dextra0")), number(cast, "dextra0"));
  r.extra_grads = {{.accumulate = true}};
  const Plan added = Plan::build("bias add", r);
  EXPECT_EQ(added.owner(number(added, "dextra0")), number(added, "dextra0"));
  // Two addresses for one tensor are an error.
  r.extra_grads = {};
  Session s("bias add", r, 3);
  std::vector<uint8_t> other(1 << 12), space(1 << 12);
  std::vector<void*> memory;
  for (size_t i = 0; i < s.plan.buffers().size(); ++i) memory.push_back(s.data(i));
  memory[s.number("dextra0")] = other.data();
  expect_error([&] { s.plan.run(Pass::backward, 3, memory, space.data()); }, Code::invalid_argument,
               {"'dextra0' is 'dy' itself", "same address"});
}

// Inputs, parameters and extra inputs in dtypes of their own, against float64.
TEST(DTypes, OfSingleTensors) {
  PlanRequest r;
  r.dtype = DType::bf16;
  r.input_dtype = DType::f32;
  r.parameter_dtypes = {DType::bf16, DType::f32};
  r.extra_dtypes = {DType::f16};
  Session s("linear(48,32) bias add", r, 9);
  const auto dtype = [&](const char* name) { return s.plan.buffers()[s.number(name)].dtype; };
  EXPECT_EQ(dtype("x"), DType::f32);
  EXPECT_EQ(dtype("dx"), DType::f32);
  EXPECT_EQ(dtype("linear0.weight"), DType::bf16);
  EXPECT_EQ(dtype("dlinear0.weight"), DType::bf16);
  EXPECT_EQ(dtype("bias1.bias"), DType::f32);
  EXPECT_EQ(dtype("dbias1.bias"), DType::f32);
  EXPECT_EQ(dtype("extra0"), DType::f16);
  EXPECT_EQ(dtype("dextra0"), DType::f16);
  EXPECT_EQ(dtype("y"), DType::bf16);
  std::map<std::string, Numbers> given;
  fill(s, given);
  s.run(Pass::forward);
  s.run(Pass::backward);
  const Numbers exact = product64(s, "x", "linear0.weight", 9, 32, 48);
  const Numbers y = s.get("y"), bias = s.get("bias1.bias"), extra = s.get("extra0");
  for (size_t i = 0; i < y.size(); ++i) {
    const double want = exact[i] + bias[i % 32] + extra[i];
    // x is rounded to bf16 for the product, and y once.
    EXPECT_NEAR(y[i], want, 0x1p-8 * (std::abs(want) + 4)) << i;
  }
  const Numbers dy = s.get("dy"), dextra = s.get("dextra0");
  for (size_t i = 0; i < dy.size(); ++i)
    EXPECT_EQ(dextra[i], rounded_ref(DType::f16, static_cast<float>(dy[i])));
  r.extra_dtypes = {DType::e4m3};
  expect_error([&] { Plan::build("linear(48,32) bias add", r); }, Code::invalid_argument,
               {"extra_dtypes[0] is e4m3"});
}

// A product is two steps on CUDA if its body finds scales of blocks. The saved input of the
// activation is the memory between them.
TEST(Plan, AProductIsStoredOnce) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("block"), .target = "sm_90a"};
  r.options.device = Device::cuda;
  const auto find = [](const Plan& p, const std::string& name) {
    return std::ranges::find(p.buffers(), name, &Buffer::name) != p.buffers().end();
  };
  const Plan p = Plan::build("linear(256,512) swiglu linear(256,128)", r);
  const std::vector<PlanStep>& steps = data_of(p).forward;
  EXPECT_FALSE(find(p, "linear0.product")) << p.describe(256);
  const auto writers = [&](const std::string& name) {
    std::vector<std::string> list;
    for (const PlanStep& s : steps)
      for (const PlanStep::Write& w : s.writes)
        if (w.name == name) list.push_back(s.step.name);
    return list;
  };
  EXPECT_EQ(writers("swiglu1.in"), (std::vector<std::string>{"linear+swiglu.product"}));
  EXPECT_EQ(writers("linear2.x"), (std::vector<std::string>{"linear+swiglu"}));
  // Rows of 508 elements are padded between the steps.
  EXPECT_TRUE(find(Plan::build("linear(256,508) swiglu linear(254,128)", r), "linear0.product"));
}

TEST(Plan, DescriptionsListTheRandomState) {
  const Plan p = Plan::build("bias(8) dropout(0.5)", {});
  for (const std::string& text : {p.describe(4), p.json(4), p.html(4)}) {
    size_t found = 0;
    for (size_t at = text.find("rng.saved"); at != std::string::npos;
         at = text.find("rng.saved", at + 1))
      ++found;
    EXPECT_GE(found, 2U) << text;
  }
  EXPECT_NE(p.describe(4).find("reads  x, bias0.bias, rng.saved\n"), std::string::npos)
      << p.describe(4);
  EXPECT_NE(p.json(4).find(R"("reads":["dy:row","rng.saved:row"])"), std::string::npos)
      << p.json(4);
}

// The maker and the bytes are those of a call with these rows.
TEST(Plan, DescriptionsShowTheMakerOfTheRows) {
  PlanRequest r{.dtype = DType::bf16, .backward = false, .target = "sm_90a"};
  r.options.device = Device::cuda;
  const Plan p = Plan::build("linear(512,2048) bias swiglu", r);
  const auto has = [&](int64_t rows, const std::string& part) {
    const std::string text = p.describe(rows);
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  };
  has(4096, "maker  gemm, ");
  has(4096, "or     cublaslt below 513 rows, or where addresses or sizes do not fit: ");
  const int64_t inputs = 2 * (64 * 512 + 2048 * 512), product = 2 * 64 * 2048, bias = 2 * 2048;
  const int64_t bytes = inputs + bias + 2 * product + product / 2;
  has(64, str("maker  cublaslt, ", bytes, " bytes, "));
  has(64, str("steps  gemm linear+bias+swiglu.product, ", inputs + product,
              " bytes, then map linear+bias+swiglu by vector map, ", bias + product + product / 2,
              " bytes\n"));
  has(64, "or     gemm from 513 rows: gemm linear+bias+swiglu, ");
  EXPECT_EQ(p.describe(64).find("below 513 rows"), std::string::npos);
  EXPECT_NE(p.json(64).find(R"("maker":"cublaslt")"), std::string::npos) << p.json(64);
}

// cuBLASLt sums FP8 products of whole groups of 16 terms. Other weight gradients are decoded.
TEST(Plan, DescriptionsShowDecodedWeightGradients) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("delayed"), .target = "sm_90a"};
  r.options.device = Device::cuda;
  const Plan p = Plan::build("linear(64,128)", r);
  EXPECT_EQ(p.describe(112).find("maker  decode"), std::string::npos) << p.describe(112);
  const std::string text = p.describe(100);
  EXPECT_NE(text.find("maker  decode"), std::string::npos) << text;
  EXPECT_NE(text.find("steps  map linear.bwd.a by vector map, "), std::string::npos) << text;
}

// Both products of a linear's backward pass read the gradient. One step decodes it.
TEST(Plan, OperandsAreDecodedOnce) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("delayed"), .target = "sm_80"};
  r.options.device = Device::cuda;
  const Plan p = Plan::build("linear(64,128) bias swiglu linear(64,32)", r);
  std::map<int, size_t> decoded;  // by the buffer of the codes
  std::set<int> written;
  for (const PlanStep& s : data_of(p).backward) {
    if (s.why.find("decoded operand") != std::string::npos && s.step.is_map())
      ++decoded[s.in[s.step.loads[0].arg].buffer];
    for (const BufferView& v : s.in) {
      const bool own = v.buffer != kNoBuffer &&
                       p.buffers()[static_cast<size_t>(v.buffer)].role == Role::workspace;
      EXPECT_TRUE(!own || written.contains(v.buffer)) << s.step.name;
    }
    for (const BufferView& v : s.out) written.insert(v.buffer);
  }
  EXPECT_EQ(decoded.size(), 6U) << p.describe(64);  // dy, x and w of two linears
  for (const auto& [buffer, times] : decoded)
    EXPECT_EQ(times, 1U) << p.buffers()[static_cast<size_t>(buffer)].name << "\n" << p.describe(64);
}

// Calls with aligned addresses need no memory for the kernels of other calls.
TEST(Plan, AlignedCallsNeedLessWorkspace) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("delayed"), .target = "sm_90a"};
  r.options.device = Device::cuda;
  const Plan p = Plan::build("linear(256,512) swiglu linear(256,128)", r);
  constexpr int64_t kRows = 1 << 16;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const int64_t all = p.workspace_bytes(kRows, pass);
    const int64_t aligned = p.workspace_bytes(kRows, pass, {.aligned = true});
    // The decoded operand of the largest product, in bf16.
    EXPECT_LE(aligned, all - kRows * (pass == Pass::forward ? 256 : 512) * 2) << p.describe(kRows);
    EXPECT_GT(aligned, 0);
  }
}

// Kernels that take no calls in place take calls whose tensors are apart, with memory of their own.
TEST(Plan, AlignedCallsHaveTheWorkspaceOfTheirKernels) {
  size_t summed = 0;
  for (const char* const name : {"none", "delayed", "mxfp8", "block"})
    for (const char* const target : {"sm_80", "sm_90a", "sm_100a"}) {
      PlanRequest r{.dtype = DType::bf16, .recipe = recipe(name), .target = target};
      r.options = {.precision = Precision::strict, .device = Device::cuda};
      const Plan p = Plan::build("linear(256,256) bias add gelu linear(256,64)", r);
      for (const int64_t rows : {128, 256, 384})
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          const auto bytes = static_cast<size_t>(
              p.workspace_bytes(rows, pass, {.aligned = true, .separate = true}));
          for (const PlanStep& s : data_of(p).steps(pass)) {
            const auto address = [](int buffer) -> void* {
              return reinterpret_cast<void*>(static_cast<uintptr_t>(buffer + 1) << 30);
            };
            std::vector<View> in, out;
            fill(data_of(p), s.in, rows, address, in);
            fill(data_of(p), s.out, rows, address, out);
            const RunArgs call{
                .rows = s.rows(rows), .in = in, .out = out, .parameters = s.parameters};
            EXPECT_LE(s.chosen.kernel->workspace_for(call), bytes)
                << name << " " << target << " " << s.step.name << "\n"
                << p.describe(rows);
            summed += s.chosen.kernel->way(call).maker == "block map" &&
                      s.chosen.kernel->workspace_for(call) > 0;
          }
        }
    }
  EXPECT_GT(summed, 0U);
}

// Steps that run one by one, each buffer at an address of its own and poisoned outside of its life.
TEST(Plan, PartsOfAPass) {
  for (const char* const recipe_name : {"none", "delayed", "current", "mxfp8"}) {
    const PlanRequest r{.dtype = DType::bf16, .recipe = recipe(recipe_name)};
    constexpr const char* kChain = "rmsnorm linear(64,128) bias swiglu dropout(0.1) linear(64,32)";
    Session whole(kChain, r, 48), parts(kChain, r, 48);
    for (Session* s : {&whole, &parts}) {
      std::map<std::string, Numbers> given;
      fill(*s, given);
      s->random(5);
    }
    const std::vector<BufferUse> uses = parts.plan.uses();
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      whole.run(pass);
      const auto p = static_cast<size_t>(pass);
      const size_t count = data_of(parts.plan).steps(pass).size();
      for (size_t step = 0; step < count; ++step) {
        parts.run(pass, {.separate = true, .first_step = step, .end_step = step + 1});
        for (size_t b = 0; b < uses.size(); ++b) {
          const Role role = parts.plan.buffers()[b].role;
          const bool over = uses[b].last[p] == static_cast<int>(step) &&
                            (role == Role::workspace || (role == Role::saved && p == 1));
          if (over)
            std::memset(parts.data(b), 0xA5,
                        static_cast<size_t>(parts.plan.buffers()[b].bytes(48)));
        }
      }
    }
    EXPECT_EQ(whole.gradients(), parts.gradients()) << recipe_name;
    EXPECT_EQ(whole.get("y"), parts.get("y")) << recipe_name;
    expect_error([&] { parts.run(Pass::forward, {.first_step = 99}); }, Code::invalid_argument,
                 {"plan: the run begins at step 99"});
  }
}

// The memory of a pass that allocates each buffer for its own life is that of its largest step.
TEST(Plan, SeparateBuffersNeedNoSlots) {
  const Plan p = Plan::build("linear(64,128) swiglu linear(64,32)", {.dtype = DType::bf16});
  EXPECT_GT(p.workspace_bytes(512, Pass::backward), 0);
  EXPECT_EQ(p.workspace_bytes(512, Pass::backward, {.separate = true}), 0);
}

// The backward pass encodes the columns of a weight, so no codes are kept between the passes.
TEST(Plan, WeightsAreEncodedByThePassThatReadsThem) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("current"), .target = "sm_90a"};
  r.options.device = Device::cuda;
  const Plan p = Plan::build("linear(256,512) swiglu linear(256,128)", r);
  const std::vector<BufferUse> uses = p.uses();
  int codes = 0;
  for (size_t b = 0; b < uses.size(); ++b) {
    if (p.buffers()[b].role != Role::state || p.buffers()[b].cols == 1) continue;
    ++codes;
    EXPECT_NE(uses[b].first[0] < 0, uses[b].first[1] < 0) << p.buffers()[b].name;
  }
  EXPECT_EQ(codes, 4) << p.describe(64);
}

// Where no fast kernel writes all results of a map, two maps write some of them each.
TEST(Plan, HalvesOfTheResultsGiveTheSameBits) {
  size_t compared = 0;
  bool inside = false;
  const auto observe = [&](const Step& step, const RunArgs& args, const Options& options,
                           const std::function<void()>& go) {
    const auto halves = inside ? std::nullopt : split_results(step);
    if (!halves) return go();
    const auto contents = [&] {
      std::vector<std::vector<std::byte>> all;
      for (const View& v : args.out) {
        const auto* const at = static_cast<const std::byte*>(v.data);
        all.emplace_back(at, at + (v.data ? span_bytes(v) : 0));
      }
      return all;
    };
    const auto before = contents();
    go();
    const auto want = contents();
    for (size_t i = 0; i < before.size(); ++i)
      if (!before[i].empty()) std::memcpy(args.out[i].data, before[i].data(), before[i].size());
    inside = true;
    execute(halves->first, args, options);
    execute(halves->second, args, options);
    inside = false;
    EXPECT_EQ(contents(), want) << step.describe();
    ++compared;
  };
  for (const char* recipe : {"delayed", "mxfp8", "block"})
    for (const Keep keep : {Keep::fp8, Keep::input})
      for (const Precision precision : {Precision::strict, Precision::native}) {
        Session s("bias swiglu dropout(0.3) bias gelu quantize",
                  {.cols = 256,
                   .dtype = DType::bf16,
                   .recipe = tenon::recipe(recipe),
                   .keep = keep,
                   .options = {.precision = precision}},
                  70);
        std::map<std::string, Numbers> values;
        fill(s, values);
        set_observer(observe);
        s.run(Pass::forward);
        s.run(Pass::backward);
        set_observer({});
      }
  EXPECT_GE(compared, 12U);
}

// A channel and the saved or materialised input of the next op are one tensor.
TEST(Plan, AChannelIsStoredOnce) {
  for (const char* chain : {"silu make_extra_output>c gelu linear(64,64) add<c",
                            "silu make_extra_output>c linear(64,64) add<c",
                            "silu make_extra_output>c rmsnorm(64) add<c"}) {
    const Plan p = Plan::build(chain, {.cols = 64, .dtype = DType::bf16});
    EXPECT_TRUE(std::ranges::none_of(p.buffers(), [](const Buffer& b) { return b.name == "c"; }))
        << p.describe(64);
  }
}

// A product with its bias is stored once, as the saved input of the activation.
TEST(Plan, AProductIsStoredWithItsBias) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("block"), .target = "sm_90a"};
  r.options.device = Device::cuda;
  for (const char* chain :
       {"linear(64,256) bias swiglu linear(128,64)", "linear(64,128) bias gelu linear(128,64)"}) {
    const Plan p = Plan::build(chain, r);
    const std::vector<PlanStep>& steps = data_of(p).forward;
    const auto product =
        std::ranges::find_if(steps, [](const PlanStep& s) { return s.step.gemm(); });
    ASSERT_NE(product, steps.end());
    ASSERT_EQ(product->writes.size(), 1U) << p.describe(64);
    EXPECT_TRUE(product->writes[0].name.ends_with(".in")) << p.describe(64);
    EXPECT_NE(p.json(64).find("linear0.weight"), std::string::npos);
    for (const Buffer& b : p.buffers()) EXPECT_NE(b.name, "linear0.product");
    const PlanStep& body = *std::next(product);
    EXPECT_TRUE(body.step.is_map());
    for (const Load& l : body.step.loads) EXPECT_NE(l.from, Load::From::row) << p.describe(64);
  }
  // Without the backward pass nobody stores the sum, and the body adds the bias in fp32.
  r.backward = false;
  const Plan p = Plan::build("linear(64,128) bias gelu", r);
  const auto& loads = data_of(p).forward.back().step.loads;
  EXPECT_TRUE(std::ranges::any_of(loads, [](const Load& l) { return l.from == Load::From::row; }));
}

// On the CPU and without a device. gpu_test.cpp times products.
TEST(Plan, PrepareRunsEachStepOnScratchMemory) {
  const char* const chain = "linear(24,48) bias swiglu dropout(0.5) twice linear(24,16) all_reduce";
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("delayed")};
  int calls = 0;
  r.opaque["twice"] = {
      .forward = [&](int64_t, const View&, const View&) { ++calls; },
      .backward = [&](int64_t, const View&, const View&, const View&) { ++calls; }};
  const Plan p = Plan::build(chain, r);
  size_t steps = 0;
  set_observer([&](const Step&, const RunArgs&, const Options&, const std::function<void()>& go) {
    ++steps;
    go();
  });
  p.prepare(35);
  std::vector<std::byte> memory(static_cast<size_t>(p.prepare_bytes(35)) + kAligned);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  p.prepare(35, memory.data() + (kAligned - at % kAligned));
  p.prepare(0);
  set_observer({});
  size_t all = 0;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : data_of(p).steps(pass)) all += !s.opaque;
  EXPECT_EQ(steps, 3 * all);
  EXPECT_EQ(calls, 0);
  EXPECT_THROW(p.prepare(-1), Error);
  EXPECT_THROW(p.prepare(35, memory.data() + (kAligned - at % kAligned) + 8), Error);
  r.opaque.clear();
  r.options.device = Device::null;
  Plan::build("linear(24,48) gelu", r).prepare(35);
  r.options.device = Device::cuda;
  r.target = "sm_90a";
  EXPECT_THROW(Plan::build("linear(24,48) gelu", r).prepare(35), Error);
}

TEST(Plan, FastSumsAreForProductsOfCodes) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("delayed"), .target = "sm_90a"};
  r.options.device = Device::cuda;
  const auto count = [&](const std::string& chain) {
    const std::string json = Plan::build(chain, r).json(64);
    size_t n = 0;
    for (size_t at = 0; (at = json.find(", accumulate=fast", at + 1)) != std::string::npos;) ++n;
    return n;
  };
  EXPECT_EQ(count("linear(64,32)"), 0U);
  EXPECT_EQ(count("linear(64,32,accumulate=precise)"), 0U);
  EXPECT_EQ(count("linear(64,32,accumulate=fast)"), 3U);
  r.options.precision = Precision::strict;
  EXPECT_EQ(count("linear(64,32,accumulate=fast)"), 0U);
  r.options.precision = Precision::native;
  r.recipe = {};
  EXPECT_EQ(count("linear(64,32,accumulate=fast)"), 0U);
  // Decoded operands are no codes.
  r.recipe = recipe("mxfp8");
  EXPECT_EQ(count("linear(64,32,accumulate=fast)"), 0U);
  r.recipe = recipe("delayed");
  r.target = "sm_80";
  EXPECT_EQ(count("linear(64,32,accumulate=fast)"), 0U);
  EXPECT_THROW(Plan::build("linear(64,32,accumulate=quick)", r), Error);
}

}  // namespace
}  // namespace tenon::test
