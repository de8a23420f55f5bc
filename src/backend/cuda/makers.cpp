// The CUDA makers, best first.
#include "backend/cuda/makers.h"

#include "backend/cuda/driver.h"
#include "backend/cuda/map.h"
#include "backend/cuda/nvrtc.h"
#include "tenon/error.h"

namespace tenon::cuda {

const Backend& backend() {
  static constexpr Maker kMakers[] = {{"flat map", make_map}};
  static constexpr Backend kBackend{"cuda", Device::cuda, kMakers};
  return kBackend;
}

Status status() {
  Status s;
  const auto no_gpu = why_no_gpu();
  const auto no_nvrtc = why_no_nvrtc();
  s.gpu = !no_gpu && !no_nvrtc;
  if (!no_nvrtc) s.nvrtc = str(nvrtc_version(), ", ", nvrtc_path());
  if (!no_gpu) {
    const DeviceInfo d = device_info(0);
    s.device = str(d.name, ", ", d.arch());
    s.driver = str(d.driver_version / 1000, ".", d.driver_version % 1000 / 10);
  }
  for (const auto& why : {no_gpu, no_nvrtc})
    if (why) s.why += str(s.why.empty() ? "" : "; ", *why);
  return s;
}

std::vector<std::string> doctor_lines() {
  const Status s = status();
  std::vector<std::string> lines{str("cuda: ", s.gpu ? "usable" : "not usable")};
  if (!s.device.empty()) lines.push_back("  device: " + s.device);
  if (!s.driver.empty()) lines.push_back("  driver: CUDA " + s.driver);
  if (!s.nvrtc.empty()) lines.push_back("  nvrtc: " + s.nvrtc);
  if (!s.why.empty()) lines.push_back("  missing: " + s.why);
  return lines;
}

}  // namespace tenon::cuda
