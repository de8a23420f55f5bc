// Prints the body for tiles whose results share scales.
#include "backend/cuda/block.h"

#include <algorithm>

#include "backend/cuda/eight.h"
#include "backend/cuda/plain.h"
#include "tenon/error.h"

namespace tenon::cuda {

extern const char kBlockSkeleton[];  // embedded by the build

namespace {

constexpr unsigned kEndThreads = 64;
constexpr int64_t kMostEndBlocks = 1024;
constexpr int kColumnData = Encoder::column_data;
constexpr size_t kMostParts = 2;  // 64 KB of shared memory for the second, beside 34 KB
constexpr const char* kEntry = "tenon_block_kernel";
constexpr const char* kSum = "tenon_block_sums";
constexpr const char* kClear = "tenon_block_clear";

std::string end_entry(Orientation o) {
  return o == Orientation::rowwise ? "tenon_block_end_row" : "tenon_block_end_column";
}

// The tile of a block of threads: small ones wait less for each other, but whole lines turned take
// 128 rows, and sums of fewer rows cost where little else moves.
struct Tile {
  int64_t rows = 128, cols = 128;
  [[nodiscard]] unsigned threads() const { return static_cast<unsigned>(rows * cols / 32); }
  [[nodiscard]] unsigned resident() const { return 1024 / threads(); }
};
Tile tile_of(const Step& step) {
  const Encoder& e = step.encoders[0];
  if (e.format.blocks(Orientation::rowwise).rows > 1) return {};
  const size_t sums = stores_to(step, Store::To::column_sum).size();
  if (sums == 1 && !e.columnwise && step.loads.size() == 1) return {};
  if (!e.columnwise) return {.rows = 64};
  return info(e.format.scaling).transposes ? Tile{} : Tile{.rows = 32, .cols = 256};
}

// The values that are encoded, then those that are only summed, each as a store that has it.
std::vector<size_t> parts_of(const Step& step) {
  std::vector<size_t> parts = stores_to(step, Store::To::encoded);
  for (const size_t k : stores_to(step, Store::To::column_sum)) {
    const auto same = [&](size_t p) { return step.stores[p].value == step.stores[k].value; };
    if (std::ranges::none_of(parts, same)) parts.push_back(k);
  }
  return parts;
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
  if (parts_of(step).size() > kMostParts) return "too many results for one tile";
  std::vector<uint32_t> sums;
  for (const size_t k : stores_to(step, Store::To::column_sum)) {
    if (std::ranges::find(sums, step.stores[k].value) != sums.end())
      return "the block map adds a value once";
    sums.push_back(step.stores[k].value);
  }
  const size_t bytes = sizeof(TileHead) +
                       (step.loads.size() + step.stores.size()) * sizeof(Access) +
                       kEncoderPlaces * sizeof(Place);
  if (bytes > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

BlockProgram::BlockProgram(const Step& step) : step_(step) {
  entries_ = {kEntry};
  const Encoder& e = step.encoders[0];
  const std::vector<size_t> parts = parts_of(step);
  const std::vector<size_t> sums = stores_to(step, Store::To::column_sum);
  const size_t encoded = stores_to(step, Store::To::encoded).size();
  std::string part, first, turned, sum;
  for (size_t p = 0; p < parts.size(); ++p) {
    const std::string to = str("a.at[kLoads + ", parts[p], "]");
    part += str("if (p == ", p, ") return ", parts[p], ";\n");
    for (size_t i = 0; i < sums.size(); ++i)
      if (step.stores[sums[i]].value == step.stores[parts[p]].value)
        sum += str("if (p == ", p, ") return ", i, ";\n");
    if (p >= encoded) continue;
    first += str("if (p == ", p, ") return static_cast<TenonU32>(", to, ".offset);\n");
    turned +=
        str("if (p == ", p, ") return a.place[", kColumnData,
            "].data + tenon_wide(static_cast<TenonU32>(", to,
            ".offset) + column, static_cast<TenonU32>(a.place[", kColumnData, "].stride));\n");
  }
  const Tile tile = tile_of(step);
  text_ = str(
      tile_skeletons(), kBlockSkeleton, "\n", encoder_text(step),
      "using Arguments = TenonTileArguments<", step.loads.size() + step.stores.size(), ", ",
      kEncoderPlaces, ">;\nstruct Body {\n  using Encoder = Encoder0;\n",
      "  static constexpr int kTileRows = ", tile.rows, ", kTileCols = ", tile.cols,
      ", kParts = ", parts.size(), ", kEncoded = ", encoded, ", kSums = ", sums.size(),
      ";\n  static constexpr bool kRowwise = ", flag(e.rowwise),
      ", kColumnwise = ", flag(e.columnwise), ";\n", tile_members(step, tile_body(step), ""),
      "  __device__ static constexpr int part(int p) {\n", indented(part),
      "    return 0;\n  }\n  __device__ static int sum_of(int p) {\n", indented(sum),
      "    return -1;\n  }\n  __device__ static TenonU32 first(const Arguments& a, int p) {\n",
      indented(first),
      "    return 0;\n  }\n  __device__ static TenonU8* turned(const Arguments& a, int p, TenonU32 "
      "column) {\n",
      indented(turned), "    return nullptr;\n  }\n};\nextern \"C\" __launch_bounds__(",
      tile.threads(), ", ", tile.resident(), ") __global__ void ", kEntry,
      "(const __grid_constant__ Arguments a) {\n  tenon_block_map<Body>(a);\n}\n");
  const auto kernel = [&](const std::string& entry, const std::string& lines) {
    entries_.push_back(entry);
    text_ += str("extern \"C\" __global__ void ", entry,
                 "(const __grid_constant__ Arguments a) {\n", indented(lines), "}\n");
  };
  if (!sums.empty()) kernel(kSum, partial_lines(step, tile.rows));
  for (const Orientation o : kOrientations) {
    const Blocks b = e.format.blocks(o);
    if (e.has(o))
      kernel(end_entry(o), str("tenon_block_end<Encoder0, ", flag(o == Orientation::rowwise), ", ",
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
         static_cast<uintptr_t>(v.stride) % bytes == 0 && v.stride <= INT32_MAX;
}

size_t BlockProgram::workspace(int64_t rows) const {
  return partial_bytes(step_, rows, tile_of(step_).rows);
}

std::vector<Launch> BlockProgram::launches(const RunArgs& args) const {
  const Encoder& e = step_.encoders[0];
  const Tile tile = tile_of(step_);
  const std::vector<Access> at = accesses_of(step_, args);
  const std::array<Place, kEncoderPlaces> places = encoder_places(e, args);
  const TileHead head = tile_head(step_, args, tile.cols);
  std::vector<Launch> list;
  const auto launch = [&](const std::string& entry, int64_t blocks, unsigned threads) {
    list.push_back(launch_of(entry, blocks, threads, head, at, places));
  };
  if (entries_.back() == kClear) launch(kClear, 1, 1);
  launch(kEntry, cdiv(args.rows, tile.rows) * cdiv(step_.cols, tile.cols), tile.threads());
  constexpr unsigned kParkedBytes = 4 * 8 * sizeof(float);  // of a thread's values
  list.back().shared =
      static_cast<unsigned>(parts_of(step_).size() - 1) * tile.threads() * kParkedBytes;
  for (const Orientation o : kOrientations) {
    if (!e.has(o)) continue;
    const View& v = args.out[e.scale_inv(o)];
    const Shape used = e.format.blocks(o).count(args.rows, e.cols);
    if (v.rows * v.cols > used.rows * used.cols)  // padding
      launch(end_entry(o), std::clamp<int64_t>(std::max(v.rows, v.cols), 1, kMostEndBlocks),
             kEndThreads);
  }
  if (const int64_t blocks = partial_blocks(step_); blocks > 0)
    launch(kSum, blocks, kPartialThreads);
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
