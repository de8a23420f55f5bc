// Shared libraries opened at run time, so that building and starting need no part of CUDA.
#pragma once

#include <functional>
#include <string>

namespace tenon::cuda {

// Stays open for the life of the process: drivers cannot be unloaded safely.
class Library {
 public:
  // `visible`: libraries opened later find its symbols.
  static Library open(const std::string& file, bool visible = false);

  // Opens a library of NVIDIA by its plain name, such as "libnvrtc.so". Searches the path of the
  // loader, the toolkit, and the wheels of torch or jax. Takes the first one that `refusal`
  // accepts. If the environment variable is set, only that file is tried. why() lists every reason.
  static Library open_nvidia(const std::string& name, const char* variable,
                             const std::function<std::string(const Library&)>& refusal);

  explicit operator bool() const { return handle_ != nullptr; }
  [[nodiscard]] const std::string& why() const { return why_; }  // message of the loader

  // Whether the library has the function; `function` is null if not.
  template <class Function>
  bool find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

  // The file of a function of the library, as the loader found it.
  [[nodiscard]] std::string path_of(const char* name) const;

 private:
  [[nodiscard]] void* symbol(const char* name) const;

  void* handle_ = nullptr;
  std::string why_;
};

}  // namespace tenon::cuda
