// Properties of the driver, the libraries and each device, read once per device.
#include "backend/cuda/here.h"

#include <atomic>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/lt_tune.h"
#include "backend/cuda/nvrtc.h"

namespace tenon::cuda {

namespace {

constexpr const char* kAssumed = "sm_90a";
constexpr int kMostDevices = 64;

// The first two numbers of "13.0.88", as 1300.
int version_of(const std::string& text) {
  const size_t dot = text.find('.');
  if (dot == std::string::npos) return 0;
  return 100 * std::atoi(text.c_str()) + std::atoi(text.c_str() + dot + 1);
}

Target make(int ordinal) {
  const DeviceInfo d = device_info(ordinal);
  Target t;
  t.name = d.arch();
  t.here = true;
  t.device = Device::cuda;
  t.sm = 10 * d.major + d.minor;
  t.sm_features = t.name.ends_with('a');
  t.processors = attribute(Attribute::multiprocessors, ordinal);
  t.cache_bytes = attribute(Attribute::l2_bytes, ordinal);
  t.shared_bytes = attribute(Attribute::shared_bytes, ordinal);
  t.driver = d.driver_version;
  if (!why_no_nvrtc()) t.nvrtc = version_of(nvrtc_version());
  if (cublaslt().why.empty()) t.cublaslt = 100 * version_of(cublaslt().version);
  t.tunes = tunes();
  return t;
}

}  // namespace

const Target& here() {
  if (why_no_gpu()) return named_target(kAssumed);
  static std::atomic<const Target*> known[kMostDevices];
  const CurrentContext context;
  const int device = context.device();
  auto& slot = known[device % kMostDevices];
  if (const Target* t = slot.load(std::memory_order_acquire)) return *t;
  const auto* made = new Target(make(device));
  const Target* none = nullptr;
  if (slot.compare_exchange_strong(none, made, std::memory_order_acq_rel)) return *made;
  delete made;  // another thread was faster
  return *none;
}

}  // namespace tenon::cuda
