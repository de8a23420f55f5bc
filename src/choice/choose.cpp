// Makers in order, and the kernel cache.
#include "choice/choose.h"

#include <optional>

#include "choice/backends.h"
#include "core/fp_mode.h"
#include "core/memo.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr size_t kMaxKernels = 4096;  // a kernel holds a few kilobytes

Memo<Chosen>& kernels() {
  static auto& made = *new Memo<Chosen>(kMaxKernels);  // other threads may outlive static objects
  return made;
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

}  // namespace

Chosen kernel_for(const Step& step, Device device) {
  const FpMode ieee;  // makers fold constants
  const std::string key = str(kDevices[static_cast<size_t>(device)], " ", step.key());
  if (std::optional<Chosen> found = kernels().find(key)) return *std::move(found);
  return kernels().keep(key, make(step, device));
}

}  // namespace tenon
