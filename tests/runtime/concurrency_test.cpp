// Many threads at once: definitions, compilations, runs, errors, the pool, and fork.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <thread>

#include "backend/cpu/pool.h"
#include "backend/cpu/processors.h"
#include "lower/data.h"
#include "support/plan_support.h"

namespace tenon::test {
namespace {

constexpr int kThreadCount = 8;
constexpr int kRounds = 6;

// Starts all threads together; each gets its number.
template <class F>
void together(F f) {
  std::barrier start(kThreadCount);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreadCount; ++t)
    threads.emplace_back([&, t] {
      start.arrive_and_wait();
      f(t);
    });
  for (std::thread& t : threads) t.join();
}

// dx and dbias of one call, as bytes.
struct Result {
  Mat y{DType::bf16, 130, 64}, dx{DType::f32, 130, 64}, dbias{DType::f32, 1, 64};
  bool operator==(const Result& o) const {
    return y.same_bytes(o.y) && dx.same_bytes(o.dx) && dbias.same_bytes(o.dbias);
  }
};
Result compute(const Activation& f) {
  static const Mat kX = Mat(DType::f32, 130, 64).fill(1), kG = Mat(DType::bf16, 130, 64).fill(2);
  Result r;
  forward(f, {.x = kX.view(), .y = r.y.view()});
  backward(f, {.grad = kG.view(), .x = kX.view(), .dx = r.dx.view(), .dbias = r.dbias.view()});
  return r;
}

std::string unique_formula(int thread, int round) {
  return str("x*sigmoid(beta*x)+", 1 + thread, "*tanh(x/", 2 + round, "); beta = 1.5");
}

TEST(Concurrency, EverythingAtOnce) {
  std::vector<Result> expected;
  {
    const Threads one(1);
    for (const char* name : {"gelu", "silu", "mish"}) expected.push_back(compute(activation(name)));
  }
  std::vector<Result> own(kThreadCount * kRounds);
  together([&](int t) {
    for (int i = 0; i < kRounds; ++i) {
      if (t % 4 == 0) set_threads(1 + (t + i) % 5);
      const std::string name = str("mine_", t, "_", i % 2);
      define(name, unique_formula(t, i));
      own[static_cast<size_t>(t * kRounds + i)] = compute(activation(name));
      define("shared_name", unique_formula(t, i));  // all threads define it again and again
      EXPECT_EQ(activation("shared_name").parameters.size(), 1U);
      EXPECT_GE(activation_names().size(), 22U);
      size_t k = 0;
      for (const char* built_in : {"gelu", "silu", "mish"})
        EXPECT_TRUE(compute(activation(built_in)) == expected[k++]) << built_in;
      const std::string unknown = str("no_such_", t);
      expect_error([&] { activation(unknown); }, Code::invalid_argument, {unknown});
    }
  });
  const Threads one(1);
  for (int t = 0; t < kThreadCount; ++t)
    for (int i = 0; i < kRounds; ++i)
      EXPECT_TRUE(own[static_cast<size_t>(t * kRounds + i)] ==
                  compute(activation(unique_formula(t, i))))
          << unique_formula(t, i);
}

TEST(Concurrency, FusedFunctionsFromManyThreads) {
  const Mat x = Mat(DType::f32, 65, 33).fill(3), row = Mat(DType::f32, 1, 33).fill(4);
  const Fused shared = fuse([](Expr a, Expr b) { return a * b + a; });
  together([&](int) {
    for (int i = 0; i < kRounds; ++i) {
      Mat y(DType::f32, 65, 33), dx(DType::f32, 65, 33), drow(DType::f32, 1, 33);
      shared.forward({x.view(), row.view()}, y.view());
      shared.backward({x.view(), row.view()}, x.view(), {dx.view(), drow.view()});
      for (int64_t c = 0; c < 33; ++c) {
        std::vector<float> products;
        for (int64_t r = 0; r < 65; ++r) {
          expect_element(y, r, c, x.at(r, c) * row.at(0, c) + x.at(r, c), "y");
          products.push_back(x.at(r, c) * x.at(r, c));
        }
        expect_element(drow, 0, c, tree(products), "drow");
      }
    }
  });
}

#if defined(__linux__)
// The bytes of compiled code in memory. No page may be writable and executable.
size_t compiled_bytes() {
  std::ifstream maps("/proc/self/maps");
  size_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    size_t begin = 0, end = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%zx-%zx %4s", &begin, &end, rights) != 3) continue;
    const bool executable = rights[2] == 'x';
    EXPECT_FALSE(executable && rights[1] == 'w') << line;
    // Code of files and of the system has a name.
    if (executable && line.find_first_of("/[") == std::string::npos) bytes += end - begin;
  }
  return bytes;
}

TEST(Concurrency, FirstCallsCompileOnceToCodeThatIsNotWritable) {
  const Mat x = Mat(DType::f32, 65, 33).fill(7);
  const auto function = [](float k) {
    return fuse([k](Expr a) { return a * tanh(a) + sigmoid(a * k); });
  };
  const auto run = [&](const Fused& f) {
    Mat y(DType::f32, 65, 33);
    f.forward({x.view()}, y.view());
    return y;
  };
  const size_t none = compiled_bytes();
  run(function(1.5F));
  const size_t one = compiled_bytes() - none;
  if (one == 0) GTEST_SKIP() << "this processor, this build or TENON_ISA has no JIT";
  for (int i = 0; i < 2 * kRounds; ++i) {
    const Fused f = function(2.5F + static_cast<float>(i));
    const size_t before = compiled_bytes();
    std::vector<std::optional<Mat>> y(kThreadCount);
    together([&](int t) {
      y[static_cast<size_t>(t)] = run(f);
      compiled_bytes();  // while others still compile
    });
    EXPECT_EQ(compiled_bytes() - before, one);
    for (const auto& m : y) EXPECT_TRUE(m->same_bytes(*y[0]));
  }
}
#endif

// All that both passes of a plan give.
std::vector<Numbers> results(std::string_view chain, const PlanRequest& request, int64_t rows) {
  Session s(chain, request, rows);
  std::map<std::string, Numbers> given;
  fill(s, given);
  std::vector<Numbers> all;
  s.run(Pass::forward);
  s.run(Pass::backward);
  for (const Buffer& b : s.plan.buffers())
    if (b.role == Role::output || b.role == Role::grad) all.push_back(s.get(b.name));
  return all;
}

constexpr const char* kPlanned =
    "make_extra_output>r rmsnorm linear(32,64) bias swiglu linear(32,32) bias dropout(0.1) add<r";

PlanRequest planned(const char* recipe_name) {
  PlanRequest r;
  r.dtype = DType::bf16;
  r.recipe = recipe(recipe_name);
  return r;
}

TEST(Plans, OneServesManyThreads) {
  const PlanRequest request = planned("mxfp8");
  std::vector<std::vector<Numbers>> expected;
  {
    const Threads one(1);
    for (int rows = 1; rows <= kThreadCount; ++rows)
      expected.push_back(results(kPlanned, request, 9 * rows));
  }
  const Plan shared = Plan::build(kPlanned, request);
  together([&](int t) {
    EXPECT_EQ(&data_of(Plan::build(kPlanned, request)), &data_of(shared));
    for (int i = 0; i < kRounds; ++i) {
      const int k = (t + i) % kThreadCount;
      EXPECT_TRUE(results(kPlanned, request, 9 * (k + 1)) == expected[static_cast<size_t>(k)]) << k;
    }
    EXPECT_EQ(shared.describe(9), Plan::build(kPlanned, request).describe(9));
  });
}

TEST(Plans, ManyThreadsBuildAndRunTheirOwn) {
  const char* const kRecipes[] = {"none", "delayed", "current", "mxfp8", "block"};
  // The same for all, and one that no other thread and no round before has.
  const auto text = [](int t, int i) {
    return str(kPlanned, " scale(", 1 + t, ") act(\"x*tanh(x/", 2 + i, ")\")");
  };
  std::vector<std::vector<Numbers>> own(kThreadCount * kRounds), shared(kThreadCount * kRounds);
  together([&](int t) {
    for (int i = 0; i < kRounds; ++i) {
      const PlanRequest r = planned(kRecipes[i % 5]);
      const auto at = static_cast<size_t>(t * kRounds + i);
      shared[at] = results(text(99, i), r, 17);
      own[at] = results(text(t, i), r, 17);
      expect_error([&] { Plan::build(str("linear(4,", 5 + t, ") linear(99,2)"), r); },
                   Code::invalid_argument, {"linear1: input has", "weight wants 99"});
    }
  });
  const Threads one(1);
  for (int t = 0; t < kThreadCount; ++t)
    for (int i = 0; i < kRounds; ++i) {
      const PlanRequest r = planned(kRecipes[i % 5]);
      const auto at = static_cast<size_t>(t * kRounds + i);
      EXPECT_TRUE(own[at] == results(text(t, i), r, 17)) << text(t, i);
      EXPECT_TRUE(shared[at] == results(text(99, i), r, 17)) << text(99, i);
    }
}

// Large enough that the pool's threads share each product (few rows, and blocks of them) and norm.
TEST(Plans, ThreadsShareProductsAndNorms) {
  PlanRequest request = planned("none");
  request.dtype = DType::f32;
  for (const char* chain : {"linear(64,160) bias gelu linear(160,64)", "layernorm(192)"})
    for (const int64_t rows : {int64_t{70}, int64_t{600}}) {
      std::vector<Numbers> expected;
      {
        const Threads one(1);
        expected = results(chain, request, rows);
      }
      const Threads four(4);
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(results(chain, request, rows) == expected) << chain;
    }
}

TEST(Pool, SplitsCoverTheRangeOnce) {
  for (const int threads : {1, 2, 7}) {
    const Threads scope(threads);
    EXPECT_EQ(tenon::threads(), threads);
    for (const int64_t n : {0, 1, 2, 6, 7, 8, 1000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
      cpu::parallel_for(n, [&](int64_t begin, int64_t end) {
        EXPECT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (const auto& h : hits) EXPECT_EQ(h.load(), 1);
    }
  }
}

// The piece that holds the first number waits for all others, also those of its own thread's part.
TEST(Pool, ASlowThreadHoldsNobodyUp) {
  const Threads scope(2);
  constexpr int64_t kCount = 1000;
  std::atomic<int64_t> done = 0;
  bool alone = false;
  cpu::parallel_for(kCount, [&](int64_t begin, int64_t end) {
    done += end - begin;
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (begin == 0 && done < kCount && !alone) {
      alone = std::chrono::steady_clock::now() > late;
      std::this_thread::yield();
    }
  });
  EXPECT_FALSE(alone) << "the rest of the slow thread's part waited for it";
}

TEST(Pool, NestedCallsRunInline) {
  const Threads scope(4);
  std::atomic<int> inner_parts = 0;
  std::atomic<bool> moved = false;
  cpu::parallel_for(4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto outer = std::this_thread::get_id();
      cpu::parallel_for(100, [&](int64_t first, int64_t last) {
        ++inner_parts;
        if (std::this_thread::get_id() != outer || first != 0 || last != 100) moved = true;
      });
    }
  });
  EXPECT_EQ(inner_parts.load(), 4);
  EXPECT_FALSE(moved.load());
}

TEST(Pool, ExceptionsReachTheCaller) {
  for (const int threads : {1, 4}) {
    const Threads scope(threads);
    for (const int64_t bad : {0, 50, 99})
      EXPECT_THROW(cpu::parallel_for(100,
                                     [&](int64_t begin, int64_t end) {
                                       if (begin <= bad && bad < end)
                                         throw std::out_of_range("a part failed");
                                     }),
                   std::out_of_range);
    std::atomic<int64_t> sum = 0;  // the pool works on afterwards
    cpu::parallel_for(100, [&](int64_t begin, int64_t end) { sum += end - begin; });
    EXPECT_EQ(sum.load(), 100);
  }
}

TEST(Pool, AHostMayReplaceIt) {
  const Threads scope(3);
  const Result expected = compute(activation("gelu"));
  std::atomic<int> calls = 0;
  cpu::set_parallel_for([&](int64_t n, const cpu::Range& body) {
    ++calls;
    for (int64_t i = n; i-- > 0;) body(i, i + 1);  // backwards, one by one
  });
  const Result got = compute(activation("gelu"));
  Mat big(DType::f32, 700, 600);
  const Fused one = fuse([](Expr x) { return x + 1.0F; });
  big.fill(5);
  const Mat before = big;
  one.forward({big.view()}, big.view());
  const int used = calls;
  cpu::set_parallel_for({});
  EXPECT_GT(used, 0);
  EXPECT_TRUE(got == expected);
  for (int64_t r = 0; r < 700; r += 13)
    for (int64_t c = 0; c < 600; ++c) expect_element(big, r, c, before.at(r, c) + 1.0F, "y");
  one.forward({before.view()}, big.view());
  EXPECT_EQ(calls.load(), used) << "the replacement is still in use";
}

// ThreadSanitizer does not follow a fork with threads; AddressSanitizer's allocator keeps locks
// that another thread held at the fork.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(Fork, AChildOfABusyParentComputesTheSameBits) {
  const Threads scope(4);
  const Mat x = Mat(DType::f32, 600, 512).fill(6);
  const auto run = [&](const Mat& y) {
    forward(activation("gelu"), {.x = x.view(), .y = y.view()});
  };
  const Mat expected(DType::f32, 600, 512);
  run(expected);
  compute(activation("gelu"));  // its constants, before a fork can meet them half made
  std::atomic<bool> stop = false;
  std::vector<std::thread> busy;
  for (int t = 0; t < 3; ++t)
    busy.emplace_back([&, t] {
      const Mat y(DType::f32, 600, 512);
      for (int i = 0; !stop; ++i) {
        run(y);
        define(str("busy_", t), unique_formula(t, i % 50));
        compute(activation(unique_formula(t, 100 + i % 50)));
      }
    });
  for (int i = 0; i < 10; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a hang ends by a signal, which the parent sees
      const Mat y(DType::f32, 600, 512);
      run(y);
      define("in_child", "x*x");
      compute(activation(unique_formula(77, i)));
      _exit(y.same_bytes(expected) && threads() == 4 ? 0 : 1);
    }
    ASSERT_GT(child, 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  }
  stop = true;
  for (std::thread& t : busy) t.join();
}
#endif

// A file system with these files; what a container's processes see.
int quota_of(std::initializer_list<std::pair<const char*, const char*>> files) {
  namespace fs = std::filesystem;
  std::string name = (fs::temp_directory_path() / "tenon-quota-XXXXXX").string();
  EXPECT_NE(mkdtemp(name.data()), nullptr);
  for (const auto& [file, text] : files) {
    const fs::path path = fs::path(name) / file;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  const int found = cpu::quota(name);
  fs::remove_all(name);
  return found;
}

TEST(Processors, AreThoseThatTheQuotaPaysFor) {
  const auto version2 = [](const char* group, const char* inner, const char* outer) {
    return quota_of({{"proc/self/cgroup", group},
                     {"sys/fs/cgroup/a/b/cpu.max", inner},
                     {"sys/fs/cgroup/a/cpu.max", outer}});
  };
  EXPECT_EQ(version2("0::/a/b\n", "max 100000\n", "max 100000\n"), 0);
  EXPECT_EQ(version2("0::/a/b\n", "200000 100000\n", "max 100000\n"), 2);
  EXPECT_EQ(version2("0::/a/b\n", "250000 100000\n", "max 100000\n"), 3);
  EXPECT_EQ(version2("0::/a/b\n", "800000 100000\n", "400000 100000\n"), 4);
  EXPECT_EQ(version2("0::/a/b\n", "5000 100000\n", "400000 100000\n"), 1);
  EXPECT_EQ(version2("0::/\n", "200000 100000\n", "400000 100000\n"), 0);
  EXPECT_EQ(version2("what is this", "200000 100000\n", ""), 0);
  EXPECT_EQ(quota_of({{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/cpu.max", "150000 100000"}}),
            2);
  const auto version1 = [](const char* quota, const char* period) {
    return quota_of({{"proc/self/cgroup", "4:memory:/m\n3:cpu,cpuacct:/c\n"},
                     {"sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", quota},
                     {"sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us", period}});
  };
  EXPECT_EQ(version1("-1", "100000"), 0);
  EXPECT_EQ(version1("300000", "100000"), 3);
  EXPECT_EQ(version1("300000", "0"), 0);
  EXPECT_EQ(quota_of({}), 0);
  EXPECT_GE(cpu::processors(), 1);
}

}  // namespace
}  // namespace tenon::test
