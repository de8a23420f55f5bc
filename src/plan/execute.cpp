// The kernel cache and the run of one step.
#include "plan/execute.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "backend/list.h"
#include "core/fp_mode.h"
#include "core/memo.h"
#include "core/scratch.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr size_t kMaxKernels = 4096;  // a kernel holds a few kilobytes

Memo<Chosen>& kernels() {
  static auto& made = *new Memo<Chosen>(kMaxKernels);  // other threads may outlive static objects
  return made;
}

// A pointer, since calls may come when the thread's objects have been destroyed.
thread_local constinit const Observer* observer = nullptr;

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

Memo<std::shared_ptr<const Prepared>>& prepared_steps() {
  static auto& steps = *new Memo<std::shared_ptr<const Prepared>>(kMaxKernels);
  return steps;
}

void run(const Step& step, const Chosen& chosen, RunArgs args, const Options& options) {
  const FpMode ieee;
  const bool on_cpu = options.device == Device::cpu;
  const Scratch scratch(on_cpu ? chosen.kernel->workspace(args.rows) : 0);
  if (on_cpu) {
    args.workspace = scratch.data();
  } else if (!args.workspace && options.allocate) {
    const size_t bytes = chosen.kernel->workspace(args.rows);
    if (bytes) args.workspace = options.allocate(options.user, bytes);
    if (bytes && !args.workspace)
      fail(Code::runtime, step.name, ": the caller's allocate gave no memory for ", bytes,
           " bytes of workspace; free some, or give fewer rows");
  }
  args.stream = options.stream;
  const bool log = logging();
  if (!observer && !log) return chosen.kernel->run(args);
  double microseconds = 0;
  const auto go = [&] {
    const auto start = std::chrono::steady_clock::now();
    chosen.kernel->run(args);
    const auto time = std::chrono::steady_clock::now() - start;
    microseconds = std::chrono::duration<double, std::micro>(time).count();
  };
  if (observer)
    (*observer)(step, args, options, go);
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
  const FpMode ieee;  // makers fold constants
  const std::string key = str(kDevices[static_cast<size_t>(device)], " ", step.key());
  if (std::optional<Chosen> found = kernels().find(key)) return *std::move(found);
  return kernels().keep(key, make(step, device));
}

void set_observer(Observer o) {
  delete observer;
  observer = o ? new Observer(std::move(o)) : nullptr;
}

void execute(const Step& step, RunArgs args, const Options& options) {
  run(step, kernel_for(step, options.device), args, options);
}

std::shared_ptr<const Prepared> prepared(Key key, const std::shared_ptr<const void>& identity,
                                         Device device, const std::function<Step()>& make) {
  key.add(reinterpret_cast<uintptr_t>(identity.get())).add(device);
  if (auto found = prepared_steps().find(key.text())) return *std::move(found);
  Step step = make();
  Chosen chosen = kernel_for(step, device);
  return prepared_steps().keep(key.text(), std::make_shared<const Prepared>(Prepared{
                                               std::move(step), std::move(chosen), identity}));
}

void execute(const Step& step, const Chosen& chosen, RunArgs args, const Options& options) {
  run(step, chosen, args, options);
}

void execute(const Prepared& p, RunArgs args, const Options& options) {
  run(p.step, p.chosen, args, options);
}

}  // namespace tenon
