// The CUDA driver: libcuda opened on first use, contexts, device memory, errors as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tenon::cuda {

// The driver's handles; what they point to is its own affair.
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;
using DevicePointer = void*;  // an integer to the driver, of the same size

// The functions in use. A result of 0 is success.
struct Driver {
  int (*init)(unsigned flags);
  int (*driver_get_version)(int* version);
  int (*get_error_name)(int result, const char** text);
  int (*get_error_string)(int result, const char** text);
  int (*device_get_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_get_name)(char* text, int size, int device);
  int (*device_get_attribute)(int* value, int attribute, int device);
  int (*primary_context_retain)(Context* context, int device);
  int (*context_get_current)(Context* context);
  int (*context_push_current)(Context context);
  int (*context_pop_current)(Context* context);
  int (*context_get_device)(int* device);
  int (*context_synchronize)();
  int (*context_get_id)(Context context, uint64_t* id);  // null before CUDA 12
  int (*module_load_data)(Module* module, const void* image);
  int (*module_unload)(Module module);
  int (*module_get_function)(Function* function, Module module, const char* name);
  int (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       Stream stream, void** arguments, void** extra);
  int (*mem_alloc)(DevicePointer* pointer, size_t bytes);
  int (*mem_free)(DevicePointer pointer);
  int (*mem_alloc_async)(DevicePointer* pointer, size_t bytes, Stream stream);
  int (*mem_free_async)(DevicePointer pointer, Stream stream);
  int (*memcpy_to_device)(DevicePointer to, const void* from, size_t bytes);
  int (*memcpy_to_host)(void* to, DevicePointer from, size_t bytes);
  int (*stream_synchronize)(Stream stream);
};

// The loaded and initialised driver of a machine with a device; an Error says why there is none.
const Driver& driver();

// Why no CUDA device is usable here, or nothing if one is.
std::optional<std::string> why_no_gpu();

// Throws an Error unless `result` is 0; `what` is what was tried.
void check(int result, std::string_view what);

enum class Attribute : uint8_t { multiprocessors = 16, major = 75, minor = 76 };
int attribute(Attribute which, int ordinal);

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;
  int driver_version = 0;  // 13000 is CUDA 13.0

  // The architecture to compile for: sm_80, sm_90a.
  [[nodiscard]] std::string arch() const;
};
DeviceInfo device_info(int ordinal);

// The caller's current context, or else device 0's primary one, made current for a scope.
class CurrentContext {
 public:
  CurrentContext();
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  // Differs between contexts, even if one is made where another one was destroyed.
  [[nodiscard]] uint64_t id() const;
  [[nodiscard]] int device() const;

 private:
  Context context_ = nullptr;
  bool pushed_ = false;
};

// Device memory for checks and tests; running kernels allocates nothing.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] void* data() const { return pointer_; }
  [[nodiscard]] size_t size() const { return bytes_; }
  void from_host(const void* from);  // size() bytes
  void to_host(void* to) const;      // waits for all work of the context first

 private:
  size_t bytes_;
  DevicePointer pointer_ = nullptr;
};

}  // namespace tenon::cuda
