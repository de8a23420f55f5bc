// Compiles every kernel text that plans and public calls need, without a GPU.
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "backend/cuda/kernels.h"
#include "backend/cuda/nvrtc.h"
#include "bench/cases.h"
#include "bench/cubin.h"
#include "lower/data.h"
#include "support/golden_plans.h"
#include "support/support.h"
#include "tenon/error.h"

namespace tenon::test {
namespace {

constexpr const char* kArchs[] = {"sm_80", "sm_90a", "sm_100a", "sm_120a"};

// Compiles a few texts at a time. `look` gets each text and the local memory of its kernels.
using Look = std::function<void(const std::string& text, std::string_view arch, int local_bytes)>;
void compile_all(
    const std::set<std::string>& texts, const std::vector<const char*>& archs,
    const Look& look = [](const std::string&, std::string_view, int) {}) {
  ASSERT_FALSE(cuda::why_no_nvrtc()) << *cuda::why_no_nvrtc() << "\nrun ./dev test";
  constexpr size_t kTogether = 6;
  std::vector<const std::string*> order;
  for (const std::string& text : texts) order.push_back(&text);
  const std::vector<size_t> numbers = cuda::groups_of(order, kTogether);
  std::vector<std::vector<std::string>> groups(1 + *std::ranges::max_element(numbers));
  for (size_t i = 0; i < order.size(); ++i) groups[numbers[i]].push_back(*order[i]);
  std::atomic<size_t> next = 0;
  std::mutex telling;
  const auto work = [&] {
    for (size_t i = next++; i < groups.size() * archs.size(); i = next++) {
      const std::vector<std::string>& group = groups[i / archs.size()];
      const char* const arch = archs[i % archs.size()];
      try {
        const auto uses = bench::kernel_uses(cuda::compile(cuda::joined(group), arch).image);
        const std::lock_guard guard(telling);
        EXPECT_FALSE(uses.empty());
        for (size_t k = 0; k < group.size(); ++k) {
          int most = 0;
          for (const auto& [kernel, use] : uses)
            if (kernel.starts_with(str("part", k, "_"))) most = std::max(most, use.local_bytes);
          look(group[k], arch, most);
        }
      } catch (const Error& e) {
        const std::lock_guard guard(telling);
        ADD_FAILURE() << arch << ": " << e.what();
      }
    }
  };
  std::thread other(work);
  work();
  other.join();
}

TEST(CudaTexts, OfGoldenPlansCompileForEveryArchitecture) {
  for (const char* const arch : kArchs) {
    std::set<std::string> texts;
    for (const Golden& g : kGoldenPlans) {
      PlanRequest request = request_of(g, Device::cuda);
      request.target = arch;
      const Plan plan = Plan::build(g.chain, request);
      for (const Pass pass : {Pass::forward, Pass::backward})
        for (const PlanStep& s : data_of(plan).steps(pass))
          if (s.chosen.kernel)
            for (std::string& text : s.chosen.kernel->texts()) texts.insert(std::move(text));
    }
    EXPECT_GE(texts.size(), std::size(kGoldenPlans));
    compile_all(texts, {arch});
  }
}

// The fast kernels with the names of their cases, for whole and for partial tiles.
std::map<std::string, std::set<std::string>> bench_texts() {
  std::map<std::string, std::set<std::string>> cases;
  Options options;
  options.device = Device::cuda;
  for (const bench::BenchCase& c : bench::bench_cases(DType::bf16, false))
    for (const int64_t rows : {16384, 16390}) {
      bench::BenchMemory nowhere;
      for (const bench::BenchCall& call :
           bench::bench_calls(c, {rows, 14336}, DType::bf16, options, nowhere))
        for (const std::string& text :
             call.kernel->texts_for({call.rows, call.in, call.out, call.parameters}))
          cases[text].insert(c.name());
    }
  EXPECT_GE(cases.size(), 100U);
  return cases;
}
std::set<std::string> keys(const std::map<std::string, std::set<std::string>>& map) {
  std::set<std::string> all;
  for (const auto& [key, value] : map) all.insert(key);
  return all;
}

TEST(CudaTexts, OfBenchCasesCompileForTheOldestArchitecture) {
  compile_all(keys(bench_texts()), {kArchs[0]});
}

// On their target architecture, only a few long formulas spill registers.
TEST(CudaTexts, OfBenchCasesHaveNoLocalMemory) {
  const std::set<std::string> spill{"layernorm.bwd bf16", "layernorm bf16 -> e4m3 mxfp8 rowcol",
                                    "swiglu.bwd bf16 -> e5m2 current rowcol +dbias"};
  const auto cases = bench_texts();
  std::set<std::string> spilled;
  compile_all(keys(cases), {"sm_90a"},
              [&](const std::string& text, std::string_view, int local_bytes) {
                if (local_bytes > 0) spilled.insert(cases.at(text).begin(), cases.at(text).end());
              });
  EXPECT_EQ(spilled, spill);
}

}  // namespace
}  // namespace tenon::test
