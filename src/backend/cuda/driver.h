// The CUDA driver: libcuda opened on first use, contexts, device memory, errors as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace tenon::cuda {

// Opaque handles of the driver.
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using StreamGraph = struct StreamGraphHandle*;
using GraphNode = struct GraphNodeHandle*;
using GraphExec = struct GraphExecHandle*;
using DevicePointer = void*;  // an integer of the same size in the driver API

// A kernel node of a graph. Same layout as in the driver API.
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

// The functions that Tenon calls. A result of 0 is success.
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
  int (*memset_bytes_async)(DevicePointer to, unsigned char value, size_t bytes, Stream stream);
  int (*stream_create)(Stream* stream, unsigned flags);
  int (*stream_destroy)(Stream stream);
  int (*stream_synchronize)(Stream stream);
  int (*stream_begin_capture)(Stream stream, int mode);
  int (*stream_end_capture)(Stream stream, StreamGraph* graph);
  int (*stream_is_capturing)(Stream stream, int* status);
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

// The loaded and initialised driver. Throws an Error with the reason if there is no driver or
// device.
const Driver& driver();

// Why no CUDA device is usable. Empty if one is.
std::optional<std::string> why_no_gpu();

// Whether the stream is being captured in a graph.
bool captures(Stream stream);

// Throws an Error unless `result` is 0. `what` names the failed call.
void check(int result, std::string_view what);

enum class Attribute : uint8_t {
  multiprocessors = 16,
  l2_bytes = 38,
  major = 75,
  minor = 76,
  shared_bytes = 97,  // largest dynamic shared memory of a block
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

// Makes a context current for a scope: the current one of the caller, else the primary one of
// device 0.
class CurrentContext {
 public:
  CurrentContext();
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  // Differs between contexts. From CUDA 12 on, a new context never has the id of a destroyed one.
  [[nodiscard]] uint64_t id() const { return id_; }
  [[nodiscard]] int device() const;

 private:
  uint64_t id_ = 0;
  bool pushed_ = false;
};

// Workspace in stream order. Work may still use it when it is freed. Works in captured graphs too.
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

// A non-default stream.
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

// Page-locked host memory for asynchronous copies in checks.
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

// Device memory for checks and tests. Running kernels never allocates.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] void* data() const { return pointer_; }
  [[nodiscard]] size_t size() const { return bytes_; }
  void from_host(const void* from);  // size() bytes
  void to_host(void* to) const;      // first waits for all work of the context
  // Copies in stream order, from and to page-locked memory.
  void from_host(const PinnedBuffer& from, const OwnStream& stream);
  void to_host(const PinnedBuffer& to, const OwnStream& stream) const;

 private:
  size_t bytes_;
  DevicePointer pointer_ = nullptr;
};

}  // namespace tenon::cuda
