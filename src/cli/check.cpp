// `tenon check`: runs the test cases through the public API and checks every step with an observer.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/nvrtc.h"
#include "cli/command.h"
#include "support/cases.h"
#include "support/progress.h"
#include "support/trial.h"
#include "support/verify.h"
#include "tenon/error.h"

namespace tenon::cli {

using namespace support;  // NOLINT: the command runs its cases and references

namespace {

struct CheckArgs {
  std::vector<std::string> substrings;
  bool list = false;
  std::string device = "cpu";
  std::string precision;  // empty: both
  int every = 1;
  int random = 0;  // number of random cases, instead of the list
  uint64_t seed = 1;
};

constexpr size_t kMostTexts = 1400;       // for a list; with more kernels, several share a text
constexpr size_t kMostRandomTexts = 400;  // for random cases
constexpr size_t kRandomForms = 150;      // a form needs about three kernels

bool selected(const Case& c, const CheckArgs& args) {
  const std::string text = c.text();
  if (!args.precision.empty() && c[Column::precision] != args.precision) return false;
  return std::ranges::all_of(
      args.substrings, [&](const std::string& s) { return text.find(s) != std::string::npos; });
}

// Runs work() on all cores. work() returns when no work is left.
void on_all_cores(const std::function<void()>& work) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads(); ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
}

// Calls run(i) for each i below n, in any order, with a progress bar that shows what(i).
template <class Run, class What>
void for_each(size_t n, Run run, What what) {
  std::atomic<size_t> next = 0;
  std::mutex printing;
  Progress progress(n);
  on_all_cores([&] {
    for (size_t i = next++; i < n; i = next++) {
      const std::optional<std::string> line = run(i);
      const std::lock_guard guard(printing);
      progress.step(what(i));
      if (!line) continue;
      progress.hide();
      fmt::print("{}\n", *line);
    }
  });
}

std::optional<std::string> failure(const Case& c, Device device) {
  const auto wrong = Trial(c, device).run(verify);
  return wrong ? std::optional(fmt::format("FAILED {}: {}", c.text(), *wrong)) : std::nullopt;
}

// Runs the chosen cases, prints the failures, and returns the number of passed cases.
size_t run_all(const std::vector<Case>& chosen) {
  std::atomic<size_t> passed = 0;
  const auto run = [&](size_t i) {
    const auto wrong = failure(chosen[i], Device::cpu);
    if (!wrong) ++passed;
    return wrong;
  };
  for_each(chosen.size(), run, [&](size_t i) { return chosen[i].text(); });
  return passed;
}

// The texts that NVRTC must compile for the cases. Each text is a group of kernels.
class Texts {
 public:
  // Selects up to `count` cases, in order, that together need at most `most` kernels.
  Texts(std::vector<Case>& chosen, size_t count, size_t most) {
    std::vector<std::vector<const std::string*>> needs(chosen.size());
    std::mutex adding;
    std::set<std::string> known;  // sorted, so that the order does not depend on threads
    const auto find = [&](size_t i) -> std::optional<std::string> {
      std::vector<std::string> texts = Trial(chosen[i], Device::cpu).cuda_texts();
      const std::lock_guard guard(adding);
      for (std::string& text : texts) needs[i].push_back(&*known.insert(std::move(text)).first);
      return std::nullopt;
    };
    for_each(chosen.size(), find, [](size_t) { return "reading what there is to compile"; });
    std::set<const std::string*> used;
    std::vector<Case> taken;
    std::vector<std::vector<const std::string*>> needs_of_taken;
    for (size_t i = 0; i < chosen.size() && taken.size() < count; ++i) {
      std::set<const std::string*> with(used);
      with.insert(needs[i].begin(), needs[i].end());
      if (with.size() > most) continue;
      used.swap(with);
      needs_of_taken.push_back(std::move(needs[i]));
      taken.push_back(std::move(chosen[i]));
    }
    chosen = std::move(taken);
    kernels_ = used.size();
    std::map<const std::string*, size_t> group_of;
    const size_t each = (kernels_ + kMostTexts - 1) / kMostTexts;
    std::vector<const std::string*> order;
    for (const std::string& text : known)
      if (used.contains(&text)) order.push_back(&text);
    const std::vector<size_t> numbers = cuda::groups_of(order, each);
    for (size_t i = 0; i < order.size(); ++i) {
      group_of[order[i]] = numbers[i];
      groups_.resize(std::max(groups_.size(), numbers[i] + 1));
      groups_[numbers[i]].push_back(*order[i]);
    }
    for (const auto& texts : needs_of_taken) {
      std::set<size_t>& of = needs_.emplace_back();
      for (const std::string* text : texts) of.insert(group_of.at(text));
    }
  }

  [[nodiscard]] size_t kernels() const { return kernels_; }
  [[nodiscard]] const std::vector<std::vector<std::string>>& groups() const { return groups_; }
  // The groups of each case.
  [[nodiscard]] const std::vector<std::set<size_t>>& needs() const { return needs_; }

 private:
  size_t kernels_ = 0;
  std::vector<std::vector<std::string>> groups_;
  std::vector<std::set<size_t>> needs_;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Compiles the groups, and runs each case as soon as all its groups are compiled.
class Pipeline {
 public:
  using Compile = std::function<void(const std::vector<std::string>&)>;
  using Run = std::function<std::optional<std::string>(size_t)>;  // returns the error, if any

  Pipeline(const Texts& texts, Compile compile, Run run)
      : groups_(texts.groups()),
        compile_(std::move(compile)),
        run_(std::move(run)),
        waiting_(groups_.size()),
        progress_(groups_.size() + texts.needs().size(), Progress::Lines::yes) {
    for (size_t i = 0; i < texts.needs().size(); ++i) {
      missing_.push_back(texts.needs()[i].size());
      if (missing_[i] == 0) ready_.push_back(i);
      for (const size_t group : texts.needs()[i]) waiting_[group].push_back(i);
    }
  }

  void go() {
    on_all_cores([this] { work(); });
  }

  // For groups or for cases. Seconds are summed over all threads.
  struct Sums {
    size_t failed = 0;
    double seconds = 0, longest = 0;
  };
  [[nodiscard]] const Sums& compiled() const { return compiled_; }
  [[nodiscard]] const Sums& ran() const { return ran_; }

 private:
  // Cases come before groups, so that cases run while other groups are still being compiled.
  void work() {
    std::unique_lock lock(mutex_);
    while (done_ < missing_.size() || next_ < groups_.size()) {
      if (!ready_.empty()) {
        const size_t i = ready_.back();
        ready_.pop_back();
        measure(lock, ran_, "running", [&] { return run_(i); });
        ++done_;
      } else if (next_ < groups_.size()) {
        const size_t group = next_++;
        measure(lock, compiled_, "compiling", [&] { return compiled(group); });
        for (const size_t i : waiting_[group])
          if (--missing_[i] == 0) ready_.push_back(i);
      } else {
        changed_.wait(lock);
        continue;
      }
      changed_.notify_all();
    }
  }

  std::optional<std::string> compiled(size_t group) {
    try {
      compile_(groups_[group]);
    } catch (const Error& e) {
      return fmt::format("FAILED text {}: {}", group, e.what());
    }
    return std::nullopt;
  }

  template <class F>
  void measure(std::unique_lock<std::mutex>& lock, Sums& sums, const char* what, F f) {
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    const std::optional<std::string> wrong = f();
    const double seconds = seconds_since(start);
    lock.lock();
    sums.seconds += seconds;
    sums.longest = std::max(sums.longest, seconds);
    progress_.step(what);
    if (!wrong) return;
    ++sums.failed;
    progress_.hide();
    fmt::print("{}\n", *wrong);
    std::fflush(stdout);  // an interrupted run must not lose its results
  }

  const std::vector<std::vector<std::string>>& groups_;
  const Compile compile_;
  const Run run_;
  std::mutex mutex_;  // guards all members below
  std::condition_variable changed_;
  std::vector<std::vector<size_t>> waiting_;  // by group: the cases that need it
  // By case: the number of groups that are not compiled yet.
  std::vector<size_t> missing_;
  std::vector<size_t> ready_;  // cases that can run
  // The next group to compile; the number of cases that have run.
  size_t next_ = 0, done_ = 0;
  Sums compiled_, ran_;
  Progress progress_;
};

int check_cuda(std::vector<Case> chosen, const CheckArgs& args) {
  constexpr const char* kArch = "sm_90a";  // the architecture to compile for if there is no GPU
  const auto no_gpu = cuda::why_no_gpu();
  if (const auto missing = cuda::why_no_nvrtc()) {
    fmt::print(stderr, "tenon check: nothing to compile with: {}\n", *missing);
    fmt::print("0 passed, 0 failed\n");
    return no_device;
  }
  const auto start = std::chrono::steady_clock::now();
  const Texts texts(chosen, args.random > 0 ? static_cast<size_t>(args.random) : chosen.size(),
                    args.random > 0 ? kMostRandomTexts : SIZE_MAX);
  const size_t count = texts.groups().size();
  fmt::print("{} cases, {} kernels in {} texts, listed in {:.1f} s\n", chosen.size(),
             texts.kernels(), count, seconds_since(start));
  std::fflush(stdout);
  Pipeline pipeline(
      texts,
      [&](const std::vector<std::string>& group) {
        if (no_gpu)
          cuda::compile(cuda::joined(group), kArch);
        else
          cuda::load_joined(group);
      },
      [&](size_t i) -> std::optional<std::string> {
        if (no_gpu) return std::nullopt;
        const cuda::CurrentContext context;  // set once, not for each copy of a trial
        return failure(chosen[i], Device::cuda);
      });
  pipeline.go();
  const auto& [bad_texts, compiling, longest] = pipeline.compiled();
  // Texts that cases compiled because they were not in the list.
  const size_t others = cuda::compilations() - count;
  fmt::print(
      "compiled in {:.1f} s, {:.1f} s the longest text, {} not listed; ran in {:.1f} s of {} "
      "threads' time; {:.1f} s in all\n",
      compiling, longest, others, pipeline.ran().seconds, threads(), seconds_since(start));
  if (no_gpu) {
    fmt::print("{} texts compiled for {}, {} not; none was run: {}\n", count - bad_texts, kArch,
               bad_texts, *no_gpu);
    fmt::print("0 passed, {} failed\n", bad_texts);
    return bad_texts == 0 ? no_device : failed;
  }
  size_t wrong = pipeline.ran().failed + bad_texts;
  // The kernel for random numbers is not in the list. Several threads may compile it at the same
  // time.
  if (others > static_cast<size_t>(threads())) {
    fmt::print("FAILED {} texts were compiled that are not in the list\n", others);
    ++wrong;
  }
  fmt::print("{} passed, {} failed\n", chosen.size() - pipeline.ran().failed, wrong);
  return wrong == 0 ? ok : failed;
}

int check(const CheckArgs& args) {
  const bool cuda = args.device == "cuda";
  std::vector<Case> all;
  if (args.random > 0) {
    // A quarter more cases for CUDA: Texts drops cases that would exceed the kernel limit.
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
  const size_t passed = run_all(chosen);
  fmt::print("{} passed, {} failed\n", passed, chosen.size() - passed);
  return passed == chosen.size() ? ok : failed;
}

}  // namespace

extern const Command kCheckCommand{
    "check", "run the conformance cases against float64", []() -> Bound {
      static CheckArgs args;
      constexpr std::pair kMany{0, 1000000};
      return {{{"SUBSTRING", &args.substrings, "only cases that contain all of these"},
               {"--list", &args.list, "print the cases, run nothing"},
               {"--device", &args.device, "", {"cpu", "cuda"}},
               {"--precision", &args.precision, "", {"strict", "native"}},
               {.name = "--every",
                .value = &args.every,
                .about = "only each Nth of the cases",
                .range = {{1, kMany.second}}},
               {.name = "--random",
                .value = &args.random,
                .about = "so many strict cases by chance, in place of the list; on cuda over at "
                         "most 400 kernel texts",
                .range = kMany},
               {"--seed", &args.seed, "of those"}},
              [] { return check(args); }};
    }};

}  // namespace tenon::cli
