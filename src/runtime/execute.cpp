// Runs one step.
#include "runtime/execute.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "choice/backends.h"
#include "core/fp_mode.h"
#include "core/memo.h"
#include "core/scratch.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr size_t kMaxSteps = 4096;  // a step holds a few kilobytes

// A raw pointer: calls may come after the thread's objects were destroyed.
thread_local constinit const Observer* observer = nullptr;

// Read once: a lookup in a large environment takes as long as the rest of a call.
bool logging() {
  static const bool kLogs = [] {
    const char* text = std::getenv("TENON_LOG");
    return text && *text && *text != '0';
  }();
  return kLogs;
}

Memo<std::shared_ptr<const Prepared>>& prepared_steps() {
  static auto& steps = *new Memo<std::shared_ptr<const Prepared>>(kMaxSteps);
  return steps;
}

void run(const Step& step, const Chosen& chosen, RunArgs args, const Options& options) {
  const FpMode ieee;
  const bool on_cpu = options.device == Device::cpu;
  const Kernel& kernel = chosen.kernel->direct();
  const Scratch scratch(on_cpu ? kernel.workspace(args.rows) : 0);
  if (on_cpu) {
    args.workspace = scratch.data();
  } else if (!args.workspace && options.allocate) {
    const size_t bytes = kernel.workspace(args.rows);
    if (bytes) args.workspace = options.allocate(options.user, bytes);
    if (bytes && !args.workspace)
      fail(Code::runtime, step.name, ": the caller's allocate gave no memory for ", bytes,
           " bytes of workspace; free some, or give fewer rows");
  }
  args.stream = options.stream;
  if (!on_cpu) args.options = &options;
  const bool log = logging();
  if (!observer && !log) return kernel.run(args);
  double microseconds = 0;
  const auto go = [&] {
    const auto start = std::chrono::steady_clock::now();
    kernel.run(args);
    const auto time = std::chrono::steady_clock::now() - start;
    microseconds = std::chrono::duration<double, std::micro>(time).count();
  };
  if (observer)
    (*observer)(step, args, options, go);
  else
    go();
  if (!log) return;
  const std::string_view maker = chosen.kernel->way(args).maker;
  int64_t bytes = 0;
  chosen.kernel->each(args, [&](const Step& part, const Kernel& k, const RunArgs& call) {
    bytes += part.bytes(call.rows) + k.extra_bytes(call.rows);
  });
  std::fprintf(stderr, "tenon: %s rows=%lld maker=%.*s bytes=%lld time_us=%.1f\n",
               step.describe().c_str(), static_cast<long long>(args.rows),
               static_cast<int>(maker.size()), maker.data(), static_cast<long long>(bytes),
               microseconds);
}

}  // namespace

void set_observer(Observer o) {
  delete observer;
  observer = o ? new Observer(std::move(o)) : nullptr;
}

void execute(const Step& step, RunArgs args, const Options& options) {
  run(step, kernel_for(step, options.device), args, options);
}

std::shared_ptr<const Prepared> prepared(Key key, const std::shared_ptr<const void>& identity,
                                         Device device, const std::function<Step()>& make) {
  const Target& target = backend_for(device).here();
  key.add(reinterpret_cast<uintptr_t>(identity.get())).add(reinterpret_cast<uintptr_t>(&target));
  if (auto found = prepared_steps().find(key.text())) return *std::move(found);
  Step step = make();
  Chosen chosen = kernel_for(step, target);
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
