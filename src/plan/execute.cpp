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

// Read once: looking through a large environment takes as long as the rest of a call.
bool logging() {
  static const bool kLogs = [] {
    const char* text = std::getenv("TENON_LOG");
    return text && *text && *text != '0';
  }();
  return kLogs;
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

// Finds keys that are no strings.
struct Hash : std::hash<std::string_view> {
  using is_transparent = void;
};
using PreparedSteps =
    std::unordered_map<std::string, std::shared_ptr<const Prepared>, Hash, std::equal_to<>>;

PreparedSteps& prepared_steps() {
  static auto& steps = *new PreparedSteps;
  return steps;
}

void* workspace(size_t bytes) {
  constexpr auto kAlignment = static_cast<size_t>(kWorkspaceAlignment);
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + kAlignment) memory.resize(bytes + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (kAlignment - address % kAlignment) % kAlignment;
}

void run(const Step& step, const Chosen& chosen, RunArgs args, const Options& options) {
  if (options.device == Device::cpu) {
    const size_t bytes = chosen.kernel->workspace(args.rows);
    args.workspace = bytes ? workspace(bytes) : nullptr;
  } else if (!args.workspace && options.allocate) {
    const size_t bytes = chosen.kernel->workspace(args.rows);
    if (bytes) args.workspace = options.allocate(options.user, bytes);
    if (bytes && !args.workspace)
      fail(Code::runtime, step.name, ": the caller's allocate gave no memory for ", bytes,
           " bytes of workspace; free some, or give fewer rows");
  }
  args.stream = options.stream;
  const bool log = logging();
  if (!observer() && !log) return chosen.kernel->run(args);
  double microseconds = 0;
  const auto go = [&] {
    const auto start = std::chrono::steady_clock::now();
    chosen.kernel->run(args);
    const auto time = std::chrono::steady_clock::now() - start;
    microseconds = std::chrono::duration<double, std::micro>(time).count();
  };
  if (observer())
    observer()(step, args, options, go);
  else
    go();
  if (!log) return;
  std::fprintf(stderr, "tenon: %s rows=%lld maker=%.*s bytes=%lld time_us=%.1f\n",
               step.describe().c_str(), static_cast<long long>(args.rows),
               static_cast<int>(chosen.maker.size()), chosen.maker.data(),
               static_cast<long long>(step.bytes(args.rows)), microseconds);
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
  run(step, kernel_for(step, options.device), args, options);
}

std::shared_ptr<const Prepared> prepared(Key key, const std::shared_ptr<const void>& identity,
                                         Device device, const std::function<Step()>& make) {
  key.add(reinterpret_cast<uintptr_t>(identity.get())).add(device);
  {
    const std::lock_guard guard(library_lock());
    const auto it = prepared_steps().find(key.text());
    if (it != prepared_steps().end()) return it->second;
  }
  Step step = make();
  Chosen chosen = kernel_for(step, device);
  auto made =
      std::make_shared<const Prepared>(Prepared{std::move(step), std::move(chosen), identity});
  const std::lock_guard guard(library_lock());
  if (prepared_steps().size() >= kMaxKernels) prepared_steps().clear();
  return prepared_steps().try_emplace(std::string(key.text()), std::move(made)).first->second;
}

void execute(const Step& step, const Chosen& chosen, RunArgs args, const Options& options) {
  run(step, chosen, args, options);
}

void execute(const Prepared& p, RunArgs args, const Options& options) {
  run(p.step, p.chosen, args, options);
}

}  // namespace tenon
