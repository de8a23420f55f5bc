// Look-ups hold the library's lock, compilations do not.
#include "backend/cuda/kernels.h"

#include <map>
#include <mutex>

#include "backend/cuda/cache.h"
#include "backend/cuda/nvrtc.h"
#include "core/lock.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

using Key = std::pair<uint64_t, std::string>;  // context, text

// Never destroyed: threads may still launch while the process ends.
std::map<Key, Module>& modules() {
  static auto* const kModules = new std::map<Key, Module>;
  return *kModules;
}

Module module_of(const std::string& name, const std::string& text, const CurrentContext& context,
                 uint64_t id) {
  const Key key{id, text};
  {
    const std::lock_guard lock(library_lock());
    if (const auto found = modules().find(key); found != modules().end()) return found->second;
  }
  const DeviceInfo device = device_info(context.device());
  const Compiled code = compile_once(text, device.arch(), name);
  Module module = nullptr;
  check(driver().module_load_data(&module, code.image.c_str()),
        str("loading the kernel of '", name, "', compiled by NVRTC ", nvrtc_version(), " for ",
            device.arch(), ", into driver ", device.driver_version,
            " (an NVRTC newer than the driver can be the cause)"));
  std::unique_lock lock(library_lock());
  const auto [at, inserted] = modules().emplace(key, module);
  const Module result = at->second;
  lock.unlock();
  if (!inserted) driver().module_unload(module);  // another thread was faster
  return result;
}

}  // namespace

Compiled compile_once(const std::string& text, const std::string& arch, const std::string& name) {
  const CacheKey key{compiler_identity(), arch, text};
  if (std::optional<CachedImage> found = Cache::shared().find(key))
    return {std::move(found->image), found->is_ptx, ""};
  Compiled code = compile(text, arch);
  Cache::shared().keep(key, {code.image, code.is_ptx}, name);
  return code;
}

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
  LoadedKernel loaded;
  loaded.multiprocessors =
      static_cast<unsigned>(attribute(Attribute::multiprocessors, context.device()));
  check(driver().module_get_function(&loaded.function, module_of(name_, text_, context, id),
                                     entry_.c_str()),
        str("finding ", entry_, " in the kernel of '", name_, "'"));
  return loaded;
}

}  // namespace tenon::cuda
