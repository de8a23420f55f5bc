// Every kernel text that plans and public calls need, compiled without a GPU.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "backend/cuda/kernels.h"
#include "backend/cuda/nvrtc.h"
#include "cli/bench_cases.h"
#include "golden_plans.h"
#include "plan/data.h"
#include "support.h"
#include "tenon/error.h"

namespace tenon::test {
namespace {

constexpr const char* kArchs[] = {"sm_80", "sm_90a", "sm_100a", "sm_120a"};

// As the check of kernels does: a few texts of the same skeletons are compiled as one.
void compile_all(const std::set<std::string>& texts, const std::vector<const char*>& archs) {
  ASSERT_FALSE(cuda::why_no_nvrtc()) << *cuda::why_no_nvrtc() << "\nrun ./dev test";
  constexpr size_t kTogether = 6;
  std::vector<std::vector<std::string>> groups;
  std::map<std::string, size_t> open;
  for (const std::string& text : texts) {
    const auto [at, fresh] = open.try_emplace(cuda::skeletons_of(text), groups.size());
    if (fresh || groups[at->second].size() == kTogether) {
      at->second = groups.size();
      groups.emplace_back();
    }
    groups[at->second].push_back(text);
  }
  std::atomic<size_t> next = 0;
  std::mutex failing;
  const auto work = [&] {
    for (size_t i = next++; i < groups.size() * archs.size(); i = next++) {
      try {
        cuda::compile(cuda::joined(groups[i / archs.size()]), archs[i % archs.size()]);
      } catch (const Error& e) {
        const std::lock_guard guard(failing);
        ADD_FAILURE() << archs[i % archs.size()] << ": " << e.what();
      }
    }
  };
  std::thread other(work);
  work();
  other.join();
}

TEST(CudaTexts, OfGoldenPlansCompileForEveryArchitecture) {
  std::set<std::string> texts;
  for (const Golden& g : kGoldenPlans) {
    const Plan plan = Plan::build(g.chain, request_of(g, Device::cuda));
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const PlanStep& s : plan.data().steps(pass))
        if (s.chosen.kernel)
          for (std::string& text : s.chosen.kernel->texts()) texts.insert(std::move(text));
  }
  EXPECT_GE(texts.size(), std::size(kGoldenPlans));
  compile_all(texts, {std::begin(kArchs), std::end(kArchs)});
}

// The fast kernels; the oldest architecture has the least of everything.
TEST(CudaTexts, OfBenchCasesCompileForTheOldestArchitecture) {
  std::set<std::string> texts;
  Options options;
  options.device = Device::cuda;
  for (const cli::BenchCase& c : cli::bench_cases(DType::bf16, false)) {
    cli::BenchMemory nowhere;
    for (const cli::BenchCall& call :
         cli::bench_calls(c, {16384, 14336}, DType::bf16, options, nowhere))
      for (std::string& text :
           call.kernel->texts_for({call.rows, call.in, call.out, call.parameters}))
        texts.insert(std::move(text));
  }
  EXPECT_GE(texts.size(), 100U);
  compile_all(texts, {kArchs[0]});
}

}  // namespace
}  // namespace tenon::test
