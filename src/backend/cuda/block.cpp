// Prints the body for tiles with block scales.
#include "backend/cuda/block.h"

#include <algorithm>

#include "backend/cuda/eight.h"
#include "backend/cuda/skeletons.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr int64_t kEndBlocks = 128;  // blocks that fill the padding of scales
constexpr int kColumnData = Encoder::column_data;
constexpr size_t kMostParts = 2;  // 64 KB of shared memory for the second, in addition to 17 KB
constexpr const char* kEntry = "tenon_block_kernel";
constexpr const char* kSum = "tenon_block_sums";
constexpr const char* kClear = "tenon_block_clear";

// Rules for the tile size:
// - Small tiles have cheaper barriers.
// - Transposed output needs 128 rows to write whole lines.
// - Sums over fewer rows cost more.
// - Wide tiles access longer contiguous ranges. This matters most if rows do not start at a sector.
// - Shifted tiles compute less twice if they are wide. Long scale blocks lack the registers for
//   that.
// - Long formulas run better in small thread blocks.
BlockTile tile_of(const Step& step, size_t parts, int64_t shift, bool long_formula) {
  const Encoder& e = step.encoders[0];
  const size_t sums = stores_to(step, Store::To::column_sum).size();
  const Blocks row = e.format.blocks(Orientation::rowwise);
  const bool turns = e.columnwise && info(e.format.scaling).transposes;
  if (row.rows > 1 || turns) return {};
  constexpr int64_t kSector = 32;  // bytes of a memory sector; one byte per code
  if (e.columnwise && sums == 0 && e.cols % kSector != 0) return {.rows = 32, .cols = 512};
  if (e.columnwise) return {.rows = sums > 0 ? 64 : 32, .cols = 256};
  if (shift != 0) return {.rows = sums > 0 ? 64 : 32, .cols = row.cols > kSector ? 128 : 256};
  if (sums > 0 && parts > 1 && long_formula) return {.rows = 64};
  if (sums > 0) return {};
  return {.rows = 16, .cols = 256};
}

// A value that is encoded or summed. `store` is one store of the value. [begin, end) are the
// columns of its tiles: columns of the encoder, or its own if the value is only summed.
struct Part {
  size_t store = 0;
  int64_t begin = 0, end = 0;
  bool summed = false;
  int64_t sum_more = 0;  // offset from these columns to those in the row of all sums
};
// Encoded parts come first. `shift` is the offset, in step columns, of the tiles of the second part
// relative to the first. It is nonzero if a scale block has columns of both parts. That block goes
// to the first part, or to the second (a shift to the left) if that shift is smaller. The shift is
// then less than half a block, so the number of tiles does not grow.
struct Parts {
  std::vector<Part> all;
  size_t encoded = 0;
  int64_t shift = 0;
  std::string why_not;
};
Parts parts_of(const Step& step) {
  Parts parts;
  const auto add = [&](size_t k, int64_t begin) {
    parts.all.push_back({.store = k, .begin = begin, .end = begin + step.cols});
  };
  for (const size_t k : stores_to(step, Store::To::encoded)) add(k, step.stores[k].columns.offset);
  std::ranges::sort(parts.all, {}, &Part::begin);
  parts.encoded = parts.all.size();
  const std::vector<size_t> sums = stores_to(step, Store::To::column_sum);
  for (size_t i = 0; i < sums.size(); ++i) {
    const uint32_t value = step.stores[sums[i]].value;
    const auto same = [&](const Part& p) { return step.stores[p.store].value == value; };
    auto at = std::ranges::find_if(parts.all, same);
    if (at == parts.all.end()) at = (add(sums[i], 0), parts.all.end() - 1);
    if (at->summed) parts.why_not = "the block map adds a value once";
    at->summed = true;
    at->sum_more = static_cast<int64_t>(i) * step.cols - at->begin;
  }
  if (parts.all.size() > kMostParts) parts.why_not = "too many results for one tile";
  const Encoder& e = step.encoders[0];
  int64_t width = 1;
  for (const Orientation o : kOrientations)
    if (e.has(o)) width = std::max(width, e.format.blocks(o).cols);
  Part& first = parts.all.front();
  Part& last = parts.all.back();
  if (first.begin % width != 0)
    parts.why_not = "the first block of a tensor belongs to another step";
  if (parts.encoded < 2 || first.end % width == 0 || !parts.why_not.empty()) return parts;
  const bool both = first.sum_more == last.sum_more && first.summed == last.summed;
  if (first.begin != 0 || last.begin != first.end || step.cols % kEight != 0 || !both ||
      parts.encoded + sums.size() < step.stores.size()) {
    parts.why_not = "a block has columns of two results";
    return parts;
  }
  const int64_t left = first.end % width;
  parts.shift = left < width - left && left < first.end ? -left : width - left;
  last.begin += parts.shift;
  first.end = std::min(last.begin, last.end);
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
  if (!step.is_map()) return str("the block map has no ", step.head_name(), " head");
  for (const Load& l : step.loads)
    if (l.transposed) return "the block map does not read transposed tensors";
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
  if (std::string why = parts_of(step).why_not; !why.empty()) return why;
  if (argument_bytes(step, sizeof(TenonTileHead)) > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

BlockProgram::BlockProgram(const Step& step, bool whole_rows, int64_t multiprocessors)
    : step_(step), whole_rows_(whole_rows), multiprocessors_(multiprocessors) {
  entries_ = {kEntry};
  const EightLines formula = eight_lines(step);
  singles_ = formula.singles;
  const Encoder& e = step.encoders[0];
  const Parts parts = parts_of(step);
  const std::vector<size_t> sums = stores_to(step, Store::To::column_sum);
  // One number per part, as a function that the compiler folds if the part is known.
  const auto each = [&](const char* declared, const char* before, auto&& number) {
    std::string lines = before;
    for (size_t p = 1; p < parts.all.size(); ++p)
      lines += str("    if (p == ", p, ") return ", number(parts.all[p]), ";\n");
    return str("  __device__ static ", declared, " {\n", lines, "    return ", number(parts.all[0]),
               ";\n  }\n");
  };
  // Writes columns as multiples of the width if possible, so that one text serves all widths.
  const auto word = [&](int64_t n) {
    return step.cols > 0 && n % step.cols == 0
               ? str(static_cast<uint32_t>(n / step.cols), "u * cols")
               : str(static_cast<uint32_t>(n), "u");
  };
  constexpr const char* kCols = "    const TenonU32 cols = static_cast<TenonU32>(a.cols);\n";
  const bool long_formula = formula.length() >= kManyLines;
  tile_ = tile_of(step, parts.all.size(), parts.shift, long_formula);
  const BlockTile& tile = tile_;
  constexpr unsigned kThreadBytes = 4 * 8 * sizeof(float);
  // Formulas with one load use few registers but need more threads.
  const bool light = e.format.blocks(Orientation::rowwise).rows > 1 && parts.all.size() == 1 &&
                     sums.empty() && step.loads.size() == 1;
  parked_ = static_cast<unsigned>(light ? 1 : parts.all.size() - 1) * tile.threads() * kThreadBytes;
  text_ =
      str(block_skeletons(), encoder_text(step),
          arguments_text("TenonTileHead",
                         step.loads.size() + formula.singles.count() + step.stores.size(),
                         kEncoderPlaces),
          "struct Body {\n  using Encoder = Encoder0;\n",
          "  static constexpr int kTileRows = ", tile.rows, ", kTileCols = ", tile.cols,
          ", kParts = ", parts.all.size(), ", kEncoded = ", parts.encoded,
          ", kSums = ", sums.size(), ", kStrip = ", partial_strip(step), ", kShift = ", parts.shift,
          ";\n  static constexpr bool kLight = ", flag(light), ", kLong = ", flag(long_formula),
          ", kRowwise = ", flag(e.rowwise), ", kColumnwise = ", flag(e.columnwise),
          ", kWholeRows = ", flag(whole_rows),
          ", kWholeColumns = ", flag(step.cols % tile.cols == 0 && parts.shift == 0), ";\n",
          tile_members(step, tile_body(step), formula, ""),
          each("constexpr int part(int p)", "", [](const Part& p) { return p.store; }),
          each("constexpr bool summed(int p)", "", [](const Part& p) { return flag(p.summed); }),
          each("TenonU32 begin(const Arguments& a, int p)", kCols,
               [&](const Part& p) { return word(p.begin); }),
          each("TenonU32 end(const Arguments& a, int p)", kCols,
               [&](const Part& p) { return word(p.end); }),
          each("TenonU32 sum_more(const Arguments& a, int p)", kCols,
               [&](const Part& p) { return word(p.sum_more); }),
          "  __device__ static TenonU8* turned(const Arguments& a, int, TenonU32 column) {\n"
          "    return a.place[",
          kColumnData, "].data + tenon_wide(column, static_cast<TenonU32>(a.place[", kColumnData,
          "].stride));\n  }\n};\nextern \"C\" __launch_bounds__(", tile.threads(), ", ",
          light ? 3 : tile.resident(), ") __global__ void ", kEntry,
          "(const __grid_constant__ Arguments a) {\n  tenon_block_map<Body>(a);\n}\n");
  const auto kernel = [&](const std::string& entry, const std::string& lines) {
    entries_.push_back(entry);
    text_ += str("extern \"C\" __launch_bounds__(1024) __global__ void ", entry,
                 "(const __grid_constant__ Arguments a) {\n", indented(lines), "}\n");
  };
  if (!sums.empty()) kernel(kSum, partial_lines(step, tile.rows));
  if (const std::string clear = clear_lines(step); !clear.empty()) kernel(kClear, clear);
}

bool BlockProgram::fits(const RunArgs& args) const {
  const Encoder& e = step_.encoders[0];
  if (args.rows == 0 || step_.cols == 0) return false;
  if (whole_rows_ && args.rows % tile_.rows != 0) return false;
  if (!suits_eights(step_, singles_, args)) return false;
  // Threads outside the tensor read its last row and column for their maxima. An output in place
  // could overwrite these first, so such calls are refused.
  for (const size_t k : stores_to(step_, Store::To::tile))
    for (const View& v : args.in)
      if (v.data != nullptr && v.data == args.out[step_.stores[k].arg].data) return false;
  if (!e.columnwise) return true;
  const View& v = args.out[e.data(Orientation::columnwise)];
  const uintptr_t bytes = info(e.format.scaling).transposes ? 16 : 8;
  return reinterpret_cast<uintptr_t>(v.data) % bytes == 0 &&
         static_cast<uintptr_t>(v.stride) % bytes == 0 && v.stride <= INT32_MAX;
}

size_t BlockProgram::workspace(int64_t rows) const {
  return partial_bytes(step_, rows, tile_.rows);
}

std::vector<Launch> BlockProgram::launches(const RunArgs& args) const {
  const Encoder& e = step_.encoders[0];
  const BlockTile& tile = tile_;
  const Accesses at = accesses_of(step_, singles_, args);
  const std::array<TenonPlace, kEncoderPlaces> places = encoder_places(e, args);
  const TenonTileHead head = tile_head(step_, args, tile.rows);
  std::vector<Launch> list;
  const auto launch = [&](const char* entry, int64_t blocks, unsigned threads) {
    list.push_back(launch_of(number(entry), blocks, threads, head, at, places));
  };
  if (entries_.back() == kClear) launch(kClear, 1, 1);
  int64_t ends = 0;
  for (const Orientation o : kOrientations) {
    if (!e.has(o)) continue;
    const View& v = args.out[e.scale_inv(o)];
    const Shape used = e.format.blocks(o).count(args.rows, e.cols);
    if (v.rows * v.cols > used.rows * used.cols) ends = kEndBlocks;
  }
  const int64_t across = cdiv(step_.cols, tile.cols);
  const int64_t down = cdiv(args.rows, tile.rows) + cdiv(ends, across);
  for (Launch& l : launches_of_tiles(number(kEntry), across, down, tile.rows, tile.threads(), head,
                                     at, places)) {
    l.shared = l.least_shared = parked_;
    list.push_back(std::move(l));
  }
  if (const int64_t blocks = partial_blocks(step_); blocks > 0)
    launch(kSum, blocks, partial_threads(step_, args.rows, tile.rows, multiprocessors_));
  return list;
}

namespace {

Attempt make(const Step& step, const Target& target, bool whole_rows) {
  if (std::string why = BlockProgram::refusal(step); !why.empty())
    return Refusal{std::move(why), !step.is_map()};
  return kernel_of(step.name, std::make_unique<BlockProgram>(step, whole_rows, target.processors));
}

}  // namespace

Attempt make_whole_blocks(const Step& step, const Target& target) {
  return make(step, target, true);
}
Attempt make_block(const Step& step, const Target& target) { return make(step, target, false); }

}  // namespace tenon::cuda
