// The loader's functions with their errors as text.
#include "backend/cuda/library.h"

#include <dlfcn.h>

namespace tenon::cuda {

Library Library::open(const std::string& file, bool visible) {
  Library library;
  library.handle_ = dlopen(file.c_str(), RTLD_NOW | (visible ? RTLD_GLOBAL : RTLD_LOCAL));
  if (library.handle_ == nullptr) {
    const char* const text = dlerror();
    library.why_ = text != nullptr ? text : file + ": the loader gave no reason";
  }
  return library;
}

void* Library::symbol(const char* name) const {
  return handle_ != nullptr ? dlsym(handle_, name) : nullptr;
}

std::string Library::path_of(const char* name) const {
  Dl_info found{};
  void* const address = symbol(name);
  if (address == nullptr || dladdr(address, &found) == 0 || found.dli_fname == nullptr) return "";
  return found.dli_fname;
}

}  // namespace tenon::cuda
