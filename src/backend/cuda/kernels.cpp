// Loads compiled kernels. Look-ups hold the lock of the map, compilations do not.
#include "backend/cuda/kernels.h"

#include <map>
#include <mutex>
#include <string_view>

#include "backend/cuda/cache.h"
#include "backend/cuda/nvrtc.h"
#include "backend/cuda/skeletons.h"
#include "core/lock.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

using Key = std::pair<uint64_t, std::string>;  // context, text

// The code of a text. Joined texts share a module; the names of their kernels have a prefix.
struct Code {
  Module module = nullptr;
  std::string prefix;
};

// Never destroyed: threads may still launch while the process exits.
std::map<Key, Code>& modules() {
  static auto* const kModules = new std::map<Key, Code>;
  return *kModules;
}

std::string prefix_of(size_t part) { return str("part", part, "_"); }

Code module_of(const std::string& name, const std::string& text, const CurrentContext& context,
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
  const auto [at, inserted] = modules().try_emplace(key, Code{module, ""});
  const Code result = at->second;
  lock.unlock();
  if (!inserted) driver().module_unload(module);  // another thread was faster
  return result;
}

}  // namespace

Compiled compile_once(const std::string& text, const std::string& arch, const std::string& name) {
  const CacheKey key{compiler_identity(), arch, text};
  if (std::optional<CachedImage> found = Cache::shared().find(key))
    return {std::move(found->image), found->is_ptx, ""};
  try {
    Compiled code = compile(text, arch);
    Cache::shared().keep(key, {code.image, code.is_ptx}, name);
    return code;
  } catch (const Error& e) {
    fail(e.code(), "the kernel of '", name, "': ", e.what());
  }
}

std::string skeletons_of(const std::string& text) { return text.substr(0, skeleton_bytes(text)); }

std::vector<size_t> groups_of(std::span<const std::string* const> texts, size_t most) {
  std::vector<size_t> numbers, sizes;
  std::map<std::string, size_t> open;  // groups with room, by skeletons
  for (const std::string* text : texts) {
    const auto [at, fresh] = open.try_emplace(skeletons_of(*text), sizes.size());
    if (fresh || sizes[at->second] == most) {
      at->second = sizes.size();
      sizes.push_back(0);
    }
    ++sizes[at->second];
    numbers.push_back(at->second);
  }
  return numbers;
}

std::string joined(std::span<const std::string> texts) {
  constexpr std::string_view kKernel = "__global__ void ";
  if (texts.empty()) return "";
  std::string all = skeletons_of(texts[0]);
  for (size_t i = 0; i < texts.size(); ++i) {
    std::string own = texts[i].substr(skeleton_bytes(texts[i]));
    for (size_t at = own.find(kKernel); at != std::string::npos; at = own.find(kKernel, at))
      own.insert(at += kKernel.size(), prefix_of(i));
    all += str("namespace part", i, " {\n", own, "}\n");
  }
  return all;
}

void load_joined(std::span<const std::string> texts) {
  const CurrentContext context;
  const uint64_t id = context.id();
  const Compiled code = compile(joined(texts), device_info(context.device()).arch());
  Module module = nullptr;
  check(driver().module_load_data(&module, code.image.c_str()), "loading joined kernels");
  const std::lock_guard lock(library_lock());
  for (size_t i = 0; i < texts.size(); ++i)
    modules().try_emplace(Key{id, texts[i]}, Code{module, prefix_of(i)});
}

LoadedKernel Source::load(const CurrentContext& context, unsigned shared_bytes) const {
  const uint64_t id = context.id();
  const Seen* last = seen_.load(std::memory_order_acquire);
  for (const Seen* s = last; s != nullptr; s = s->before)
    if (s->context == id && (shared_bytes <= s->loaded.shared_bytes || s->loaded.asked))
      return s->loaded;
  auto* const made = new Seen{id, compiled(context, id, shared_bytes), last};
  while (!seen_.compare_exchange_weak(made->before, made, std::memory_order_release)) {
  }
  return made->loaded;
}

Source::~Source() {
  for (const Seen* s = seen_; s != nullptr;) delete std::exchange(s, s->before);
}

LoadedKernel Source::compiled(const CurrentContext& context, uint64_t id,
                              unsigned shared_bytes) const {
  LoadedKernel loaded;
  loaded.multiprocessors =
      static_cast<unsigned>(attribute(Attribute::multiprocessors, context.device()));
  const Code code = module_of(name_, text_, context, id);
  check(driver().module_get_function(&loaded.function, code.module, (code.prefix + entry_).c_str()),
        str("finding ", entry_, " in the kernel of '", name_, "'"));
  const int own = attribute(FunctionAttribute::shared_bytes, loaded.function);
  loaded.shared_bytes -= static_cast<unsigned>(own);
  if (shared_bytes <= loaded.shared_bytes) return loaded;
  const int most = attribute(Attribute::shared_bytes, context.device()) - own;
  check(driver().function_set_attribute(
            loaded.function, static_cast<int>(FunctionAttribute::dynamic_shared_bytes), most),
        "asking for shared memory");
  loaded.shared_bytes = static_cast<unsigned>(most);
  loaded.asked = true;
  return loaded;
}

}  // namespace tenon::cuda
