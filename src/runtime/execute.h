// Runs one step: workspace, observer, one log line.
#pragma once

#include <functional>
#include <string>

#include "choice/choose.h"
#include "step/key.h"

namespace tenon {

// Stands around every step of the calling thread and calls `run` once, or never where a call is
// only to make its kernels; an empty one is none. `tenon check` looks at inputs and outputs this
// way, whatever entry point was called.
using Observer = std::function<void(const Step&, const RunArgs&, const Options&,
                                    const std::function<void()>& run)>;
void set_observer(Observer observer);

// Finds or makes the kernel, lends it a workspace and runs it. TENON_LOG=1 prints a line a step.
void execute(const Step& step, RunArgs args, const Options& options);

// The same with a kernel that is known.
void execute(const Step& step, const Chosen& chosen, RunArgs args, const Options& options);

// A step with its kernel, kept for the next call that asks for the same.
struct Prepared {
  Step step;
  Chosen chosen;
  std::shared_ptr<const void> identity;  // of the function in it, whose address is part of the key
};

// What `make` returns depends on nothing but the key, the identity and the device.
std::shared_ptr<const Prepared> prepared(Key key, const std::shared_ptr<const void>& identity,
                                         Device device, const std::function<Step()>& make);
void execute(const Prepared& p, RunArgs args, const Options& options);

}  // namespace tenon
