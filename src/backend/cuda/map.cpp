// Prints the body of a step after the skeletons.
#include "backend/cuda/map.h"

#include <algorithm>

#include "backend/cuda/body.h"
#include "backend/cuda/eight.h"
#include "backend/cuda/skeletons.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerMultiprocessor = 32;  // a few waves, so that the tail is short
constexpr size_t kMostAccesses =
    (kArgumentBytes - sizeof(TenonMapHead) - sizeof(TenonPlace)) / sizeof(TenonAccess);

}  // namespace

std::string MapProgram::refusal(const Step& step) {
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

MapProgram::MapProgram(const Step& step) : step_(step) {
  entries_ = {"tenon_map_kernel"};
  const std::string at = "const TenonAccess* at, TenonI64 row, TenonI64 column";
  text_ = str(map_skeletons(), "struct Body {\n  static constexpr int kLoads = ", step.loads.size(),
              ", kStores = ", step.stores.size(), ";\n", "  __device__ static void load(", at,
              ", float* in) {\n", indented(load_lines(step)),
              "  }\n  __device__ static void compute(const float* in, float* out) {\n",
              indented(compute_lines(step)), "  }\n  __device__ static void store(", at,
              ", const float* out) {\n", indented(store_lines(step)), "  }\n};\n",
              arguments_text("TenonMapHead", step.loads.size() + step.stores.size(), 0),
              "extern \"C\" __global__ void ", entries_[0],
              "(const __grid_constant__ Arguments a) {\n  tenon_map<Body>(a);\n}\n");
}

// A grid-stride loop, so that the grid stays small for any number of elements.
std::vector<Launch> MapProgram::launches(const RunArgs& args) const {
  Accesses at;
  for (const Load& l : step_.loads) at.push_back(load_access(l, args));
  for (const Store& s : step_.stores) at.push_back(access(args.out[s.arg], s.columns));
  const TenonMapHead head{args.rows, step_.cols};
  const int64_t wanted = std::min<int64_t>(cdiv(args.rows * step_.cols, kThreads), INT32_MAX);
  Launch l = launch_of(0, wanted, kThreads, head, at, {});
  l.per_multiprocessor = kBlocksPerMultiprocessor;
  return {std::move(l)};
}

Attempt make_map(const Step& step, const Target& /*target*/) {
  if (std::string why = MapProgram::refusal(step); !why.empty())
    return Refusal{std::move(why), !step.is_map()};
  return kernel_of(step.name, std::make_unique<MapProgram>(step));
}

}  // namespace tenon::cuda
