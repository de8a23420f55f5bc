// Tests of collectives with threads as ranks: compares each rank's plan with the whole chain in
// float64.
#include <barrier>
#include <thread>

#include "lower/data.h"
#include "support/plan_support.h"
#include "tenon/error.h"

namespace tenon::test {
namespace {

float element(const View& v, int64_t r, int64_t c) {
  const auto size = static_cast<size_t>(info(v.dtype).bytes);
  uint32_t code = 0;
  std::memcpy(&code, static_cast<char*>(v.data) + static_cast<size_t>(r * v.stride + c) * size,
              size);
  return decode_ref(v.dtype, code);
}
void put(const View& v, int64_t r, int64_t c, float value) {
  const auto size = static_cast<size_t>(info(v.dtype).bytes);
  const uint32_t code = encode_ref(v.dtype, value);
  std::memcpy(static_cast<char*>(v.data) + static_cast<size_t>(r * v.stride + c) * size, &code,
              size);
}

// Synchronises the ranks of a process.
struct Group {
  explicit Group(int64_t n) : ranks(n), meet(n), posted(static_cast<size_t>(n)) {}
  int64_t ranks;
  std::barrier<> meet;
  std::vector<View> posted;
};

class Rank final : public Collectives {
 public:
  Rank(Group& group, int64_t rank) : group_(group), rank_(rank) {}
  [[nodiscard]] int64_t ranks() const override { return group_.ranks; }
  void all_reduce(const View& in, const View& out, void*) override { sum(in, out, 0); }
  void reduce_scatter(const View& in, const View& out, void*) override {
    sum(in, out, rank_ * out.rows);
  }
  void all_gather(const View& in, const View& out, void*) override {
    among(in, [&] {
      for (int64_t r = 0; r < out.rows; ++r)
        for (int64_t c = 0; c < out.cols; ++c)
          put(out, r, c, element(group_.posted[static_cast<size_t>(r / in.rows)], r % in.rows, c));
    });
  }

 private:
  template <class F>
  void among(const View& in, F f) {
    group_.posted[static_cast<size_t>(rank_)] = in;
    group_.meet.arrive_and_wait();
    f();
    group_.meet.arrive_and_wait();
  }
  void sum(const View& in, const View& out, int64_t from) {
    among(in, [&] {
      for (int64_t r = 0; r < out.rows; ++r)
        for (int64_t c = 0; c < out.cols; ++c) {
          float total = 0;
          for (const View& v : group_.posted) total += element(v, from + r, c);
          put(out, r, c, total);
        }
    });
  }
  Group& group_;
  int64_t rank_;
};

// Part `i` of `n` along the rows or the columns of a matrix.
Numbers rows_of(const Numbers& m, int64_t i, int64_t n) {
  const auto size = static_cast<int64_t>(m.size()) / n;
  return {m.begin() + i * size, m.begin() + (i + 1) * size};
}
Numbers cols_of(const Numbers& m, int64_t cols, int64_t i, int64_t n) {
  Numbers part;
  for (size_t k = 0; k < m.size(); ++k)
    if (static_cast<int64_t>(k) % cols / (cols / n) == i) part.push_back(m[k]);
  return part;
}
void add_to(Numbers& sum, const Numbers& more) {
  if (sum.empty()) sum.assign(more.size(), 0.0);
  for (size_t k = 0; k < more.size(); ++k) sum[k] += more[k];
}

constexpr int64_t kRows = 12, kIn = 10, kHidden = 24, kOut = 14;

// linear, bias, gelu, linear, bias. The first linear is split by outputs, the second by inputs.
class Parallel : public testing::TestWithParam<std::tuple<int64_t, DType>> {
 protected:
  Parallel() {
    exact = std::make_unique<Chain64>("linear(10,24):up bias:b gelu linear(24,14):down bias:c",
                                      kRows, kIn, whole);
    y = exact->forward(whole.at("x"));
    dx = exact->backward(whole.at("dy"));
  }
  static Numbers make(size_t n, uint64_t seed, double scale = 1) {
    return rounded(normal(n, seed, scale), std::get<1>(GetParam()));
  }
  // Runs both passes of every rank in its own thread. The values of a tensor are a part of the
  // whole tensor.
  void run(const std::string& chain, bool split_rows) {
    Group group(ranks);
    for (int64_t i = 0; i < ranks; ++i) {
      PlanRequest request;
      request.cols = kIn;
      request.dtype = dtype;
      request.collectives = std::make_shared<Rank>(group, i);
      sessions.push_back(
          std::make_unique<Session>(chain, request, split_rows ? kRows / ranks : kRows));
      Session& s = *sessions.back();
      s.set("up.weight", rows_of(whole.at("up.weight"), i, ranks));
      s.set("b.bias", rows_of(whole.at("b.bias"), i, ranks));
      s.set("down.weight", cols_of(whole.at("down.weight"), kHidden, i, ranks));
      s.set("c.bias", whole.at("c.bias"));
      s.set("x", split_rows ? rows_of(whole.at("x"), i, ranks) : whole.at("x"));
      s.set("dy", split_rows ? rows_of(whole.at("dy"), i, ranks) : whole.at("dy"));
    }
    std::vector<std::thread> threads;
    for (const auto& s : sessions)
      threads.emplace_back([&s] {
        s->run(Pass::forward);
        s->run(Pass::backward);
      });
    for (std::thread& t : threads) t.join();
  }
  // Checks the gradients of the split parameters.
  void expect_parts(Session& s, int64_t i) {
    EXPECT_LE(distance(s.get("dup.weight"), rows_of(exact->grads["dup.weight"], i, ranks)), most);
    EXPECT_LE(distance(s.get("db.bias"), rows_of(exact->grads["db.bias"], i, ranks)), most);
    EXPECT_LE(
        distance(s.get("ddown.weight"), cols_of(exact->grads["ddown.weight"], kHidden, i, ranks)),
        most);
  }

  int64_t ranks = std::get<0>(GetParam());
  DType dtype = std::get<1>(GetParam());
  // About ten roundings.
  double most = dtype == DType::f32 ? 0x1p-20 : 0x1p-6;
  std::map<std::string, Numbers> whole{
      {"x", make(kRows* kIn, 1)},
      {"dy", make(kRows* kOut, 2)},
      {"up.weight", make(kHidden* kIn, 3, 0.3)},
      {"b.bias", make(kHidden, 4)},
      {"down.weight", make(kOut* kHidden, 5, 0.2)},
      {"c.bias", make(kOut, 6)},
  };
  std::unique_ptr<Chain64> exact;
  Numbers y, dx;
  std::vector<std::unique_ptr<Session>> sessions;
};

// Every rank has all rows. The caller sums the gradient of the input over the ranks.
TEST_P(Parallel, ColumnsThenRowsThenReduce) {
  const std::string h = std::to_string(kHidden / ranks);
  run("linear(10," + h + "):up bias:b gelu linear(" + h + ",14):down all_reduce bias:c", false);
  Numbers sum;
  for (int64_t i = 0; i < ranks; ++i) {
    Session& s = *sessions[static_cast<size_t>(i)];
    EXPECT_LE(distance(s.get("y"), y), most) << s.plan.describe(kRows);
    EXPECT_EQ(s.get("y"), sessions[0]->get("y"));
    expect_parts(s, i);
    EXPECT_LE(distance(s.get("dc.bias"), exact->grads["dc.bias"]), most);
    add_to(sum, s.get("dx"));
  }
  EXPECT_LE(distance(sum, dx), most);
}

// Every rank has its part of the rows of the input and of the output.
TEST_P(Parallel, GatherThenScatter) {
  const std::string h = std::to_string(kHidden / ranks);
  run("all_gather linear(10," + h + "):up bias:b gelu linear(" + h +
          ",14):down reduce_scatter bias:c",
      true);
  Numbers sum;
  for (int64_t i = 0; i < ranks; ++i) {
    Session& s = *sessions[static_cast<size_t>(i)];
    EXPECT_LE(distance(s.get("y"), rows_of(y, i, ranks)), most) << s.plan.describe(kRows / ranks);
    EXPECT_LE(distance(s.get("dx"), rows_of(dx, i, ranks)), most);
    expect_parts(s, i);
    add_to(sum, s.get("dc.bias"));
  }
  EXPECT_LE(distance(sum, exact->grads["dc.bias"]), most);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Parallel,
                         testing::Combine(testing::Values(2, 3),
                                          testing::Values(DType::f32, DType::bf16)));

// Throws from every call. Needs no other rank.
class Broken final : public Collectives {
 public:
  explicit Broken(int64_t n) : ranks_(n) {}
  [[nodiscard]] int64_t ranks() const override { return ranks_; }
  void all_reduce(const View&, const View&, void*) override {
    throw std::runtime_error("the link is down");
  }
  void all_gather(const View&, const View&, void* stream) override {
    fail(Code::unsupported, "not on stream ", stream != nullptr ? 1 : 0);
  }
  void reduce_scatter(const View&, const View&, void*) override { throw 7; }  // NOLINT: a test

 private:
  int64_t ranks_;
};

PlanRequest with(int64_t ranks) {
  PlanRequest r;
  r.cols = 8;
  r.collectives = std::make_shared<Broken>(ranks);
  return r;
}

TEST(Collective, IsAStepOfItsOwnWithManyRanks) {
  const Plan p = Plan::build("gelu all_gather silu reduce_scatter bias", with(4));
  const PlanData& d = data_of(p);
  ASSERT_EQ(d.forward.size(), 5U) << p.describe(4);
  ASSERT_EQ(d.backward.size(), 5U) << p.describe(4);
  for (const size_t i : {1U, 3U}) {
    EXPECT_EQ(d.forward[i].chosen.maker, "collective");
    EXPECT_EQ(d.backward[i].chosen.maker, "collective");
  }
  EXPECT_EQ(d.forward[2].rows(4), 16);
  EXPECT_EQ(d.forward[4].rows(4), 4);
  EXPECT_NE(p.json(4).find("\"name\":\"all_gather1\",\"head\":\"collective\""), std::string::npos);
  EXPECT_NE(p.describe(4).find("collective reduce_scatter3.bwd"), std::string::npos);
  EXPECT_NE(p.html(4).find("among the ranks"), std::string::npos);
  // The sum's gradient is that of each summand.
  EXPECT_EQ(data_of(Plan::build("gelu all_reduce silu", with(4))).backward.size(), 1U);
}

TEST(Collective, IsNothingWithOneRank) {
  PlanRequest none;
  none.cols = 8;
  const char* chain = "gelu all_reduce all_gather bias reduce_scatter";
  EXPECT_EQ(Plan::build(chain, with(1)).describe(5), Plan::build(chain, none).describe(5));
  EXPECT_EQ(data_of(Plan::build(chain, none)).forward.size(), 1U);
}

TEST(Collective, ErrorsNameTheOp) {
  const auto run = [](const char* chain, Pass pass) {
    Session s(chain, with(2), 6);
    std::map<std::string, Numbers> given;
    fill(s, given);
    s.run(pass);
  };
  expect_error([&] { run("gelu all_reduce:sum", Pass::forward); }, Code::runtime,
               {"sum: the link is down"});
  expect_error([&] { run("all_gather", Pass::forward); }, Code::unsupported,
               {"all_gather0: not on stream 0"});
  expect_error([&] { run("all_gather", Pass::backward); }, Code::runtime,
               {"all_gather0: it threw something that is no std::exception"});
  const Plan p = Plan::build("gelu reduce_scatter", with(2));
  expect_error([&] { p.check_rows(3); }, Code::invalid_argument,
               {"reduce_scatter1: of 3 rows it makes 3*1/2", "give a multiple of 2"});
  expect_error([] { Plan::build("all_reduce", with(0)); }, Code::invalid_argument,
               {"line 1, column 1: all_reduce0: its group has 0 ranks"});
}

// Two objects may be different groups, so they do not share a plan.
TEST(Collective, PlansAreNotShared) {
  EXPECT_NE(&data_of(Plan::build("all_reduce", with(2))),
            &data_of(Plan::build("all_reduce", with(2))));
}

}  // namespace
}  // namespace tenon::test
