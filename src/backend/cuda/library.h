// Shared libraries opened at run time, so that nothing of CUDA is needed to build or to start.
#pragma once

#include <functional>
#include <string>

namespace tenon::cuda {

// Stays open for the life of the process: drivers do not survive being unloaded.
class Library {
 public:
  // With `visible`, libraries that are opened later find its symbols.
  static Library open(const std::string& file, bool visible = false);

  // One of NVIDIA's libraries by its plain name, "libnvrtc.so": on the loader's path, in the
  // toolkit, or in the wheels beside torch or jax; the first one for which `refusal` says nothing.
  // A file named by the environment variable is the only one tried. why() has every reason.
  static Library open_nvidia(const std::string& name, const char* variable,
                             const std::function<std::string(const Library&)>& refusal);

  explicit operator bool() const { return handle_ != nullptr; }
  [[nodiscard]] const std::string& why() const { return why_; }  // what the loader said

  // Whether the library has the function; `function` is null if not.
  template <class Function>
  bool find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

  // The file that a function of the library came from, as the loader found it.
  [[nodiscard]] std::string path_of(const char* name) const;

 private:
  [[nodiscard]] void* symbol(const char* name) const;

  void* handle_ = nullptr;
  std::string why_;
};

}  // namespace tenon::cuda
