// Tests of plans through the C ABI: memory by index, opaque ops with callbacks, invalid calls.
#include <cstdio>
#include <map>
#include <set>

#include "support/support.h"
#include "tenon/plan.h"
#include "tenon/tenon.h"

namespace tenon::test {
namespace {

struct Handle {
  tenon_plan* plan = nullptr;
  ~Handle() { tenon_plan_free(plan); }
};

std::string described(const tenon_plan* plan, const char* format) {
  size_t size = 0;
  EXPECT_EQ(tenon_plan_describe(plan, 4, format, nullptr, 0, &size), TENON_OK);
  std::string text(size, '\0');
  EXPECT_EQ(tenon_plan_describe(plan, 4, format, text.data(), size, nullptr), TENON_OK);
  text.pop_back();
  return text;
}

int half(void* user, int64_t rows, const tenon_view* x, const tenon_view* y, char* why,
         size_t capacity) {
  if (*static_cast<int*>(user) > 0) {
    std::snprintf(why, capacity, "asked to fail with %d", *static_cast<int*>(user));
    return 1;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < y->cols; ++c)
      static_cast<float*>(y->data)[r * y->stride + c] =
          static_cast<const float*>(x->data)[r * x->stride + c];
  return 0;
}
// Fails without a message.
int half_backward(void* user, int64_t rows, const tenon_view* x, const tenon_view* dy,
                  const tenon_view* dx, char*, size_t) {
  if (*static_cast<int*>(user) < 0) return 1;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < x->cols; ++c)
      static_cast<float*>(dx->data)[r * dx->stride + c] =
          c < dy->cols ? static_cast<const float*>(dy->data)[r * dy->stride + c] : 0.0F;
  return 0;
}

class CPlan : public testing::Test {
 protected:
  // Runs both passes with its own memory. "x" and "dy" are ones.
  int run(const tenon_plan* plan, int64_t rows, const std::vector<std::string>& names) {
    std::vector<int64_t> bytes(names.size());
    int64_t workspace = 0;
    const int code = tenon_plan_sizes(plan, rows, bytes.data(), bytes.size(), &workspace);
    if (code != TENON_OK) return code;
    memory.clear();
    std::vector<void*> addresses;
    for (size_t i = 0; i < names.size(); ++i) {
      const bool one = names[i] == "x" || names[i] == "dy";
      memory.emplace_back(static_cast<size_t>(bytes[i]) / 4 + 1, one ? 1.0F : 0.0F);
    }
    for (auto& m : memory) addresses.push_back(m.data());
    std::vector<char> space(static_cast<size_t>(workspace) + 1);
    for (const int backward : {0, 1}) {
      const int ran = tenon_plan_run(plan, backward, rows, addresses.data(), addresses.size(),
                                     space.data(), 0, nullptr);
      if (ran != TENON_OK) return ran;
    }
    return TENON_OK;
  }
  std::vector<std::vector<float>> memory;
};

TEST_F(CPlan, RunsBothPasses) {
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = 6;
  Handle h;
  ASSERT_EQ(tenon_plan_build("scale(3) scale(0.5)", &request, nullptr, &h.plan), TENON_OK)
      << tenon_last_error();
  EXPECT_NE(described(h.plan, "text").find("forward: 1 pass"), std::string::npos);
  EXPECT_NE(described(h.plan, "json").find("\"format\":1"), std::string::npos);
  EXPECT_NE(described(h.plan, "html").find("<svg"), std::string::npos);
  ASSERT_EQ(run(h.plan, 5, {"x", "y", "dy", "dx"}), TENON_OK) << tenon_last_error();
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(memory[1][static_cast<size_t>(i)], 1.5F);
    EXPECT_EQ(memory[3][static_cast<size_t>(i)], 1.5F);
  }
}

std::vector<tenon_buffer> buffers_of(const tenon_plan* plan) {
  size_t count = 0;
  EXPECT_EQ(tenon_plan_buffers(plan, nullptr, 0, &count), TENON_OK) << tenon_last_error();
  std::vector<tenon_buffer> list(count);
  EXPECT_EQ(tenon_plan_buffers(plan, list.data(), count, nullptr), TENON_OK) << tenon_last_error();
  return list;
}

// A chain with every role except extra outputs, and its two forms.
constexpr const char* kChain =
    "make_extra_output layernorm(64) linear(64,256) bias swiglu dropout(0.1) linear(128,64) add";
tenon_plan_request delayed_request() {
  tenon_plan_request request{};
  request.size = sizeof request;
  request.dtype = TENON_BF16;
  request.recipe = "delayed";
  return request;
}

// Bit 1 keeps the codes of the weights. Bit 2 has no effect on the CPU.
TEST_F(CPlan, FlagsOfARun) {
  tenon_plan_request request{};
  request.size = sizeof request;
  request.recipe = "current";
  request.forward_only = 1;
  Handle h;
  ASSERT_EQ(tenon_plan_build("linear(32,16)", &request, nullptr, &h.plan), TENON_OK)
      << tenon_last_error();
  const std::vector<tenon_buffer> list = buffers_of(h.plan);
  std::vector<int64_t> bytes(list.size());
  int64_t size = 0;
  ASSERT_EQ(tenon_plan_sizes(h.plan, 1, bytes.data(), bytes.size(), &size), TENON_OK);
  std::vector<std::vector<float>> tensors;
  std::vector<void*> addresses;
  float *x = nullptr, *weight = nullptr, *y = nullptr;
  for (size_t i = 0; i < list.size(); ++i) {
    addresses.push_back(tensors.emplace_back(static_cast<size_t>(bytes[i]) / 4 + 1, 1.0F).data());
    auto* const data = static_cast<float*>(addresses.back());
    if (list[i].role == TENON_ROLE_INPUT) x = data;
    if (list[i].role == TENON_ROLE_PARAM) weight = data;
    if (list[i].role == TENON_ROLE_OUTPUT) y = data;
  }
  ASSERT_TRUE(x && weight && y);
  std::vector<char> workspace(static_cast<size_t>(size) + 1);
  const auto run = [&](int32_t flags) {
    *y = 0;
    return tenon_plan_run(h.plan, TENON_FORWARD, 1, addresses.data(), addresses.size(),
                          workspace.data(), flags, nullptr);
  };
  ASSERT_EQ(run(0), TENON_OK) << tenon_last_error();
  EXPECT_FLOAT_EQ(*y, 32.0F);
  std::fill_n(weight, 32 * 16, 2.0F);
  for (const int32_t flags :
       {int32_t{TENON_RUN_WEIGHTS_UNCHANGED}, TENON_RUN_WEIGHTS_UNCHANGED | TENON_RUN_NO_TUNING}) {
    ASSERT_EQ(run(flags), TENON_OK) << tenon_last_error();
    EXPECT_FLOAT_EQ(*y, 32.0F);
  }
  ASSERT_EQ(run(TENON_RUN_NO_TUNING), TENON_OK) << tenon_last_error();
  EXPECT_FLOAT_EQ(*y, 64.0F);
  // An aligned run refuses other addresses, since its workspace may be too small for them.
  int64_t needed = 0;
  EXPECT_EQ(tenon_plan_workspace(h.plan, TENON_FORWARD, 1, TENON_RUN_ALIGNED, &needed), TENON_OK);
  EXPECT_LE(needed, size);
  for (void*& at : addresses)
    if (at == y) at = y + 1;
  EXPECT_EQ(run(TENON_RUN_ALIGNED), TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("is not a multiple of 16"), std::string::npos)
      << tenon_last_error();
  for (const int32_t flags : {16, 31, -1}) {
    EXPECT_NE(tenon_plan_workspace(h.plan, TENON_FORWARD, 1, flags, &needed), TENON_OK);
    EXPECT_EQ(run(flags), TENON_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tenon_last_error()).find(str("flags is ", flags)), std::string::npos)
        << tenon_last_error();
  }
}

TEST_F(CPlan, BuffersAreThoseOfThePlan) {
  const tenon_plan_request request = delayed_request();
  Handle h;
  ASSERT_EQ(tenon_plan_build(kChain, &request, nullptr, &h.plan), TENON_OK) << tenon_last_error();
  const Plan plan =
      Plan::build(kChain, PlanRequest{.dtype = DType::bf16, .recipe = recipe("delayed")});
  const std::vector<tenon_buffer> list = buffers_of(h.plan);
  const std::vector<Buffer>& expected = plan.buffers();
  ASSERT_EQ(list.size(), expected.size());
  std::vector<int64_t> bytes(list.size());
  constexpr int64_t kRows = 33;
  ASSERT_EQ(tenon_plan_sizes(h.plan, kRows, bytes.data(), bytes.size(), nullptr), TENON_OK);
  std::set<std::string_view> roles;
  for (size_t i = 0; i < list.size(); ++i) {
    const tenon_buffer& b = list[i];
    EXPECT_EQ(b.name, expected[i].name);
    EXPECT_EQ(b.role, static_cast<int32_t>(expected[i].role)) << b.name;
    EXPECT_EQ(b.dtype, static_cast<int32_t>(expected[i].dtype)) << b.name;
    EXPECT_EQ((RowCount{b.rows_mul, b.rows_div, b.rows_round, b.rows_add}), expected[i].rows);
    EXPECT_EQ(b.cols, expected[i].cols) << b.name;
    EXPECT_EQ(b.rows_inside != 0, expected[i].rows_inside) << b.name;
    EXPECT_EQ(b.random != 0, expected[i].random) << b.name;
    EXPECT_EQ((Initial{b.initial_low, b.initial_high}), expected[i].initial) << b.name;
    // The formula in the header must give the sizes.
    const int64_t count = rup(cdiv(kRows * b.rows_mul, b.rows_div), b.rows_round) + b.rows_add;
    const int64_t one = b.random ? 8 : info(static_cast<DType>(b.dtype)).bytes;
    EXPECT_EQ(count * b.cols * one, bytes[i]) << b.name;
    roles.insert(kRoles[static_cast<size_t>(b.role)]);
  }
  EXPECT_EQ(roles.size(), kRoles.size());
}

// A pass writes buffers that it does not get, and reads buffers that the other pass wrote for it.
TEST_F(CPlan, BuffersSayWhatThePassesDo) {
  const tenon_plan_request request = delayed_request();
  Handle h;
  ASSERT_EQ(tenon_plan_build(kChain, &request, nullptr, &h.plan), TENON_OK) << tenon_last_error();
  std::map<std::string, tenon_buffer> by_name;
  for (const tenon_buffer& b : buffers_of(h.plan)) {
    by_name[b.name] = b;
    if (b.role == TENON_ROLE_SAVED) {
      EXPECT_TRUE(b.writes_forward && b.reads_backward) << b.name;
    }
    if (b.role == TENON_ROLE_GRAD) {
      EXPECT_TRUE(!b.reads_forward && !b.writes_forward) << b.name;
      EXPECT_TRUE(b.writes_backward || b.same_as >= 0) << b.name;
    }
    if (b.role == TENON_ROLE_PARAM) {
      EXPECT_TRUE(b.reads_forward && !b.writes_forward && !b.writes_backward) << b.name;
    }
  }
  const auto uses = [&](const char* name) {
    const tenon_buffer& b = by_name.at(name);
    std::string text;
    for (const auto& [is, what] : {std::pair{b.reads_forward, "fr "},
                                   {b.writes_forward, "fw "},
                                   {b.reads_backward, "br "},
                                   {b.writes_backward, "bw "}})
      if (is) text += what;
    return text;
  };
  EXPECT_EQ(uses("x"), "fr br ");  // the gradient of the norm reads it
  EXPECT_EQ(uses("y"), "fw ");
  EXPECT_EQ(uses("dy"), "br ");
  EXPECT_EQ(uses("dx"), "bw ");
  EXPECT_EQ(uses("extra0"), "fr ");
  EXPECT_EQ(uses("rng"), "fr fw ");
  EXPECT_EQ(uses("rng.saved"), "fr fw br ");
  EXPECT_EQ(uses("bias3.bias"), "fr ");
  EXPECT_EQ(uses("layernorm1.gamma"), "fr br ");
}

// Workspace shared by two buffers is as large as the larger one.
TEST_F(CPlan, BuffersSayWhichShareMemory) {
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = 64;
  request.forward_only = 1;
  Handle h;
  ASSERT_EQ(tenon_plan_build("linear(64,64) linear(64,64) linear(64,64) linear(64,64)", &request,
                             nullptr, &h.plan),
            TENON_OK)
      << tenon_last_error();
  const std::vector<tenon_buffer> list = buffers_of(h.plan);
  std::vector<int64_t> bytes(list.size());
  int64_t workspace = 0, alone = 0, sharing = 0;
  ASSERT_EQ(tenon_plan_sizes(h.plan, 32, bytes.data(), bytes.size(), &workspace), TENON_OK);
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].role != TENON_ROLE_WORKSPACE) {
      EXPECT_EQ(list[i].same_as, -1) << list[i].name;
      continue;
    }
    if (list[i].same_as < 0) {
      alone += bytes[i];
      continue;
    }
    ++sharing;
    ASSERT_LT(list[i].same_as, static_cast<int32_t>(i)) << list[i].name;
    const tenon_buffer& first = list[static_cast<size_t>(list[i].same_as)];
    EXPECT_TRUE(first.role == TENON_ROLE_WORKSPACE && first.same_as == -1) << list[i].name;
  }
  EXPECT_EQ(sharing, 1);
  EXPECT_EQ(workspace, alone);
}

TEST_F(CPlan, BuffersWithAnyCapacity) {
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = 6;
  Handle h;
  ASSERT_EQ(tenon_plan_build("gelu", &request, nullptr, &h.plan), TENON_OK);
  for (const size_t capacity : {0, 1, 3, 4, 9}) {
    std::vector<tenon_buffer> list(10);
    for (tenon_buffer& b : list) b.cols = -7;
    size_t count = 0;
    ASSERT_EQ(tenon_plan_buffers(h.plan, list.data(), capacity, &count), TENON_OK);
    EXPECT_EQ(count, 4U);
    for (size_t i = 0; i < list.size(); ++i)
      EXPECT_EQ(list[i].cols, i < std::min(capacity, count) ? 6 : -7) << capacity;
  }
  ASSERT_EQ(tenon_plan_buffers(h.plan, nullptr, 9, nullptr), TENON_OK);
  size_t count = 7;
  EXPECT_EQ(tenon_plan_buffers(nullptr, nullptr, 0, &count), TENON_INVALID_ARGUMENT);
  EXPECT_STREQ(tenon_last_error(),
               "tenon_plan_buffers: plan is NULL; build one with tenon_plan_build");
  EXPECT_EQ(count, 7U);
}

TEST_F(CPlan, OpaqueOpsBetweenFusedOnes) {
  int fails = 0;
  const tenon_opaque_op op{"half", 3, 0, 0, half, half_backward, &fails};
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = 6;
  request.opaque_ops = &op;
  request.opaque_op_count = 1;
  Handle h;
  ASSERT_EQ(tenon_plan_build("scale(2) half:cut scale(5)", &request, nullptr, &h.plan), TENON_OK)
      << tenon_last_error();
  const std::vector<std::string> names{"x",  "cut.in", "cut.out", "y",
                                       "dy", "cut.dy", "cut.dx",  "dx"};
  ASSERT_EQ(run(h.plan, 4, names), TENON_OK) << tenon_last_error();
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(memory[3][i], 10.0F);
  for (size_t r = 0; r < 4; ++r)
    for (size_t c = 0; c < 6; ++c) EXPECT_EQ(memory[7][r * 6 + c], c < 3 ? 10.0F : 0.0F);
  fails = 7;
  EXPECT_EQ(run(h.plan, 4, names), TENON_RUNTIME);
  EXPECT_STREQ(tenon_last_error(), "cut: asked to fail with 7");
  fails = -1;
  EXPECT_EQ(run(h.plan, 4, names), TENON_RUNTIME);
  EXPECT_STREQ(tenon_last_error(), "cut: its callback failed and said nothing");
}

// The other rank has the same values, so the sum is twice the input. Counts its calls.
int twins_sum(void* user, const tenon_view* in, const tenon_view* out, void*, char* why,
              size_t capacity) {
  if (++*static_cast<int*>(user) > 1) {
    std::snprintf(why, capacity, "the twin left");
    return 1;
  }
  for (int64_t i = 0; i < out->rows * out->cols; ++i)
    static_cast<float*>(out->data)[i] = 2 * static_cast<const float*>(in->data)[i];
  return 0;
}
int twins_rows(void*, const tenon_view* in, const tenon_view* out, void*, char*, size_t) {
  for (int64_t i = 0; i < out->rows * out->cols; ++i)
    static_cast<float*>(out->data)[i] =
        static_cast<const float*>(in->data)[i % (in->rows * in->cols)];
  return 0;
}

TEST_F(CPlan, CollectivesOfTheCallers) {
  int sums = 0;
  tenon_collectives group{2, twins_sum, twins_rows, twins_sum, &sums};
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = 6;
  request.collectives = &group;
  Handle h;
  ASSERT_EQ(tenon_plan_build("scale(3) all_reduce:sum scale(0.5)", &request, nullptr, &h.plan),
            TENON_OK)
      << tenon_last_error();
  EXPECT_NE(described(h.plan, "text").find("collective sum"), std::string::npos);
  const std::vector<std::string> names{"x", "sum.in", "sum.out", "y", "dy", "dx"};
  ASSERT_EQ(run(h.plan, 4, names), TENON_OK) << tenon_last_error();
  for (size_t i = 0; i < 24; ++i) {
    EXPECT_EQ(memory[3][i], 3.0F);
    EXPECT_EQ(memory[5][i], 1.5F);
  }
  EXPECT_EQ(sums, 1) << "the gradient passes as it is";
  EXPECT_EQ(run(h.plan, 4, names), TENON_RUNTIME);
  EXPECT_STREQ(tenon_last_error(), "sum: the twin left");

  Handle gather;
  sums = 0;
  ASSERT_EQ(tenon_plan_build("all_gather", &request, nullptr, &gather.plan), TENON_OK);
  ASSERT_EQ(run(gather.plan, 4, {"x", "y", "dy", "dx"}), TENON_OK) << tenon_last_error();
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(memory[1][i], 1.0F);
  for (size_t i = 0; i < 24; ++i) EXPECT_EQ(memory[3][i], 2.0F);

  tenon_plan* none = nullptr;
  group.all_gather = nullptr;
  EXPECT_EQ(tenon_plan_build("gelu", &request, nullptr, &none), TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("lacks a callback"), std::string::npos);
  group.ranks = 0;
  EXPECT_EQ(tenon_plan_build("gelu", &request, nullptr, &none), TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("0 ranks"), std::string::npos);
}

TEST_F(CPlan, EncodedTensorsAndPrepare) {
  tenon_encoding x{};
  x.format.dtype = TENON_E4M3;
  x.format.scaling = "mxfp8";
  x.encodings = TENON_BOTH;
  tenon_encoding w = x;
  w.encodings = TENON_ROWWISE;
  tenon_op_request ops[2] = {};
  ops[0].weight_encoding = &w;
  ops[1].recipe_given = 1;
  ops[1].input = x.format;
  ops[1].output = TENON_COLUMNWISE;
  tenon_plan_request request{};
  request.size = sizeof request;
  request.cols = 64;
  request.input_encoding = &x;
  request.op_requests = ops;
  request.op_request_count = 2;
  Handle h;
  const auto names = [&] {
    std::set<std::string> all;
    const std::string json = described(h.plan, "json");
    for (const char* name :
         {"x", "x.scale_inv", "x.t", "x.t.scale_inv", "linear0.weight", "linear0.weight.scale_inv",
          "linear0.weight.t", "y", "y.scale_inv", "y.t", "y.t.scale_inv"})
      if (json.find(str("{\"name\":\"", name, "\",")) != std::string::npos) all.insert(name);
    return all;
  };
  ASSERT_EQ(tenon_plan_build("linear(64,32) gelu quantize", &request, nullptr, &h.plan), TENON_OK)
      << tenon_last_error();
  EXPECT_EQ(names(),
            (std::set<std::string>{"x", "x.scale_inv", "x.t", "x.t.scale_inv", "linear0.weight",
                                   "linear0.weight.scale_inv", "y.t", "y.t.scale_inv"}));
  int64_t bytes = 0;
  ASSERT_EQ(tenon_plan_prepare_bytes(h.plan, 4, &bytes), TENON_OK) << tenon_last_error();
  EXPECT_GT(bytes, 0);
  EXPECT_EQ(tenon_plan_prepare(h.plan, 4, nullptr, nullptr), TENON_OK) << tenon_last_error();
  EXPECT_EQ(tenon_plan_prepare(h.plan, -1, nullptr, nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_EQ(tenon_plan_prepare_bytes(h.plan, 4, nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_EQ(tenon_plan_prepare(nullptr, 4, nullptr, nullptr), TENON_INVALID_ARGUMENT);
  request.output_decoded = 1;
  Handle decoded;
  ASSERT_EQ(tenon_plan_build("linear(64,32) gelu quantize", &request, nullptr, &decoded.plan),
            TENON_OK)
      << tenon_last_error();
  std::swap(h.plan, decoded.plan);
  EXPECT_TRUE(names().contains("y"));
  EXPECT_FALSE(names().contains("y.t"));
  x.encodings = 3;
  Handle none;
  EXPECT_EQ(tenon_plan_build("linear(64,32)", &request, nullptr, &none.plan),
            TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("TENON_BOTH"), std::string::npos)
      << tenon_last_error();
}

TEST_F(CPlan, MistakesAreNamed) {
  tenon_plan_request request{};
  request.size = sizeof request;
  Handle h;
  const auto build = [&](const char* chain) {
    return tenon_plan_build(chain, &request, nullptr, &h.plan);
  };
  EXPECT_EQ(build(nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_EQ(build("gelu"), TENON_INVALID_ARGUMENT);
  request.cols = 8;
  EXPECT_EQ(build("gelu("), TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("line 1, column 6"), std::string::npos)
      << tenon_last_error();
  request.recipe = "fp4";
  EXPECT_EQ(build("gelu"), TENON_INVALID_ARGUMENT);
  request.recipe = nullptr;
  request.keep = "none";
  EXPECT_EQ(build("gelu"), TENON_INVALID_ARGUMENT);
  request.keep = nullptr;
  request.dtype = 9;
  EXPECT_EQ(build("gelu"), TENON_INVALID_ARGUMENT);
  request.dtype = TENON_E4M3;
  EXPECT_EQ(build("gelu"), TENON_INVALID_ARGUMENT);
  request.dtype = TENON_F32;
  request.opaque_op_count = 2;
  EXPECT_EQ(build("gelu"), TENON_INVALID_ARGUMENT);
  request.opaque_op_count = 0;
  EXPECT_EQ(tenon_plan_build("gelu", &request, nullptr, nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_EQ(h.plan, nullptr);
  ASSERT_EQ(build("reshape(16) gelu"), TENON_OK);
  int64_t bytes[8] = {};
  EXPECT_EQ(tenon_plan_sizes(h.plan, 3, bytes, 4, nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("give a multiple of 2"), std::string::npos);
  EXPECT_EQ(tenon_plan_sizes(h.plan, 2, bytes, 7, nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_EQ(tenon_plan_run(h.plan, 0, 2, nullptr, 4, nullptr, 0, nullptr), TENON_INVALID_ARGUMENT);
  void* none[4] = {};
  EXPECT_EQ(tenon_plan_run(h.plan, 0, 2, none, 4, nullptr, 0, nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("no address for 'x'"), std::string::npos)
      << tenon_last_error();
  EXPECT_EQ(tenon_plan_describe(h.plan, 2, "pdf", nullptr, 0, nullptr), TENON_INVALID_ARGUMENT);
  size_t size = 0;
  constexpr int64_t kMany = int64_t{1} << 60;
  EXPECT_EQ(tenon_plan_sizes(h.plan, kMany, bytes, 4, nullptr), TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("at most 72057594037927936"), std::string::npos)
      << tenon_last_error();
  EXPECT_EQ(tenon_plan_describe(h.plan, kMany, "json", nullptr, 0, &size), TENON_INVALID_ARGUMENT);
  EXPECT_EQ(tenon_plan_run(h.plan, 0, kMany, none, 4, nullptr, 0, nullptr), TENON_INVALID_ARGUMENT);
  Handle forward;
  request.forward_only = 1;
  ASSERT_EQ(tenon_plan_build("gelu", &request, nullptr, &forward.plan), TENON_OK);
  EXPECT_EQ(tenon_plan_run(forward.plan, 1, 2, none, 2, nullptr, 0, nullptr),
            TENON_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tenon_last_error()).find("it has no backward pass"), std::string::npos)
      << tenon_last_error();
  tenon_plan_free(nullptr);
}

}  // namespace
}  // namespace tenon::test
