// The CUDA driver: libcuda opened on first use, contexts, device memory, errors as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace tenon::cuda {

// The driver's handles; what they point to is its own affair.
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using StreamGraph = struct StreamGraphHandle*;
using GraphNode = struct GraphNodeHandle*;
using GraphExec = struct GraphExecHandle*;
using DevicePointer = void*;  // an integer to the driver, of the same size

// A kernel in a graph, as the driver lays it out.
struct KernelNode {
  Function function = nullptr;
  unsigned grid_x = 0, grid_y = 0, grid_z = 0;
  unsigned block_x = 0, block_y = 0, block_z = 0;
  unsigned shared_bytes = 0;
  void** arguments = nullptr;
  void** extra = nullptr;
  void* kernel = nullptr;
  Context context = nullptr;
};

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
  int (*memcpy_to_device_async)(DevicePointer to, const void* from, size_t bytes, Stream stream);
  int (*memcpy_to_host_async)(void* to, DevicePointer from, size_t bytes, Stream stream);
  int (*host_alloc)(void** pointer, size_t bytes, unsigned flags);
  int (*host_free)(void* pointer);
  int (*memset_bytes)(DevicePointer to, unsigned char value, size_t bytes);
  int (*stream_create)(Stream* stream, unsigned flags);
  int (*stream_destroy)(Stream stream);
  int (*stream_synchronize)(Stream stream);
  int (*stream_begin_capture)(Stream stream, int mode);
  int (*stream_end_capture)(Stream stream, StreamGraph* graph);
  int (*graph_instantiate)(GraphExec* made, StreamGraph graph, unsigned long long flags);
  int (*graph_launch)(GraphExec graph, Stream stream);
  int (*graph_get_nodes)(StreamGraph graph, GraphNode* nodes, size_t* count);
  int (*graph_node_get_type)(GraphNode node, int* type);
  int (*graph_kernel_node_get_params)(GraphNode node, KernelNode* params);
  int (*graph_exec_destroy)(GraphExec graph);
  int (*graph_destroy)(StreamGraph graph);
  int (*event_create)(Event* event, unsigned flags);
  int (*event_destroy)(Event event);
  int (*event_record)(Event event, Stream stream);
  int (*event_elapsed_time)(float* milliseconds, Event start, Event end);
  int (*function_get_attribute)(int* value, int attribute, Function function);
  int (*function_set_attribute)(Function function, int attribute, int value);
  int (*function_get_name)(const char** name, Function function);  // null before CUDA 12.3
  // null before CUDA 12
  int (*tensor_map_encode)(void* map, int type, unsigned rank, DevicePointer data,
                           const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
                           const unsigned* element_strides, int interleave, int swizzle,
                           int promotion, int fill);
};

// The loaded and initialised driver of a machine with a device; an Error says why there is none.
const Driver& driver();

// Why no CUDA device is usable here, or nothing if one is.
std::optional<std::string> why_no_gpu();

// Throws an Error unless `result` is 0; `what` is what was tried.
void check(int result, std::string_view what);

enum class Attribute : uint8_t {
  multiprocessors = 16,
  l2_bytes = 38,
  major = 75,
  minor = 76,
  shared_bytes = 97,  // the most that a block may ask for
};
int attribute(Attribute which, int ordinal);

enum class FunctionAttribute : uint8_t {
  shared_bytes = 1,
  local_bytes = 3,
  registers = 4,
  dynamic_shared_bytes = 8,
};
int attribute(FunctionAttribute which, Function function);

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

  // Differs between contexts; from CUDA 12 on even if one is made where another was destroyed.
  [[nodiscard]] uint64_t id() const { return id_; }
  [[nodiscard]] int device() const;

 private:
  uint64_t id_ = 0;
  bool pushed_ = false;
};

// Workspace in the order of a stream: work on it may still run when it is given back, and a graph
// that is captured has it too.
class StreamMemory {
 public:
  StreamMemory(size_t bytes, Stream stream);
  // Memory that was released before.
  StreamMemory(void* taken, Stream stream) : stream_(stream), data_(taken) {}
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  [[nodiscard]] void* data() const { return data_; }
  // It is not given back.
  [[nodiscard]] void* release() { return std::exchange(data_, nullptr); }

 private:
  Stream stream_;
  DevicePointer data_ = nullptr;
};

// A stream beside the default one.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] Stream get() const { return stream_; }
  void wait() const;

 private:
  Stream stream_ = nullptr;
};

// Host memory that the device copies from and to by itself, for checks.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  [[nodiscard]] void* data() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
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
  // In the order of a stream, from and to pinned memory.
  void from_host(const PinnedBuffer& from, const OwnStream& stream);
  void to_host(const PinnedBuffer& to, const OwnStream& stream) const;

 private:
  size_t bytes_;
  DevicePointer pointer_ = nullptr;
};

}  // namespace tenon::cuda
