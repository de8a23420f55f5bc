// `tenon check`: runs the cases through the public calls and looks at every step from outside.
#include <fmt/core.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "backend/cuda/driver.h"
#include "backend/cuda/nvrtc.h"
#include "cli/cases.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/trial.h"
#include "step/verify.h"

namespace tenon::cli {

namespace {

// What needs more than the flat map. On CUDA every such case would be a text of its own to compile;
// tests compare those kernels in an emulator.
bool beyond_flat_map(const Case& c) {
  const bool backward = c[Column::direction] == "bwd";
  const std::string& op = c[Column::op];
  return c[Column::input][0] == 'e' || c[Column::mode] != "none" ||
         c[Column::orientation] != "row" || op == "quantize" ||
         op.starts_with("bias_dropout_add") || c[Column::bias].find("dbias") != std::string::npos ||
         (backward && op.starts_with("scaled(")) || op == "l2normalization";
}

bool selected(const Case& c, const CheckArgs& args) {
  const std::string text = c.text();
  if (!args.precision.empty() && c[Column::precision] != args.precision) return false;
  return std::ranges::all_of(
      args.substrings, [&](const std::string& s) { return text.find(s) != std::string::npos; });
}

// Runs every chosen case on all cores, prints what failed, and returns how many passed.
template <class Run>
size_t run_all(const std::vector<Case>& chosen, Run run) {
  std::atomic<size_t> next = 0;
  std::atomic<size_t> passed = 0;
  std::mutex printing;
  Progress progress(chosen.size());
  const auto work = [&] {
    for (size_t i = next++; i < chosen.size(); i = next++) {
      const std::optional<std::string> wrong = run(chosen[i]);
      const std::lock_guard guard(printing);
      progress.step(chosen[i].text());
      if (wrong)
        fmt::print("FAILED {}: {}\n", chosen[i].text(), *wrong);
      else
        ++passed;
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads(); ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  return passed;
}

// Without a GPU the texts are still compiled, for the architecture that is tested on.
int compile_only(const std::vector<Case>& chosen, const std::string& why) {
  constexpr const char* kArch = "sm_90a";
  if (const auto missing = cuda::why_no_nvrtc()) {
    fmt::print(stderr, "tenon check: nothing to run on: {}; nothing to compile with: {}\n", why,
               *missing);
    fmt::print("0 passed, 0 failed\n");
    return no_device;
  }
  const size_t compiled =
      run_all(chosen, [&](const Case& c) { return Trial(c, Device::cpu).compile_for(kArch); });
  fmt::print("{} compiled for {}, {} not; none was run: {}\n", compiled, kArch,
             chosen.size() - compiled, why);
  fmt::print("0 passed, {} failed\n", chosen.size() - compiled);
  return compiled == chosen.size() ? no_device : failed;
}

}  // namespace

int check(const CheckArgs& args) {
  const Device device = args.device == "cuda" ? Device::cuda : Device::cpu;
  std::vector<Case> chosen;
  size_t left_out = 0;
  for (Case& c : cases()) {
    if (!selected(c, args)) continue;
    if (device == Device::cuda && beyond_flat_map(c))
      ++left_out;
    else
      chosen.push_back(std::move(c));
  }
  if (chosen.empty()) {
    fmt::print(stderr, "tenon check: no case contains all of the given substrings; see --list\n");
    return usage;
  }
  if (args.list) {
    for (const Case& c : chosen) fmt::print("{}\n", c.text());
    return ok;
  }
  if (left_out > 0)
    fmt::print(
        stderr,
        "{} cases with sums, scales, transposes or dropout are left out: on cuda this command "
        "runs what the flat map does\n",
        left_out);
  if (device == Device::cuda)
    if (const auto why = cuda::why_no_gpu()) return compile_only(chosen, *why);
  const size_t passed =
      run_all(chosen, [&](const Case& c) { return Trial(c, device).run(verify); });
  fmt::print("{} passed, {} failed\n", passed, chosen.size() - passed);
  return passed == chosen.size() ? ok : failed;
}

}  // namespace tenon::cli
