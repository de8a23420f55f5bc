// The kernel cache and the run of one step.
#include "plan/execute.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "backend/list.h"
#include "core/lock.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr size_t kMaxKernels = 4096;  // a kernel holds a few kilobytes

using Cache = std::unordered_map<std::string, Chosen>;

Cache& cache() {
  static auto& kernels = *new Cache;  // other threads may outlive static objects
  return kernels;
}

Observer& observer() {
  thread_local Observer current;
  return current;
}

bool logging() {
  const char* text = std::getenv("TENON_LOG");
  return text && *text && *text != '0';
}

Chosen make(const Step& step, Device device) {
  const Backend& backend = backend_for(device);
  std::string reasons;
  for (const Maker& maker : backend.makers) {
    Attempt attempt = maker.make(step);
    if (auto* kernel = std::get_if<std::shared_ptr<const Kernel>>(&attempt))
      return {std::move(*kernel), maker.name};
    reasons += str(reasons.empty() ? "" : "; ", maker.name, ": ", std::get<Refusal>(attempt).why);
  }
  fail(Code::unsupported, step.name, " on ", backend.name, ": ", reasons,
       ". Run it on the cpu device");
}

void* workspace(size_t bytes) {
  constexpr size_t kAlignment = 64;
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + kAlignment) memory.resize(bytes + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (kAlignment - address % kAlignment) % kAlignment;
}

}  // namespace

Chosen kernel_for(const Step& step, Device device) {
  const std::string key = str(kDevices[static_cast<size_t>(device)], " ", step.key());
  {
    const std::lock_guard guard(library_lock());
    if (const auto it = cache().find(key); it != cache().end()) return it->second;
  }
  Chosen chosen = make(step, device);  // not under the lock: it may take a compiler's time
  const std::lock_guard guard(library_lock());
  if (cache().size() >= kMaxKernels) cache().clear();
  return cache().try_emplace(key, std::move(chosen)).first->second;
}

void set_observer(Observer o) { observer() = std::move(o); }

void execute(const Step& step, RunArgs args, const Options& options) {
  const Chosen chosen = kernel_for(step, options.device);
  const size_t bytes = chosen.kernel->workspace(args.rows);
  args.workspace = bytes ? workspace(bytes) : nullptr;
  args.stream = options.stream;
  double microseconds = 0;
  const auto run = [&] {
    const auto start = std::chrono::steady_clock::now();
    chosen.kernel->run(args);
    const auto time = std::chrono::steady_clock::now() - start;
    microseconds = std::chrono::duration<double, std::micro>(time).count();
  };
  if (observer())
    observer()(step, args, options, run);
  else
    run();
  if (!logging()) return;
  std::fprintf(stderr, "tenon: %s rows=%lld maker=%.*s bytes=%lld time_us=%.1f\n",
               step.describe().c_str(), static_cast<long long>(args.rows),
               static_cast<int>(chosen.maker.size()), chosen.maker.data(),
               static_cast<long long>(step.bytes(args.rows)), microseconds);
}

}  // namespace tenon
