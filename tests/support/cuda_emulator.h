// Runs CUDA kernels on the host without a GPU. They are compiled as C++ with a small emulation of
// the CUDA language. The threads of a block are fibers that switch at barriers. Slow.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace tenon::test {

// The emulated parts of the CUDA language, and the scheduler.
inline const char* const kEmulation = R"emulation(
#include <ucontext.h>
#include <cmath>
#include <cstring>
#include <cstdint>
#include <vector>
#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
// Fibers switch by jumps: swapcontext would make a system call for the signal mask each time. A
// fiber that has finished its kernel waits for the next block.
struct Fiber {
  void* jump[5];
  bool started = false, finished = false;
  std::vector<char> stack = std::vector<char>(1 << 16);
};
static void* main_jump[5];
static std::vector<Fiber> fibers;
static unsigned running;
static void (*kernel)(const void*);
static const void* kernel_arguments;
static void pause_fiber() {
  if (__builtin_setjmp(fibers[running].jump) == 0) __builtin_longjmp(main_jump, 1);
}
static void __syncthreads() { pause_fiber(); }
static void fiber() {
  for (;;) {
    kernel(kernel_arguments);
    fibers[running].finished = true;
    pause_fiber();
  }
}
static void start_or_go_on(Fiber& f) {
  if (f.started) __builtin_longjmp(f.jump, 1);
  f.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = f.stack.data();
  context.uc_stack.ss_size = f.stack.size();
  context.uc_link = nullptr;
  makecontext(&context, fiber, 0);
  setcontext(&context);
}
static void resume(unsigned t) {
  running = t;
  if (__builtin_setjmp(main_jump) == 0) start_or_go_on(fibers[t]);
}
extern "C" void emulate(void (*f)(const void*), const void* arguments, unsigned blocks,
                        unsigned down, unsigned threads) {
  kernel = f;
  kernel_arguments = arguments;
  gridDim = {blocks, down, 1};
  blockDim = {threads, 1, 1};
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned b = 0; b < blocks * down; ++b) {
    for (unsigned t = 0; t < threads; ++t) fibers[t].finished = false;
    for (bool left = true; left;) {
      left = false;
      for (unsigned t = 0; t < threads; ++t) {
        if (fibers[t].finished) continue;
        threadIdx = {t, 0, 0};
        blockIdx = {b % blocks, b / blocks, 0};
        resume(t);
        left = left || !fibers[t].finished;
      }
    }
  }
}
static inline unsigned __float_as_uint(float v) { unsigned u; std::memcpy(&u, &v, 4); return u; }
static inline float __uint_as_float(unsigned u) { float v; std::memcpy(&v, &u, 4); return v; }
template <class T>
static inline T __ldg(const T* at) { return *at; }
static inline float __fsqrt_rn(float v) { return __builtin_sqrtf(v); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// All warps of a block change lanes at once. threadIdx is that of the fiber again after a pause.
static unsigned exchange[1024];
template <class T>
static inline T shuffled(T v, unsigned from) {
  const unsigned lane = running;
  std::memcpy(&exchange[lane], &v, 4);
  pause_fiber();
  T other;
  std::memcpy(&other, &exchange[from / 32 == lane / 32 ? from : lane], 4);
  pause_fiber();
  return other;
}
static inline void __syncwarp() { pause_fiber(); }
template <class T>
static inline T __shfl_down_sync(unsigned, T v, unsigned d) { return shuffled(v, running + d); }
template <class T>
static inline T __shfl_xor_sync(unsigned, T v, unsigned d) { return shuffled(v, running ^ d); }
static inline unsigned atomicMax(unsigned* at, unsigned v) {
  const unsigned old = *at;
  if (v > old) *at = v;
  return old;
}
static inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long v) {
  const unsigned long long old = *at;
  *at += v;
  return old;
}
)emulation";

// Kernel texts that are compiled together. All begin with the same skeletons, up to the line
// `struct Body {` or the text before it. Each kernel takes one struct by value.
class Emulator {
 public:
  // `common` is the common beginning of all texts.
  explicit Emulator(std::string common) : common_(std::move(common)) {}
  ~Emulator() {
    if (library_) dlclose(library_);
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Returns the index of the text for run().
  size_t add(const std::string& text) {
    if (text.compare(0, common_.size(), common_) != 0)
      throw std::runtime_error("a text begins with other skeletons");
    const size_t number = count_++;
    std::string own = text.substr(common_.size());
    const std::string kernel = "__global__ void ";
    const std::string argument = "(const __grid_constant__ Arguments a)";
    for (size_t at = own.find(kernel); at != std::string::npos; at = own.find(kernel, at)) {
      own.replace(at, kernel.size(), "void " + prefix_ + std::to_string(number) + "_");
      const size_t by = own.find(argument, at);
      own.replace(by, argument.size(), "(const Arguments& a)");
    }
    own_ += "namespace " + prefix_ + std::to_string(number) + " {\n" + own + "}\n";
    return number;
  }

  void compile() {
    char pattern[] = "/tmp/tenon-emulator-XXXXXX";
    if (!mkdtemp(pattern)) throw std::runtime_error("no temporary folder");
    folder_ = pattern;
    std::ofstream(folder_ / "texts.cpp") << kEmulation << common_ << own_;
    const char* compiler = std::getenv("CXX");
    const std::string command =
        std::string(compiler ? compiler : "c++") +
        " -std=c++17 -O0 -w -shared -fPIC -ffp-contract=off -o " + (folder_ / "texts.so").string() +
        " " + (folder_ / "texts.cpp").string() + " 2>" + (folder_ / "log").string();
    if (std::system(command.c_str()) != 0) {
      std::ifstream log(folder_ / "log");
      std::string text((std::istreambuf_iterator<char>(log)), {});
      throw std::runtime_error("compiling the texts: " + text.substr(0, 4000));
    }
    library_ = dlopen((folder_ / "texts.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) throw std::runtime_error(dlerror());
  }

  void run(size_t number, const std::string& entry, unsigned blocks, unsigned down,
           unsigned threads, const void* arguments) {
    using Kernel = void (*)(const void*);
    using Emulate = void (*)(Kernel, const void*, unsigned, unsigned, unsigned);
    const std::string name = prefix_ + std::to_string(number) + "_" + entry;
    auto* kernel = reinterpret_cast<Kernel>(dlsym(library_, name.c_str()));
    auto* emulate = reinterpret_cast<Emulate>(dlsym(library_, "emulate"));
    if (!kernel || !emulate) throw std::runtime_error("no kernel " + name);
    emulate(kernel, arguments, blocks, down, threads);
  }

 private:
  // A new prefix per library: the loader merges statics of templates that have the same name.
  static std::string next_prefix() {
    static int count = 0;
    return "e" + std::to_string(count++) + "p";
  }
  const std::string prefix_ = next_prefix();
  std::string common_, own_;
  size_t count_ = 0;
  std::filesystem::path folder_;
  void* library_ = nullptr;
};

}  // namespace tenon::test
