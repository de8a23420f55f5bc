// `tenon check`: runs the cases through the public calls and looks at every step from outside.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/nvrtc.h"
#include "cli/cases.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/trial.h"
#include "step/verify.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

constexpr size_t kMostTexts = 1400;       // compiled for a list; more kernels than that share texts
constexpr size_t kMostRandomTexts = 400;  // for cases by chance
constexpr size_t kRandomForms = 150;      // a form needs three kernels or so

bool selected(const Case& c, const CheckArgs& args) {
  const std::string text = c.text();
  if (!args.precision.empty() && c[Column::precision] != args.precision) return false;
  return std::ranges::all_of(
      args.substrings, [&](const std::string& s) { return text.find(s) != std::string::npos; });
}

// On all cores, in any order: run(i) for each i below n, behind a bar that says what(i).
template <class Run, class What>
void on_all_cores(size_t n, Run run, What what) {
  std::atomic<size_t> next = 0;
  std::mutex printing;
  Progress progress(n);
  const auto work = [&] {
    for (size_t i = next++; i < n; i = next++) {
      const std::optional<std::string> line = run(i);
      const std::lock_guard guard(printing);
      progress.step(what(i));
      if (line) fmt::print("{}\n", *line);
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads(); ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
}

// Runs every chosen case, prints what failed, and returns how many passed.
size_t run_all(const std::vector<Case>& chosen, Device device) {
  std::atomic<size_t> passed = 0;
  const auto run = [&](size_t i) -> std::optional<std::string> {
    const auto wrong = Trial(chosen[i], device).run(verify);
    if (wrong) return fmt::format("FAILED {}: {}", chosen[i].text(), *wrong);
    ++passed;
    return std::nullopt;
  };
  on_all_cores(chosen.size(), run, [&](size_t i) { return chosen[i].text(); });
  return passed;
}

// What the cases have NVRTC compile.
class Texts {
 public:
  // Takes the first cases that need at most `most` kernels, `count` of them.
  Texts(std::vector<Case>& chosen, size_t count, size_t most) {
    std::vector<std::vector<const std::string*>> needs(chosen.size());
    std::mutex adding;
    std::set<std::string> known;
    const auto find = [&](size_t i) -> std::optional<std::string> {
      std::vector<std::string> texts = Trial(chosen[i], Device::cpu).cuda_texts();
      const std::lock_guard guard(adding);
      for (std::string& text : texts) needs[i].push_back(&*known.insert(std::move(text)).first);
      return std::nullopt;
    };
    on_all_cores(chosen.size(), find, [](size_t) { return "reading what there is to compile"; });
    std::set<const std::string*> used;
    std::vector<Case> taken;
    for (size_t i = 0; i < chosen.size() && taken.size() < count; ++i) {
      std::set<const std::string*> with(used);
      with.insert(needs[i].begin(), needs[i].end());
      if (with.size() > most) continue;
      used.swap(with);
      taken.push_back(std::move(chosen[i]));
    }
    chosen = std::move(taken);
    kernels_ = used.size();
    share(used);
  }

  [[nodiscard]] size_t kernels() const { return kernels_; }
  [[nodiscard]] size_t size() const { return groups_.size(); }

  // compile(texts) for each group; the errors, of which each is a line.
  template <class Compile>
  std::vector<std::string> compile(Compile compile) const {
    std::vector<std::string> errors;
    std::mutex adding;
    const auto run = [&](size_t i) -> std::optional<std::string> {
      try {
        compile(groups_[i]);
      } catch (const Error& e) {
        const std::lock_guard guard(adding);
        errors.emplace_back(e.what());
        return fmt::format("FAILED text {}: {}", i, e.what());
      }
      return std::nullopt;
    };
    on_all_cores(groups_.size(), run, [](size_t) { return "compiling"; });
    return errors;
  }

 private:
  // Kernels of the same skeletons, as many in a text as it takes.
  void share(const std::set<const std::string*>& used) {
    const size_t each = (used.size() + kMostTexts - 1) / kMostTexts;
    std::map<std::string, std::vector<std::string>> open;
    std::set<std::string> sorted;  // so that texts do not depend on the order of threads
    for (const std::string* text : used) sorted.insert(*text);
    for (const std::string& text : sorted) {
      std::vector<std::string>& group = open[cuda::skeletons_of(text)];
      group.push_back(text);
      if (group.size() == each) groups_.push_back(std::exchange(group, {}));
    }
    for (auto& [skeletons, group] : open)
      if (!group.empty()) groups_.push_back(std::move(group));
  }

  size_t kernels_ = 0;
  std::vector<std::vector<std::string>> groups_;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Without a GPU the texts are still compiled, for the architecture that is tested on.
int compile_only(const Texts& texts, const std::string& why) {
  constexpr const char* kArch = "sm_90a";
  const size_t wrong = texts
                           .compile([](const std::vector<std::string>& group) {
                             cuda::compile(cuda::joined(group), kArch);
                           })
                           .size();
  fmt::print("{} texts compiled for {}, {} not; none was run: {}\n", texts.size() - wrong, kArch,
             wrong, why);
  fmt::print("0 passed, {} failed\n", wrong);
  return wrong == 0 ? no_device : failed;
}

int check_cuda(std::vector<Case> chosen, const CheckArgs& args) {
  const auto no_gpu = cuda::why_no_gpu();
  if (const auto missing = cuda::why_no_nvrtc()) {
    fmt::print(stderr, "tenon check: nothing to compile with: {}\n", *missing);
    fmt::print("0 passed, 0 failed\n");
    return no_device;
  }
  if (no_gpu && args.random > 0) {
    fmt::print(stderr, "tenon check: cases by chance compare a GPU with the CPU: {}\n", *no_gpu);
    fmt::print("0 passed, 0 failed\n");
    return no_device;
  }
  const auto start = std::chrono::steady_clock::now();
  const Texts texts(chosen, args.random > 0 ? static_cast<size_t>(args.random) : chosen.size(),
                    args.random > 0 ? kMostRandomTexts : SIZE_MAX);
  fmt::print("{} cases, {} kernels in {} texts, listed in {:.1f} s\n", chosen.size(),
             texts.kernels(), texts.size(), seconds_since(start));
  if (no_gpu) return compile_only(texts, *no_gpu);
  const auto compiling = std::chrono::steady_clock::now();
  const std::vector<std::string> errors = texts.compile(cuda::load_joined);
  fmt::print("compiled in {:.1f} s on {} threads\n", seconds_since(compiling), threads());
  const auto running = std::chrono::steady_clock::now();
  const size_t passed = run_all(chosen, Device::cuda);
  fmt::print("ran in {:.1f} s\n", seconds_since(running));
  const size_t wrong = chosen.size() - passed + errors.size();
  fmt::print("{} passed, {} failed\n", passed, wrong);
  return wrong == 0 ? ok : failed;
}

}  // namespace

int check(const CheckArgs& args) {
  const bool cuda = args.device == "cuda";
  std::vector<Case> all;
  if (args.random > 0) {
    // Some are left out where they would need one kernel too many.
    const auto wanted = static_cast<size_t>(args.random);
    all = random_cases(cuda ? wanted + wanted / 4 : wanted, kRandomForms, args.seed);
  } else {
    all = cuda ? cases_of_few_kernels() : cases();
  }
  std::vector<Case> chosen;
  size_t number = 0;
  for (Case& c : all)
    if (selected(c, args) && number++ % static_cast<size_t>(args.every) == 0)
      chosen.push_back(std::move(c));
  if (chosen.empty()) {
    fmt::print(stderr, "tenon check: no case contains all of the given substrings; see --list\n");
    return usage;
  }
  if (args.list) {
    for (const Case& c : chosen) fmt::print("{}\n", c.text());
    return ok;
  }
  if (cuda) return check_cuda(std::move(chosen), args);
  const size_t passed = run_all(chosen, Device::cpu);
  fmt::print("{} passed, {} failed\n", passed, chosen.size() - passed);
  return passed == chosen.size() ? ok : failed;
}

}  // namespace tenon::cli
