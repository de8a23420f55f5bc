// Plans over the C ABI: memory by number, opaque ops by callbacks, mistakes.
#include <cstdio>

#include "support/support.h"
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
// Says nothing where it fails.
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
  // Runs both passes on memory of its own; "x" and "dy" are ones.
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

// The other rank is this one's twin, so the sum is the double; its number of calls is counted.
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
