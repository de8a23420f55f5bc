// Prints the body of a step after the skeletons, and launches the compiled kernel.
#include "backend/cuda/map.h"

#include <algorithm>
#include <array>

#include "backend/cuda/body.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "tenon/error.h"

namespace tenon::cuda {

// The texts of device/words.cuh and device/map.cuh, embedded by the build.
extern const char kWordsSkeleton[];
extern const char kMapSkeleton[];

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerMultiprocessor = 32;  // a few waves, so that the tail is short

constexpr size_t kMostAccesses = (kArgumentBytes - 2 * sizeof(int64_t)) / sizeof(Access);

// Same layout as TenonMapArguments in device/map.cuh.
struct MapArguments {
  int64_t rows = 0, cols = 0;
  std::array<Access, kMostAccesses> at{};
};
static_assert(sizeof(MapArguments) <= kArgumentBytes);

// Why the flat map refuses a step. Empty if it accepts the step.
std::string refusal(const Step& step) {
  if (!step.is_map()) return str("the flat map has no ", step.head_name(), " head");
  for (const Store& s : step.stores)
    if (s.to != Store::To::tile)
      return str("the flat map writes tiles only; ", kStoreNames[static_cast<size_t>(s.to)],
                 " comes with the tiled map");
  if (step.stores.empty()) return "the flat map has nothing to store";
  for (const Load& l : step.loads)
    if (l.from == Load::From::block || l.from == Load::From::random || l.transposed)
      return str("the flat map does not read ", kLoadNames[static_cast<size_t>(l.from)],
                 l.transposed ? " transposed" : "", "; that comes with the tiled map");
  constexpr std::string_view kPlain = "; the flat map reads and writes f32, f16 and bf16 only";
  for (size_t i = 0; i < step.loads.size(); ++i)
    if (reads_view(step.loads[i]) && !info(step.loads[i].dtype).plain)
      return str("load ", i, " is ", info(step.loads[i].dtype).name, kPlain);
  for (size_t i = 0; i < step.stores.size(); ++i)
    if (!info(step.stores[i].dtype).plain)
      return str("store ", i, " is ", info(step.stores[i].dtype).name, kPlain);
  if (const size_t n = step.loads.size() + step.stores.size(); n > kMostAccesses)
    return str(n, " loads and stores; the flat map takes at most ", kMostAccesses);
  return "";
}

class FlatMap final : public Kernel {
 public:
  explicit FlatMap(const Step& step)
      : loads_(step.loads),
        stores_(step.stores),
        cols_(step.cols),
        source_(step.name, map_source(step), kMapKernel) {}

  void prepare() const override {
    const CurrentContext context;
    source_.load(context);
  }

  [[nodiscard]] std::vector<std::string> texts() const override { return {source_.text()}; }

  void run(const RunArgs& args) const override {
    if (args.rows == 0 || cols_ == 0) return;
    const CurrentContext context;
    const LoadedKernel kernel = source_.load(context);
    MapArguments arguments{.rows = args.rows, .cols = cols_};
    Access* at = arguments.at.data();
    for (const Load& l : loads_) *at++ = load_access(l, args);
    for (const Store& s : stores_) *at++ = access(args.out[s.arg], s.columns);

    // A grid-stride loop, so that the grid stays small for any number of elements.
    const int64_t wanted = (args.rows * cols_ + kThreads - 1) / kThreads;
    const int64_t most = int64_t{kernel.multiprocessors} * kBlocksPerMultiprocessor;
    const auto blocks = static_cast<unsigned>(std::min(wanted, most));
    void* values[] = {&arguments};
    const int result = driver().launch_kernel(kernel.function, blocks, 1, 1, kThreads, 1, 1, 0,
                                              static_cast<Stream>(args.stream), values, nullptr);
    if (result != 0) check(result, str("launching '", source_.name(), "'"));
  }

 private:
  std::vector<Load> loads_;
  std::vector<Store> stores_;
  int64_t cols_;
  Source source_;
};

}  // namespace

std::string map_source(const Step& step) {
  const std::string at = "const TenonAccess* at, TenonI64 row, TenonI64 column";
  return str(kWordsSkeleton, "\n", kMapSkeleton,
             "\nstruct Body {\n  static constexpr int kLoads = ", step.loads.size(),
             ", kStores = ", step.stores.size(), ";\n", "  __device__ static void load(", at,
             ", float* in) {\n", indented(load_lines(step)),
             "  }\n  __device__ static void compute(const float* in, float* out) {\n",
             indented(compute_lines(step)), "  }\n  __device__ static void store(", at,
             ", const float* out) {\n", indented(store_lines(step)), "  }\n};\n\n",
             "extern \"C\" __global__ void ", kMapKernel,
             "(const __grid_constant__ TenonMapArguments<Body::kLoads + Body::kStores> arguments) "
             "{\n  tenon_map<Body>(arguments);\n}\n");
}

Attempt make_map(const Step& step, const Target& /*target*/) {
  if (std::string why = refusal(step); !why.empty()) return Refusal{std::move(why), !step.is_map()};
  return std::make_shared<const FlatMap>(step);
}

}  // namespace tenon::cuda
