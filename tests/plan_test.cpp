// Plans against the same chain in float64, and against their own ops one by one.
#include "plan_support.h"
#include "tenon/error.h"

namespace tenon::test {
namespace {

struct Case {
  const char* chain;
  int64_t rows, cols;
  DType dtype = DType::f32;
  const char* recipe = "none";
};

// Root mean square of the difference, relative to that of the exact values.
double distance(const Numbers& got, const Numbers& exact) {
  if (got.size() != exact.size()) return kInf;
  double d = 0, n = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    d += std::pow(got[i] - exact[i], 2);
    n += std::pow(exact[i], 2);
  }
  return n == 0 ? std::sqrt(d) : std::sqrt(d / n);
}

// Nearest rounding errs by at most u·2^-1 of a number and by u/sqrt(12) on average; tensors that
// were rounded on the way err independently. Two for what a step amplifies.
double tolerance(const Case& c) {
  size_t ops = 2, linears = 0;
  for (const char* p = c.chain; *p; ++p) {
    ops += *p == ' ';
    linears += std::string_view(p).starts_with("linear");
  }
  const double plain = c.dtype == DType::f32 ? 0x1p-22 : c.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
  double squares = static_cast<double>(ops) * plain * plain;
  if (std::string_view(c.recipe) != "none") {
    const bool hybrid = c.recipe[0] == 'd' || c.recipe[0] == 'c';
    squares += static_cast<double>(linears) * (2 * 0x1p-6 + (hybrid ? 0x1p-4 : 0x1p-6));
  }
  return 2 * std::sqrt(squares / 12) + 1e-6;
}

void fill(Session& s, std::map<std::string, Numbers>& given) {
  for (const Buffer& b : s.plan.buffers()) {
    uint64_t seed = 17;  // of the name, so that plans with other buffers get the same numbers
    for (const char c : b.name) seed = seed * 31 + static_cast<unsigned char>(c);
    if (b.random) {
      if (b.role == Role::rng) s.random(11);
      continue;
    }
    if (b.role != Role::param && b.role != Role::extra_in && b.role != Role::input) continue;
    const auto n = s.get(b.name).size();
    const double scale =
        b.name.ends_with(".weight") ? 1 / std::sqrt(static_cast<double>(b.cols)) : 1;
    given[b.name] = rounded(normal(n, seed, scale), b.dtype);
    s.set(b.name, given[b.name]);
  }
}

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.chain << " " << c.rows << "x" << c.cols << " " << info(c.dtype).name << " " << c.recipe;
}

class Chains : public testing::TestWithParam<Case> {};

TEST_P(Chains, AgreeWithFloat64) {
  const Case& c = GetParam();
  PlanRequest request;
  request.cols = c.cols;
  request.dtype = c.dtype;
  request.recipe = recipe(c.recipe);
  Session s(c.chain, request, c.rows);
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
  EXPECT_LE(distance(s.get("dx"), dx), most);
  for (const auto& [name, v] : exact.extra_outputs)
    EXPECT_LE(distance(s.get(name), v), most) << name;
  size_t gradients = 0;
  for (const Buffer& b : s.plan.buffers()) {
    if (b.role != Role::grad || b.name == "dx") continue;
    ++gradients;
    EXPECT_LE(distance(s.get(b.name), exact.grads.at(b.name)), most) << b.name;
  }
  EXPECT_EQ(gradients, s.plan.with(Role::param).size() + s.plan.with(Role::extra_in).size());
}

// Each op planned alone, its tensors handed on by hand.
struct Alone {
  Op op;
  std::unique_ptr<Session> session;
  std::vector<std::string> extra_in, extra_out;  // names in the whole chain, or channels
};

TEST_P(Chains, EqualTheirOpsOneByOne) {
  const Case& c = GetParam();
  PlanRequest request;
  request.dtype = c.dtype;
  request.recipe = recipe(c.recipe);
  request.options.precision = Precision::strict;
  request.options.rounding = Rounding::eager;
  Chain chain = parse_chain(c.chain);
  for (size_t i = 0; i < chain.size(); ++i) chain[i].label = "o" + std::to_string(i);
  request.cols = c.cols;
  Session whole(print_chain(chain), request, c.rows);
  std::map<std::string, Numbers> given;
  fill(whole, given);
  whole.run(Pass::forward);
  whole.run(Pass::backward);

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
  EXPECT_EQ(whole.get("y"), x) << whole.plan.describe(c.rows);
  Numbers g = given["dy"];
  for (size_t i = ops.size(); i-- > 0;) {
    Session& s = *ops[i].session;
    s.set("dy", g);
    if (s.has("dextra_out0")) s.set("dextra_out0", tensors.at("d" + ops[i].extra_out[0]));
    s.run(Pass::backward);
    g = s.get("dx");
    for (const Buffer& b : s.plan.buffers())
      if (b.role == Role::grad && b.name.starts_with("do")) {
        EXPECT_EQ(whole.get(b.name), s.get(b.name)) << b.name;
      }
    if (!s.has("dextra0")) continue;
    const std::string name = "d" + ops[i].extra_in[0];
    tensors[name] = s.get("dextra0");
    if (whole.has(name) && name.starts_with("dextra")) {
      EXPECT_EQ(whole.get(name), tensors[name]) << name;
    }
  }
  EXPECT_EQ(whole.get("dx"), g) << whole.plan.describe(c.rows);
}

constexpr Case kCases[] = {
    {"gelu", 7, 33},
    {"bias gelu", 7, 33, DType::bf16},
    {"bias swiglu scale(0.5)", 9, 66, DType::f16},
    {"bias dropout(0.1) add", 33, 64, DType::bf16},
    {"dropout(0.5) gelu dropout(0.25)", 5, 64},
    {"rmsnorm(65)", 33, 65},
    {"layernorm(513)", 3, 513, DType::bf16},
    {"l2norm", 17, 31, DType::f16},
    {"add rmsnorm silu", 12, 96, DType::bf16},
    {"make_extra_output>r rmsnorm gelu add<r", 40, 70, DType::bf16},
    {"make_extra_output gelu make_extra_output", 8, 24},
    {"reshape(16) gelu reshape(64)", 6, 32},
    {"act(\"x*x/(1+x*x)\") scale(-2) identity", 6, 32},
    {"all_reduce gelu all_gather reduce_scatter", 4, 8},
    {"scale(2) swiglu rmsnorm relu", 11, 130},
    {"swiglu swiglu", 5, 64},
    {"linear(33,65)", 7, 33},
    {"linear(33,65)", 1, 33, DType::bf16},
    {"linear(64,128) bias gelu linear(128,32)", 129, 64},
    {"linear(64,128) bias gelu linear(128,32)", 129, 64, DType::bf16},
    {"linear(64,256) bias swiglu linear(128,64) bias dropout(0.1) add", 65, 64, DType::bf16},
    {"linear(64,256) bias geglu linear(128,64)", 65, 64, DType::bf16, "delayed"},
    {"linear(64,256) bias swiglu linear(128,64)", 129, 64, DType::bf16, "current"},
    {"linear(64,256) bias swiglu linear(128,64)", 130, 64, DType::bf16, "mxfp8"},
    {"linear(160,256) bias swiglu linear(128,64)", 131, 160, DType::f32, "block"},
    {"linear(64,256) bias swiglu linear(128,64)", 131, 64, DType::f16, "delayed"},
    {"rmsnorm linear(96,64) gelu linear(64,96) add", 50, 96, DType::f16},
    {"make_extra_output>r layernorm linear(96,64) bias silu linear(64,96) bias add<r", 50, 96,
     DType::bf16, "mxfp8"},
    {"linear(32,48) rmsnorm linear(48,32) layernorm", 33, 32},
    {"linear(32,48) reshape(24) gelu reshape(96) linear(96,8)", 10, 32},
    {"quantize linear(64,64) quantize gelu", 33, 64, DType::bf16, "current"},
    {"linear(7,1) gelu linear(1,5)", 3, 7},
};
INSTANTIATE_TEST_SUITE_P(Plans, Chains, testing::ValuesIn(kCases));

const char* const kMlp = "linear(64,256) bias swiglu linear(128,64)";

PlanRequest mlp(const char* name, Keep keep) {
  PlanRequest r;
  r.dtype = DType::bf16;
  r.recipe = recipe(name);
  r.keep = keep;
  r.options.precision = Precision::strict;
  return r;
}

// What is kept, byte by byte: x and the activation's output as the Linears read them, and its
// input.
TEST(Keeping, BytesFollowThePolicy) {
  constexpr int64_t kRows = 256;
  const auto saved = [](const char* name, Keep keep) {
    PlanRequest r = mlp(name, keep);
    r.options.device = Device::null;
    return Plan::build(kMlp, r).saved_bytes(kRows);
  };
  const int64_t z = kRows * 256 * 2;  // bf16
  const int64_t z_fp8 = kRows * 256 + 2 * kRows * 4;
  // The input of the chain is the caller's.
  EXPECT_EQ(saved("none", Keep::input), z + kRows * 128 * 2);
  EXPECT_EQ(saved("none", Keep::fp8), z_fp8 + kRows * 128 * 2);
  EXPECT_EQ(saved("none", Keep::recompute), z);
  const int64_t x = kRows * 64 + 4;
  EXPECT_EQ(saved("delayed", Keep::input), x + z + kRows * 128 + 4);
  EXPECT_EQ(saved("delayed", Keep::fp8), x + z_fp8 + kRows * 128 + 4);
  EXPECT_EQ(saved("delayed", Keep::recompute), x + z);
  // One amax more: what is computed again is scaled alike.
  EXPECT_EQ(saved("current", Keep::recompute), x + z + 4);
  // Both encodings, with their scales.
  const int64_t both = 2 * kRows * 64 + kRows * 4 + kRows / 32 * 128;
  EXPECT_EQ(saved("mxfp8", Keep::recompute), both + z);
}

TEST(Keeping, RecomputingGivesTheSameBits) {
  for (const char* name : {"none", "delayed", "current", "mxfp8", "block"}) {
    std::vector<Numbers> first;
    for (const Keep keep : {Keep::input, Keep::recompute}) {
      PlanRequest r = mlp(name, keep);
      r.options.rounding = Rounding::eager;  // then `input` carries on what it stored, too
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

TEST(Rows, OnePlanServesAnyNumber) {
  PlanRequest r = mlp("mxfp8", Keep::input);
  std::vector<Numbers> first_rows;
  for (const int64_t rows : {0, 1, 7, 4096}) {
    Session s(kMlp, r, rows);
    std::map<std::string, Numbers> given;
    fill(s, given);
    s.run(Pass::forward);
    s.run(Pass::backward);
    if (rows == 0) continue;
    // Seeds do not depend on the rows, so the first row is the same in all.
    Numbers y = s.get("y");
    y.resize(64);
    first_rows.push_back(y);
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

TEST(Mistakes, NameTheOpTheValueAndTheRule) {
  const std::pair<const char*, const char*> kMistakes[] = {
      {"linear(512,64)", "linear0: input has 64 columns, weight wants 512"},
      {"linear:fc1", "fc1: it has no width; write linear(in,out) or linear(out=n)"},
      {"linear(64,0)", "linear0: out is 0; it must be a whole number, at least 1"},
      {"bias(1,2)", "bias0: 2 arguments; it takes n"},
      {"gelu(alpha=2)", "gelu0: there is no argument 'alpha'; it takes layout keep"},
      {"scale(2) linear(63,2)", "linear1: input has 64 columns, weight wants 63"},
      {"linear(out=7) swiglu",
       "swiglu1: its input has 7 columns; a gated input holds a and b, so its columns must be "
       "even"},
      {"swiglu(layout=\"interleaved(5)\")",
       "swiglu0: interleaved(5) needs a half width divisible by 5, it is 32"},
      {"gelu(keep=all)", "gelu0: keep is 'all'; it must be input, fp8 or recompute"},
      {"dropout(2)", "dropout0: p is 2; it must be from 0 to 1"},
      {"add<r", "add0: nothing before it writes the channel 'r'; add make_extra_output>r"},
      {"make_extra_output>r gelu",
       "make_extra_output0: nothing behind it reads the channel 'r'; read it with '<', or take '>' "
       "away to give it to the caller"},
      {"gelu<r", "gelu0: it reads 1 channels, but has 0 extra inputs; take '<' away"},
      {"rmsnorm(65)", "rmsnorm0: its input has 64 columns, it wants 65"},
  };
  for (const auto& [chain, message] : kMistakes) {
    PlanRequest r;
    r.cols = 64;
    try {
      Plan::build(chain, r);
      ADD_FAILURE() << chain;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()), message) << chain;
    }
  }
  PlanRequest r;
  EXPECT_THROW(Plan::build("gelu", r), Error);
  r.cols = 6;
  const Plan p = Plan::build("reshape(4) gelu", r);
  EXPECT_THROW(p.check_rows(3), Error);
  EXPECT_NO_THROW(p.check_rows(4));
}

}  // namespace
}  // namespace tenon::test
