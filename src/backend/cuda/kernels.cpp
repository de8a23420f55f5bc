// Look-ups hold the library's lock, compilations do not.
#include "backend/cuda/kernels.h"

#include <map>
#include <mutex>

#include "backend/cuda/nvrtc.h"
#include "core/lock.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

using Key = std::pair<uint64_t, std::string>;  // context, text

// Never destroyed: threads may still launch while the process ends.
std::map<Key, LoadedKernel>& table() {
  static auto* const kTable = new std::map<Key, LoadedKernel>;
  return *kTable;
}

}  // namespace

LoadedKernel Source::load(const CurrentContext& context) const {
  const uint64_t id = context.id();
  {
    const std::lock_guard lock(library_lock());
    for (const auto& [seen, loaded] : seen_)
      if (seen == id) return loaded;
  }
  const LoadedKernel loaded = compiled(context, id);
  const std::lock_guard lock(library_lock());
  seen_.emplace_back(id, loaded);
  return loaded;
}

LoadedKernel Source::compiled(const CurrentContext& context, uint64_t id) const {
  const Key key{id, text_};
  {
    const std::lock_guard lock(library_lock());
    if (const auto found = table().find(key); found != table().end()) return found->second;
  }
  const Driver& d = driver();
  const int device = context.device();
  const DeviceInfo device_is = device_info(device);
  const Compiled code = compile(text_, device_is.arch());
  Module module = nullptr;
  check(d.module_load_data(&module, code.image.c_str()),
        str("loading the kernel of '", name_, "', compiled by NVRTC ", nvrtc_version(), " for ",
            device_is.arch(), ", into driver ", device_is.driver_version,
            " (an NVRTC newer than the driver can be the cause)"));
  LoadedKernel loaded;
  loaded.multiprocessors = static_cast<unsigned>(attribute(Attribute::multiprocessors, device));
  check(d.module_get_function(&loaded.function, module, entry_.c_str()),
        str("finding ", entry_, " in the kernel of '", name_, "'"));

  std::unique_lock lock(library_lock());
  const auto [at, inserted] = table().emplace(key, loaded);
  const LoadedKernel result = at->second;
  lock.unlock();
  if (!inserted) d.module_unload(module);  // another thread was faster
  return result;
}

}  // namespace tenon::cuda
