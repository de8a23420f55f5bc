// Wraps dlopen with errors as text, and finds the libraries of NVIDIA.
#include "backend/cuda/library.h"

#include <dlfcn.h>
#include <glob.h>

#include <cstdlib>
#include <string_view>
#include <vector>

#include "tenon/error.h"

namespace tenon::cuda {

namespace {

// The folder of the file that holds this code.
std::string path_of_this() {
  Dl_info found{};
  if (dladdr(reinterpret_cast<const void*>(&path_of_this), &found) == 0 || !found.dli_fname)
    return "";
  const std::string_view file = found.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string_view::npos ? "" : std::string(file.substr(0, slash));
}

// Best first.
std::vector<std::string> candidates(const std::string& name, const char* variable) {
  if (const char* file = std::getenv(variable); file != nullptr && *file != '\0') return {file};
  std::vector<std::string> files{name + ".13", name + ".12", name};
  const auto add = [&](const std::string& pattern) {
    glob_t found{};
    if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
      files.insert(files.end(), found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
  };
  add(str("/usr/local/cuda*/lib64/", name, "*"));
  // NVIDIA's wheels are in the same site-packages: nvidia/cu13/lib, nvidia/cublas/lib.
  if (const std::string own = path_of_this(); !own.empty())
    for (const char* up : {"/..", "/../.."}) add(str(own, up, "/nvidia/*/lib/", name, ".*"));
  return files;
}

}  // namespace

Library Library::open(const std::string& file, bool visible) {
  Library library;
  library.handle_ = dlopen(file.c_str(), RTLD_NOW | (visible ? RTLD_GLOBAL : RTLD_LOCAL));
  if (library.handle_ == nullptr) {
    const char* const text = dlerror();
    library.why_ = text != nullptr ? text : file + ": the loader gave no reason";
  }
  return library;
}

Library Library::open_nvidia(const std::string& name, const char* variable,
                             const std::function<std::string(const Library&)>& refusal) {
  std::string tried;
  for (const std::string& file : candidates(name, variable)) {
    Library library = open(file);
    const std::string why = library ? refusal(library) : library.why();
    if (why.empty()) return library;
    tried += str(tried.empty() ? "" : "; ", library ? str(file, " ", why) : why);
  }
  Library none;
  none.why_ = tried;
  return none;
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
