// Measures the host time of a launch, and the time to compile and load a new kernel.
#include <unistd.h>

#include <filesystem>

#include "backend/cuda/cache.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "bench/bench.h"
#include "bench/timing.h"
#include "runtime/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::bench {

namespace {

// NVRTC caches texts, so each text is made unique.
std::string made_unique(const std::string& text) {
  static int count = 0;
  const auto now = Clock::now().time_since_epoch().count();
  return str(text, "\n__device__ int tenon_bench_", getpid(), "_", now, "_", ++count, ";\n");
}

std::string text_of(const BenchCase& c) {
  BenchMemory nowhere;
  const BenchCall call =
      bench_calls(c, {1024, 1024}, DType::bf16, {.device = Device::cuda}, nowhere).front();
  return call.kernel->texts().front();
}

double compile_milliseconds(const std::string& text, const std::string& arch) {
  constexpr int kTimes = 5;
  std::vector<double> times;
  for (int i = 0; i < kTimes; ++i) {
    const std::string other = made_unique(text);
    times.push_back(1e3 * seconds([&] { cuda::compile(other, arch); }));
  }
  return median(times);
}

const BenchCase kFlat{"gelu", false, {.dtype = DType::bf16}};
const BenchCase kTiled{"gelu", false, {.dtype = DType::e4m3, .scaling = Scaling::delayed}, true};
const BenchCase kTiledSums{
    "swiglu", true, {.dtype = DType::e4m3, .scaling = Scaling::block1x128}, true, true};

// A temporary folder, removed by the destructor.
class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / str("tenon-bench-", getpid())) {
    std::filesystem::create_directory(path_);
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Time to find a kernel on disk, load it and look up its function.
double disk_milliseconds(const std::string& text, const std::string& entry,
                         const std::string& arch) {
  constexpr int kTimes = 21;
  const Folder folder;
  cuda::Cache cache(folder.path(), uint64_t{1} << 30);
  const cuda::CacheKey key{cuda::compiler_identity(), arch, text};
  const cuda::Compiled code = cuda::compile(text, arch);
  cache.keep(key, {code.image, code.is_ptx}, "bench");
  std::vector<double> times;
  for (int i = 0; i < kTimes; ++i) {
    cuda::Module module = nullptr;
    cuda::Function function = nullptr;
    times.push_back(
        1e3 * seconds([&] {
          const auto found = cache.find(key);
          if (!found) fail(Code::runtime, "bench: the disk cache kept nothing: ", cache.why_off());
          cuda::check(cuda::driver().module_load_data(&module, found->image.c_str()), "loading");
          cuda::check(cuda::driver().module_get_function(&function, module, entry.c_str()),
                      "looking up");
        }));
    cuda::driver().module_unload(module);
  }
  return median(times);
}

// Microseconds per call of each function. Batches alternate, so that temporary slowdowns affect all
// functions. A batch is small enough that the driver's queue never blocks the host.
std::vector<double> host_microseconds(const std::vector<std::function<void()>>& calls) {
  constexpr int kCalls = 200, kBatches = 51;
  std::vector<std::vector<double>> times(calls.size());
  for (int b = 0; b < kBatches; ++b)
    for (size_t k = 0; k < calls.size(); ++k) {
      cuda::check(cuda::driver().context_synchronize(), "waiting for kernels");
      times[k].push_back(1e6 / kCalls * seconds([&] {
                           for (int i = 0; i < kCalls; ++i) calls[k]();
                         }));
    }
  cuda::check(cuda::driver().context_synchronize(), "waiting for kernels");
  std::vector<double> medians;
  for (const std::vector<double>& t : times) medians.push_back(median(t));
  return medians;
}

constexpr const char* kEmpty =
    "struct Arguments { char bytes[512]; };\n"
    "extern \"C\" __global__ void empty(const __grid_constant__ Arguments a) {}\n";

}  // namespace

std::vector<BenchNumber> bench_compile_costs(const std::string& arch) {
  const std::string flat = text_of(kFlat);
  const std::string tiled = text_of(kTiled);
  const std::string first = made_unique(flat);
  std::vector<BenchNumber> list;
  list.push_back({"compile: first in the process, gelu to bf16",
                  1e3 * seconds([&] { cuda::compile(first, arch); }), "ms"});
  for (const BenchCase& c : {kFlat, kTiled, kTiledSums})
    list.push_back({"compile: " + c.name(), compile_milliseconds(text_of(c), arch), "ms"});
  const std::string entry = "tenon_bench_entry";
  const std::string named = str("\nextern \"C\" __global__ void ", entry, "() {}\n");
  list.push_back(
      {"from disk: " + kFlat.name(), disk_milliseconds(flat + named, entry, arch), "ms"});
  list.push_back(
      {"from disk: " + kTiled.name(), disk_milliseconds(tiled + named, entry, arch), "ms"});
  return list;
}

std::vector<BenchNumber> bench_launch_costs() {
  constexpr Shape kSmall{64, 1024};
  const cuda::CurrentContext context;
  cuda::DeviceBuffer x(2 * kSmall.rows * kSmall.cols), y(x.size());
  const std::vector<char> zeros(x.size());
  x.from_host(zeros.data());
  const cuda::Source source("empty", kEmpty, "empty");
  const cuda::Function empty = source.load(context).function;
  std::vector<char> bytes(512);
  void* values[] = {bytes.data()};
  const auto bare = [&] {
    cuda::check(
        cuda::driver().launch_kernel(empty, 1, 1, 1, 256, 1, 1, 0, nullptr, values, nullptr),
        "launching an empty kernel");
  };
  BenchMemory memory({.in = static_cast<char*>(x.data()), .out = static_cast<char*>(y.data())});
  const Options options{.device = Device::cuda};
  const BenchCall call = bench_calls(kFlat, kSmall, DType::bf16, options, memory).front();
  const Activation gelu = activation("gelu");
  const Forward forward_call{.x = matrix(x.data(), DType::bf16, kSmall.rows, kSmall.cols),
                             .y = View(matrix(y.data(), DType::bf16, kSmall.rows, kSmall.cols))};
  const std::vector<double> us = host_microseconds(
      {bare, [&] { call.run(nullptr, nullptr); }, [&] { forward(gelu, forward_call, options); }});
  return {{"host: bare cuLaunchKernel of an empty kernel", us[0], "us"},
          {"host: a prepared step (gelu 64x1024)", us[1], "us"},
          {"host: the public call forward()", us[2], "us"}};
}

}  // namespace tenon::bench
