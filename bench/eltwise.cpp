// Loads the module with oneDNN.
#include "bench/eltwise.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "tenon/tenon.hpp"

namespace tenon::bench {

const EltwiseLibrary* onednn() {
#ifdef TENON_ONEDNN_MODULE
  static const auto* const library = []() -> const EltwiseLibrary* {
    setenv("OMP_NUM_THREADS", std::to_string(threads()).c_str(), 1);
    setenv("OMP_WAIT_POLICY", "passive", 0);  // its idle threads leave the cores to ours
    void* const module = dlopen(TENON_ONEDNN_MODULE, RTLD_NOW | RTLD_LOCAL);
    return module ? static_cast<const EltwiseLibrary*>(dlsym(module, "tenon_onednn")) : nullptr;
  }();
  return library;
#else
  return nullptr;
#endif
}

}  // namespace tenon::bench
