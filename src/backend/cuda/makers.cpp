// The registry of CUDA makers.
#include "backend/cuda/makers.h"

#include "backend/cuda/cache.h"
#include "backend/cuda/cublaslt.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/here.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/nvrtc.h"
#include "tenon/error.h"

// One line per maker, best first. Of two lines with one name, the first takes fewer calls or steps.
#define TENON_MAKERS                     \
  MAKER("vector map", make_vector)       \
  MAKER("tiled map", make_whole_tiles)   \
  MAKER("tiled map", make_tile)          \
  MAKER("block map", make_whole_blocks)  \
  MAKER("block map", make_block)         \
  MAKER("row map", make_row)             \
  MAKER("flat map", make_map)            \
  MAKER("gemm", make_wide_gemm)          \
  MAKER("gemm", make_gemm)               \
  MAKER("gemm", make_promoted_gemm)      \
  MAKER("cublaslt", make_cublaslt)       \
  MAKER("cublaslt", make_cublaslt_split) \
  MAKER("decode", make_decode)           \
  MAKER("plain", make_plain)

namespace tenon::cuda {

#define MAKER(name, make) Attempt make(const Step& step, const Target& target);
TENON_MAKERS
#undef MAKER

namespace {

constexpr const char* kDraw = R"(extern "C" __global__ void tenon_draw(
    unsigned long long* state, unsigned long long* drawn, unsigned long long count) {
  for (int i = 0; i < 5; ++i) drawn[i] = state[i];
  state[1] += count;
}
)";

void draw(uint64_t* state, uint64_t* drawn, uint64_t count, void* stream) {
  static const Source kSource("draw", kDraw, "tenon_draw");
  const CurrentContext context;
  void* values[] = {&state, &drawn, &count};
  check(driver().launch_kernel(kSource.load(context).function, 1, 1, 1, 1, 1, 1, 0,
                               static_cast<Stream>(stream), values, nullptr),
        "drawing random numbers");
}

void* take(size_t bytes, void* stream) {
  const CurrentContext context;
  return StreamMemory(bytes, static_cast<Stream>(stream)).release();
}
void give(void* memory, void* stream) {
  const CurrentContext context;
  const StreamMemory taken(memory, static_cast<Stream>(stream));
}

// Not zero: products of zeros take less power, so another algorithm may be the fastest.
void fill(void* memory, size_t bytes, void* stream) {
  constexpr unsigned char kByte = 0x37;  // 1e-5 in bf16 and f32, 0.94 in e4m3
  if (captures(static_cast<Stream>(stream)))
    fail(Code::invalid_argument,
         "plan: prepare on a stream that is being captured; call it before the capture");
  const CurrentContext context;
  check(driver().memset_bytes_async(memory, kByte, bytes, static_cast<Stream>(stream)),
        "setting memory");
}

}  // namespace

std::string draw_text() { return kDraw; }

const Backend& backend() {
#define MAKER(name, make) {name, make},
  static constexpr Maker kMakers[] = {TENON_MAKERS};
#undef MAKER
  static constexpr Backend kBackend{"cuda", Device::cuda, kMakers, here, take, give, fill, draw};
  return kBackend;
}

Status status() {
  Status s;
  const auto no_gpu = why_no_gpu();
  const auto no_nvrtc = why_no_nvrtc();
  s.gpu = !no_gpu && !no_nvrtc;
  if (!no_nvrtc) s.nvrtc = str(nvrtc_version(), ", ", nvrtc_path());
  const LoadedLt& lt = cublaslt();
  s.cublaslt = lt.why.empty() ? str(lt.version, ", ", lt.path) : "none, " + lt.why;
  if (!no_gpu) {
    const DeviceInfo d = device_info(0);
    s.device = str(d.name, ", ", d.arch());
    if (10 * d.major + d.minor < kOldestArch) {
      s.gpu = false;
      s.why = str("kernels need sm_", kOldestArch, " or newer");
    }
    s.driver = str(d.driver_version / 1000, ".", d.driver_version % 1000 / 10);
  }
  for (const auto& why : {no_gpu, no_nvrtc})
    if (why) s.why += str(s.why.empty() ? "" : "; ", *why);
  return s;
}

std::vector<std::string> doctor_lines() {
  const Status s = status();
  std::vector<std::string> lines{str("cuda: ", s.gpu ? "usable" : "not usable")};
  if (!s.device.empty()) lines.push_back("  device: " + s.device);
  if (!s.driver.empty()) lines.push_back("  driver: CUDA " + s.driver);
  if (!s.nvrtc.empty()) lines.push_back("  nvrtc: " + s.nvrtc);
  lines.push_back("  cublaslt: " + s.cublaslt);
  if (!s.why.empty()) lines.push_back("  missing: " + s.why);
  const std::string off = Cache::shared().why_off();
  lines.push_back(
      str("  cache: ", off.empty() ? Cache::shared().folder().string() : "off, " + off));
  return lines;
}

}  // namespace tenon::cuda
