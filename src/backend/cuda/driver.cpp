// Opens libcuda once. A driver does not survive fork(), so a child gets an error.
#include "backend/cuda/driver.h"

#include <pthread.h>

#include <array>
#include <atomic>

#include "backend/cuda/library.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr int kNotInitialized = 3;  // result of the driver in a child of a process that used it

std::atomic<bool> started{false};  // this process or its parent called cuInit
std::atomic<bool> forked{false};   // this is a forked child

struct Loaded {
  Driver driver{};
  std::string why;  // empty if the driver works and there is a device
};

std::string text_of(const Driver& d, int result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (d.get_error_name(result, &name) != 0 || name == nullptr) return str("error ", result);
  if (d.get_error_string(result, &text) != 0 || text == nullptr) return name;
  return str(name, " (", text, ")");
}

// The name of the first function that the library lacks. Empty if it has all.
std::string resolve(const Library& library, Driver& d) {
  std::string missing;
  const auto get = [&](auto*& function, const char* name) {
    if (!library.find(function, name) && missing.empty()) missing = name;
  };
  get(d.init, "cuInit");
  get(d.driver_get_version, "cuDriverGetVersion");
  get(d.get_error_name, "cuGetErrorName");
  get(d.get_error_string, "cuGetErrorString");
  get(d.device_get_count, "cuDeviceGetCount");
  get(d.device_get, "cuDeviceGet");
  get(d.device_get_name, "cuDeviceGetName");
  get(d.device_get_attribute, "cuDeviceGetAttribute");
  get(d.primary_context_retain, "cuDevicePrimaryCtxRetain");
  get(d.context_get_current, "cuCtxGetCurrent");
  get(d.context_push_current, "cuCtxPushCurrent_v2");
  get(d.context_pop_current, "cuCtxPopCurrent_v2");
  get(d.context_get_device, "cuCtxGetDevice");
  get(d.context_synchronize, "cuCtxSynchronize");
  get(d.module_load_data, "cuModuleLoadData");
  get(d.module_unload, "cuModuleUnload");
  get(d.module_get_function, "cuModuleGetFunction");
  get(d.launch_kernel, "cuLaunchKernel");
  get(d.mem_alloc, "cuMemAlloc_v2");
  get(d.mem_free, "cuMemFree_v2");
  get(d.mem_alloc_async, "cuMemAllocAsync");
  get(d.mem_free_async, "cuMemFreeAsync");
  get(d.memcpy_to_device, "cuMemcpyHtoD_v2");
  get(d.memcpy_to_host, "cuMemcpyDtoH_v2");
  get(d.memcpy_to_device_async, "cuMemcpyHtoDAsync_v2");
  get(d.memcpy_to_host_async, "cuMemcpyDtoHAsync_v2");
  get(d.host_alloc, "cuMemHostAlloc");
  get(d.host_free, "cuMemFreeHost");
  get(d.memset_bytes, "cuMemsetD8_v2");
  get(d.memset_bytes_async, "cuMemsetD8Async");
  get(d.stream_create, "cuStreamCreate");
  get(d.stream_destroy, "cuStreamDestroy_v2");
  get(d.stream_synchronize, "cuStreamSynchronize");
  get(d.stream_begin_capture, "cuStreamBeginCapture_v2");
  get(d.stream_end_capture, "cuStreamEndCapture");
  get(d.stream_is_capturing, "cuStreamIsCapturing");
  get(d.graph_instantiate, "cuGraphInstantiateWithFlags");
  get(d.graph_launch, "cuGraphLaunch");
  get(d.graph_get_nodes, "cuGraphGetNodes");
  get(d.graph_node_get_type, "cuGraphNodeGetType");
  get(d.graph_kernel_node_get_params, "cuGraphKernelNodeGetParams_v2");
  get(d.graph_exec_destroy, "cuGraphExecDestroy");
  get(d.graph_destroy, "cuGraphDestroy");
  get(d.event_create, "cuEventCreate");
  get(d.event_destroy, "cuEventDestroy_v2");
  get(d.event_record, "cuEventRecord");
  get(d.event_elapsed_time, "cuEventElapsedTime");
  get(d.function_get_attribute, "cuFuncGetAttribute");
  get(d.function_set_attribute, "cuFuncSetAttribute");
  library.find(d.function_get_name, "cuFuncGetName");           // newer drivers only
  library.find(d.context_get_id, "cuCtxGetId");                 // newer drivers only
  library.find(d.tensor_map_encode, "cuTensorMapEncodeTiled");  // newer drivers only
  return missing;
}

Loaded load() {
  Loaded l;
  const Library library = Library::open("libcuda.so.1");
  if (!library) {
    l.why = str("no NVIDIA driver: ", library.why(), "; install one, or use device cpu");
    return l;
  }
  if (const std::string missing = resolve(library, l.driver); !missing.empty()) {
    l.why = str("the NVIDIA driver has no ", missing, "; install a newer one, or use device cpu");
    return l;
  }
  started = true;
  pthread_atfork(nullptr, nullptr, [] { forked = started.load(); });
  if (const int result = l.driver.init(0); result != 0) {
    started = false;
    l.why = str("cuInit: ", text_of(l.driver, result));
    if (result == kNotInitialized)
      l.why += "; if this process was forked from one that used CUDA, start it by spawn instead";
    return l;
  }
  int count = 0;
  if (const int result = l.driver.device_get_count(&count); result != 0)
    l.why = str("cuDeviceGetCount: ", text_of(l.driver, result));
  else if (count == 0)
    l.why = "the NVIDIA driver sees no device; see CUDA_VISIBLE_DEVICES, or use device cpu";
  return l;
}

constexpr std::string_view kForked =
    "this process was forked from one that had used CUDA, which a driver does not survive; start "
    "it by spawn or exec, or use CUDA only after the fork";

const Loaded& loaded() {
  static const auto& kLoaded = *new Loaded(load());
  return kLoaded;
}

Context primary_context() {
  static const Context kContext = [] {
    const Driver& d = driver();
    int device = 0;
    Context context = nullptr;
    check(d.device_get(&device, 0), "finding CUDA device 0");
    check(d.primary_context_retain(&context, device), "opening CUDA device 0");
    return context;
  }();
  return kContext;
}

}  // namespace

std::optional<std::string> why_no_gpu() {
  if (forked) return std::string(kForked);
  const std::string& why = loaded().why;
  return why.empty() ? std::nullopt : std::optional(why);
}

const Driver& driver() {
  // Must be before loaded(): in a child, a thread that does not exist may hold its lock.
  if (forked) fail(Code::runtime, "cuda: ", kForked);
  const Loaded& l = loaded();
  if (!l.why.empty()) fail(Code::runtime, "cuda: ", l.why);
  return l.driver;
}

bool captures(Stream stream) {
  int status = 0;
  // A query fails on the default stream while another stream is captured.
  return driver().stream_is_capturing(stream, &status) != 0 || status != 0;
}

void check(int result, std::string_view what) {
  if (result != 0) fail(Code::runtime, "cuda: ", what, ": ", text_of(driver(), result));
}

int attribute(Attribute which, int ordinal) {
  const Driver& d = driver();
  int device = 0;
  int value = 0;
  check(d.device_get(&device, ordinal), str("finding CUDA device ", ordinal));
  check(d.device_get_attribute(&value, static_cast<int>(which), device),
        str("asking CUDA device ", ordinal, " for attribute ", static_cast<int>(which)));
  return value;
}

int attribute(FunctionAttribute which, Function function) {
  int value = 0;
  check(driver().function_get_attribute(&value, static_cast<int>(which), function),
        str("asking a kernel for attribute ", static_cast<int>(which)));
  return value;
}

std::string DeviceInfo::arch() const {
  // From Hopper on, the kernels need instructions of the architecture-specific sets.
  return str("sm_", major, minor, major >= 9 ? "a" : "");
}

DeviceInfo device_info(int ordinal) {
  const Driver& d = driver();
  DeviceInfo info;
  int device = 0;
  std::array<char, 256> name{};
  check(d.device_get(&device, ordinal), str("finding CUDA device ", ordinal));
  check(d.device_get_name(name.data(), static_cast<int>(name.size()) - 1, device),
        str("naming CUDA device ", ordinal));
  check(d.driver_get_version(&info.driver_version), "asking for the driver's version");
  info.name = name.data();
  info.major = attribute(Attribute::major, ordinal);
  info.minor = attribute(Attribute::minor, ordinal);
  return info;
}

CurrentContext::CurrentContext() {
  const Driver& d = driver();
  Context context = nullptr;
  check(d.context_get_current(&context), "asking for the current context");
  if (context == nullptr) {
    context = primary_context();
    check(d.context_push_current(context), "making device 0's context current");
    pushed_ = true;
  }
  id_ = reinterpret_cast<uintptr_t>(context);
  if (d.context_get_id == nullptr) return;
  const int result = d.context_get_id(context, &id_);
  if (result != 0 && pushed_) d.context_pop_current(&context);
  check(result, "asking for the context's id");
}

CurrentContext::~CurrentContext() {
  Context popped = nullptr;
  if (pushed_) loaded().driver.context_pop_current(&popped);
}

int CurrentContext::device() const {
  int device = 0;  // device handles are ordinals
  check(driver().context_get_device(&device), "asking for the context's device");
  return device;
}

StreamMemory::StreamMemory(size_t bytes, Stream stream) : stream_(stream) {
  if (bytes > 0)
    check(driver().mem_alloc_async(&data_, bytes, stream),
          str("taking ", bytes, " bytes of device memory"));
}

StreamMemory::~StreamMemory() {
  if (data_) loaded().driver.mem_free_async(data_, stream_);
}

OwnStream::OwnStream() {
  constexpr unsigned kNonBlocking = 1;
  const CurrentContext context;
  check(driver().stream_create(&stream_, kNonBlocking), "making a stream");
}

OwnStream::~OwnStream() {
  if (!forked) loaded().driver.stream_destroy(stream_);
}

void OwnStream::wait() const {
  const CurrentContext context;
  check(driver().stream_synchronize(stream_), "waiting for a stream");
}

PinnedBuffer::PinnedBuffer(size_t bytes) {
  const CurrentContext context;
  if (bytes > 0)
    check(driver().host_alloc(&pointer_, bytes, 0), str("pinning ", bytes, " bytes of the host"));
}

PinnedBuffer::~PinnedBuffer() {
  if (pointer_ == nullptr || forked) return;
  try {
    const CurrentContext context;
    driver().host_free(pointer_);
  } catch (const Error&) {  // a broken context has already lost the memory
  }
}

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  const CurrentContext context;
  if (bytes_ > 0)
    check(driver().mem_alloc(&pointer_, bytes_), str("allocating ", bytes_, " bytes"));
}

DeviceBuffer::~DeviceBuffer() {
  if (pointer_ == nullptr || forked) return;
  try {
    const CurrentContext context;
    driver().mem_free(pointer_);
  } catch (const Error&) {  // a broken context has already lost the memory
  }
}

void DeviceBuffer::from_host(const void* from) {
  const CurrentContext context;
  if (bytes_ > 0)
    check(driver().memcpy_to_device(pointer_, from, bytes_), str("copying ", bytes_, " bytes in"));
}

void DeviceBuffer::to_host(void* to) const {
  const CurrentContext context;
  check(driver().context_synchronize(), "waiting for the device");
  if (bytes_ > 0)
    check(driver().memcpy_to_host(to, pointer_, bytes_), str("copying ", bytes_, " bytes out"));
}

void DeviceBuffer::from_host(const PinnedBuffer& from, const OwnStream& stream) {
  const CurrentContext context;
  if (bytes_ > 0)
    check(driver().memcpy_to_device_async(pointer_, from.data(), bytes_, stream.get()),
          str("copying ", bytes_, " bytes in"));
}

void DeviceBuffer::to_host(const PinnedBuffer& to, const OwnStream& stream) const {
  const CurrentContext context;
  if (bytes_ > 0)
    check(driver().memcpy_to_host_async(to.data(), pointer_, bytes_, stream.get()),
          str("copying ", bytes_, " bytes out"));
}

}  // namespace tenon::cuda
