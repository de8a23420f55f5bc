// Runs one step: the first maker that does not refuse, a kernel cache, one log line.
#pragma once

#include <functional>
#include <string>

#include "step/backend.h"

namespace tenon {

struct Chosen {
  std::shared_ptr<const Kernel> kernel;
  std::string_view maker;
};

// The kernel of a step on a device; throws with every maker's reason if all refuse.
Chosen kernel_for(const Step& step, Device device);

// Stands around every step of the calling thread and must call `run` once; an empty one is none.
// `tenon check` looks at inputs and outputs this way, whatever entry point was called.
using Observer = std::function<void(const Step&, const RunArgs&, const Options&,
                                    const std::function<void()>& run)>;
void set_observer(Observer observer);

// Finds or makes the kernel, lends it a workspace and runs it. TENON_LOG=1 prints a line a step.
void execute(const Step& step, RunArgs args, const Options& options);

}  // namespace tenon
