// Tests a unary function and its derivative on all 2^32 fp32 values. It takes minutes per function.
#include <chrono>
#include <cstdio>

#include "modes.h"
#include "parallel.h"

namespace tenon::accuracy {

namespace {

bool one(const std::string& name) {
  const Function f = for_all_patterns(name);
  const auto start = std::chrono::steady_clock::now();
  Report report(f.roots());
  parallel(1U << 16, [&](size_t i) {
    report.merge(measure_f32(f, patterns(static_cast<uint32_t>(i) << 16, kChunk)));
    if (i % 4096 == 0) std::fprintf(stderr, "%s %zu/65536\n", name.c_str(), i);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  bool passed = true;
  for (size_t r = 0; r < f.roots(); ++r) {
    const RootReport& root = report.roots()[r];
    std::printf(
        "%s: 4294967296 inputs, worst %.3f ulp at %s (E %.3f ulp), worst error/E %.4f at %s",
        f.root_name(r).c_str(), root.ulp.value, number(root.ulp.a).c_str(), root.ulp.bound,
        root.ratio[kStrict].value, number(root.ratio[kStrict].a).c_str());
    std::printf("; native %.4f at %s", root.native_f32.value, number(root.native_f32.a).c_str());
    for (const Check c : {Check::strict, Check::native_f32, Check::limits}) {
      const auto k = static_cast<size_t>(c);
      if (root.failures[k] == 0) continue;
      passed = false;
      std::printf("; FAILED %.*s %zu times, %s", static_cast<int>(kChecks[k].size()),
                  kChecks[k].data(), root.failures[k], root.first[k].c_str());
    }
    std::printf("; %.0f s\n", seconds.count());
  }
  std::fflush(stdout);
  return passed;
}

}  // namespace

int run_exhaustive(const std::vector<std::string>& names) {
  size_t failed = 0;
  for (const std::string& name : names) failed += one(name) ? 0 : 1;
  std::printf("%zu passed, %zu failed\n", names.size() - failed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace tenon::accuracy
