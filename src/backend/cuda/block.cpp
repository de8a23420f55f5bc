// Prints the body for tiles whose results share scales.
#include "backend/cuda/block.h"

#include <algorithm>

#include "backend/cuda/eight.h"
#include "backend/cuda/plain.h"
#include "tenon/error.h"

namespace tenon::cuda {

extern const char kBlockSkeleton[];  // embedded by the build

namespace {

constexpr int64_t kTile = 128;
constexpr unsigned kThreads = 512;
constexpr unsigned kOtherThreads = 256;
constexpr int kColumnData = Encoder::column_data;
constexpr size_t kMostSums = 2;  // 8 KB of shared memory each, beside 26 KB
constexpr const char* kEntry = "tenon_block_kernel";
constexpr const char* kClear = "tenon_block_clear";

std::string sum_entry(size_t i) { return str("tenon_block_sum_", i); }
std::string end_entry(Orientation o) {
  return o == Orientation::rowwise ? "tenon_block_end_row" : "tenon_block_end_column";
}

std::string encoder_text(const Step& step) {
  const Encoder& e = step.encoders[0];
  const Blocks row = e.format.blocks(Orientation::rowwise);
  const Blocks column = e.format.blocks(Orientation::columnwise);
  return str(scaling_text(step, 0),
             "struct Encoder0 : Scaling0 {\n  static constexpr int kRowRows = ", row.rows,
             ", kRowCols = ", row.cols, ", kColumnRows = ", column.rows,
             ", kColumnCols = ", column.cols,
             ";\n  static constexpr bool kRowTurned = ", flag(row.transposed),
             ", kColumnTurned = ", flag(column.transposed),
             ", kTransposes = ", flag(info(e.format.scaling).transposes), ";\n};\n");
}

}  // namespace

std::string BlockProgram::refusal(const Step& step) {
  if (step.head() != Head::map)
    return str("the block map has no ", kHeads[static_cast<size_t>(step.head())], " head");
  for (const Load& l : step.loads)
    if (l.from == Load::From::block || l.transposed)
      return str("the block map does not read ",
                 l.transposed ? "transposed tensors" : "scales of blocks");
  for (const Store& s : step.stores) {
    if (s.to == Store::To::row_sum || s.to == Store::To::sum || s.to == Store::To::column)
      return str("the block map has no ", kStoreNames[static_cast<size_t>(s.to)]);
    if (s.ordered) return "the block map adds rows as a tree only";
    if (s.to == Store::To::encoded && !s.columns.contiguous())
      return "the block map writes no interleaved halves";
  }
  if (step.encoders.size() != 1) return "the block map writes one tensor with scales of blocks";
  const Encoder& e = step.encoders[0];
  if (e.format.blocks(Orientation::rowwise).single()) return "the block map has no single scales";
  if (e.counts) return "the block map counts nothing";
  if (stores_to(step, Store::To::column_sum).size() > kMostSums)
    return "too many sums for one tile";
  const size_t bytes = sizeof(PlainHead) +
                       (step.loads.size() + step.stores.size()) * sizeof(Access) +
                       kEncoderPlaces * sizeof(Place);
  if (bytes > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

BlockProgram::BlockProgram(const Step& step) : step_(step) {
  entries_ = {kEntry};
  const Encoder& e = step.encoders[0];
  const std::vector<size_t> parts = stores_to(step, Store::To::encoded);
  std::string part, first, turned;
  for (size_t p = 0; p < parts.size(); ++p) {
    const std::string to = str("a.at[kLoads + ", parts[p], "]");
    part += str("if (p == ", p, ") return out[", parts[p], "];\n");
    first += str("if (p == ", p, ") return ", to, ".offset;\n");
    turned += str("if (p == ", p, ") return a.place[", kColumnData, "].data + (", to,
                  ".offset + column) * a.place[", kColumnData, "].stride;\n");
  }
  const std::vector<size_t> sums = stores_to(step, Store::To::column_sum);
  text_ = str(
      tile_skeletons(), kBlockSkeleton, "\n", encoder_text(step),
      "using Arguments = TenonPlainArguments<", step.loads.size() + step.stores.size(), ", ",
      kEncoderPlaces,
      ">;\nstruct Body {\n  using Encoder = Encoder0;\n  static constexpr int kParts = ",
      parts.size(), ";\n  static constexpr bool kRowwise = ", flag(e.rowwise),
      ", kColumnwise = ", flag(e.columnwise), ";\n", tile_members(step, tile_body(step), ""),
      "  __device__ static float part(int p, const float* out) {\n", indented(part),
      "    return 0.0f;\n  }\n  __device__ static TenonI64 first(const Arguments& a, int p) {\n",
      indented(first),
      "    return 0;\n  }\n  __device__ static TenonU8* turned(const Arguments& a, int p, TenonI64 "
      "column) {\n",
      indented(turned), "    return nullptr;\n  }\n};\nextern \"C\" __launch_bounds__(", kThreads,
      ", 2) __global__ void ", kEntry,
      "(const __grid_constant__ Arguments a) {\n  tenon_block_map<Body>(a);\n}\n");
  const auto kernel = [&](const std::string& entry, const std::string& lines) {
    entries_.push_back(entry);
    text_ += str("extern \"C\" __global__ void ", entry,
                 "(const __grid_constant__ Arguments a) {\n", indented(lines), "}\n");
  };
  for (size_t i = 0; i < sums.size(); ++i)
    kernel(sum_entry(i), str("tenon_column_sums<Body, ", sums[i], ", ",
                             format(step.stores[sums[i]].dtype), ">(a);\n"));
  for (const Orientation o : kOrientations) {
    const Blocks b = e.format.blocks(o);
    if (e.has(o))
      kernel(end_entry(o), str("tenon_encode_end<Encoder0, ", flag(o == Orientation::rowwise), ", ",
                               b.rows, ", ", b.cols, ", ", flag(b.transposed), ">(a);\n"));
  }
  if (const std::string clear = clear_lines(step); !clear.empty()) kernel(kClear, clear);
}

bool BlockProgram::fits(const RunArgs& args) const {
  const Encoder& e = step_.encoders[0];
  const std::vector<size_t> parts = stores_to(step_, Store::To::encoded);
  // A block of the tensor belongs to one part.
  int64_t width = 1;
  for (const Orientation o : kOrientations)
    if (e.has(o)) width = std::max(width, e.format.blocks(o).cols);
  for (const size_t k : parts) {
    if (step_.stores[k].columns.offset % width != 0) return false;
    if (parts.size() > 1 && step_.cols % width != 0) return false;
  }
  if (args.rows == 0 || step_.cols == 0 || !aligned_eights(step_, args)) return false;
  if (!e.columnwise) return true;
  const View& v = args.out[e.data(Orientation::columnwise)];
  const uintptr_t bytes = info(e.format.scaling).transposes ? 16 : 8;
  return reinterpret_cast<uintptr_t>(v.data) % bytes == 0 &&
         static_cast<uintptr_t>(v.stride) % bytes == 0;
}

size_t BlockProgram::workspace(int64_t rows) const {
  const size_t sums = stores_to(step_, Store::To::column_sum).size();
  return sums * static_cast<size_t>(cdiv(rows, kTile) * step_.cols) * sizeof(float);
}

std::vector<Launch> BlockProgram::launches(const RunArgs& args) const {
  const Encoder& e = step_.encoders[0];
  const std::vector<Access> at = accesses_of(step_, args);
  const std::array<Place, kEncoderPlaces> places = encoder_places(e, args);
  std::vector<Launch> list;
  const auto launch = [&](const std::string& entry, int64_t blocks, unsigned threads,
                          const PlainHead& head) {
    list.push_back(launch_of(entry, blocks, threads, head, at, places));
  };
  PlainHead head{.rows = args.rows, .cols = step_.cols, .random = args.random};
  head.to = args.workspace;
  if (entries_.back() == kClear) launch(kClear, 1, 1, head);
  const int64_t blocks = cdiv(args.rows, kTile);
  launch(kEntry, blocks * cdiv(step_.cols, kTile), kThreads, head);
  for (const Orientation o : kOrientations) {
    if (!e.has(o)) continue;
    const View& v = args.out[e.scale_inv(o)];
    const Shape used = e.format.blocks(o).count(args.rows, e.cols);
    if (v.rows * v.cols > used.rows * used.cols)  // padding
      launch(end_entry(o), cdiv(v.rows * v.cols, kOtherThreads), kOtherThreads, head);
  }
  head.count = blocks;
  for (size_t i = 0; i < stores_to(step_, Store::To::column_sum).size(); ++i) {
    head.from = static_cast<float*>(args.workspace) + static_cast<int64_t>(i) * blocks * step_.cols;
    launch(sum_entry(i), cdiv(step_.cols, kOtherThreads), kOtherThreads, head);
  }
  return list;
}

Attempt make_block(const Step& step) {
  if (std::string why = BlockProgram::refusal(step); !why.empty()) return Refusal{std::move(why)};
  const Attempt other = make_plain(step);
  if (std::holds_alternative<Refusal>(other)) return other;
  return kernel_of(step.name, std::make_unique<BlockProgram>(step),
                   std::get<std::shared_ptr<const Kernel>>(other));
}

}  // namespace tenon::cuda
