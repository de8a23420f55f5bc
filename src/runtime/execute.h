// Runs one step: workspace, observer, one log line.
#pragma once

#include <functional>
#include <string>

#include "choice/choose.h"
#include "step/key.h"

namespace tenon {

// Called for every step of the calling thread, instead of the run. It calls `run` once. If a call
// only makes its kernels, it does not call `run`. An empty function disables the observer. `tenon
// check` uses it to inspect inputs and outputs, for every entry point.
using Observer = std::function<void(const Step&, const RunArgs&, const Options&,
                                    const std::function<void()>& run)>;
void set_observer(Observer observer);

// Finds or makes the kernel, gives it a workspace and runs it. TENON_LOG=1 prints one line per
// step.
void execute(const Step& step, RunArgs args, const Options& options);

// The same with a known kernel.
void execute(const Step& step, const Chosen& chosen, RunArgs args, const Options& options);

// A step with its kernel, cached for later calls with the same key.
struct Prepared {
  Step step;
  Chosen chosen;
  // Keeps the step's function alive: its address is part of the key.
  std::shared_ptr<const void> identity;
};

// The result of `make` must depend only on the key, the identity and the device.
std::shared_ptr<const Prepared> prepared(Key key, const std::shared_ptr<const void>& identity,
                                         Device device, const std::function<Step()>& make);
void execute(const Prepared& p, RunArgs args, const Options& options);

}  // namespace tenon
