// Prints the body for tiles, and checks which calls it can run.
#include "backend/cuda/tile.h"

#include <algorithm>

#include "backend/cuda/eight.h"
#include "backend/cuda/skeletons.h"
#include "backend/cuda/vector.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr int64_t kTile = kTenonTile;
constexpr unsigned kThreads = 512;
constexpr size_t kMostTurned = 2;  // 16 KB of shared memory each, and 8 KB per sum
constexpr size_t kMostSums = 2;
constexpr const char* kEntry = "tenon_tile_kernel";
constexpr const char* kSum = "tenon_tile_sums";
constexpr const char* kClear = "tenon_tile_clear";

// Resident blocks per multiprocessor. A step with one load and no sums has room for a third block.
// So does a light step: one sum, rowwise results, few loads in flight, and the sum in shared
// memory.
struct Room {
  int blocks = 2;
  bool light = false;
};
Room room_of(const Step& step, const EightLines& formula) {
  const auto loaded = [](const Load& l) { return l.from != Load::From::parameter; };
  const size_t sums = stores_to(step, Store::To::column_sum).size();
  const bool alone = std::ranges::count_if(step.loads, loaded) == 1;
  const auto random = [](const Load& l) { return l.from == Load::From::random; };
  const auto found = [](const Encoder& e) { return info(e.format.scaling).reads_amax(); };
  const bool light = sums == 1 && turned_stores(step).empty() && held_bytes(step) <= 4 &&
                     formula.length() < kLongFormula && std::ranges::none_of(step.loads, random) &&
                     std::ranges::none_of(step.encoders, found);
  return {.blocks = light || (alone && sums == 0) ? 3 : 2, .light = light};
}

struct EncodedText {
  std::string codes, store;
};

// Codes that are written both rowwise and columnwise are computed once.
EncodedText encoded_text(const Step& step) {
  EncodedText t;
  const std::vector<size_t> turned = turned_stores(step);
  for (const size_t k : stores_to(step, Store::To::encoded)) {
    const Store& s = step.stores[k];
    const std::string to = str("a.at[kLoads + ", k, "]");
    const auto plane = std::ranges::find(turned, k) - turned.begin();
    const bool both = plane < static_cast<int64_t>(turned.size());
    if (both) {
      t.codes += str("{\n", scale_eight(k, s.arg), "now[", plane, "] = tenon_codes8<",
                     format(s.dtype), ">(scaled);\n}\n");
    }
    if (!step.encoders[s.arg].rowwise) continue;
    const std::string below = below_eight(s.columns, 1, to);
    if (both)
      t.store += str("*reinterpret_cast<TenonWords2*>(", below, ") = now[", plane, "];\n");
    else
      t.store += str("{\n", scale_eight(k, s.arg), "TenonEight<", format(s.dtype), ">::store(",
                     below, ", scaled);\n}\n");
  }
  return t;
}

}  // namespace

std::string TileProgram::refusal(const Step& step) {
  if (!step.is_map()) return str("the tiled map has no ", step.head_name(), " head");
  for (const Load& l : step.loads)
    if (l.transposed) return "the tiled map does not read transposed tensors";
  for (const Store& s : step.stores) {
    if (s.to == Store::To::row_sum || s.to == Store::To::sum || s.to == Store::To::column)
      return str("the tiled map has no ", kStoreNames[static_cast<size_t>(s.to)]);
    if (s.ordered) return "the tiled map adds rows as a tree only";
  }
  for (const Encoder& e : step.encoders) {
    if (!e.format.blocks(Orientation::rowwise).single())
      return "the tiled map finds no scales of blocks";
    if (info(e.format.dtype).bytes != 1) return "the tiled map turns codes of one byte only";
    if (e.counts) return "the tiled map counts nothing";
  }
  if (turned_stores(step).size() > kMostTurned) return "too many columnwise results for one tile";
  if (stores_to(step, Store::To::column_sum).size() > kMostSums)
    return "too many sums for one tile";
  if (step.stores.empty()) return "the tiled map has nothing to store";
  if (argument_bytes(step, sizeof(TenonTileHead)) > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

TileProgram::TileProgram(const Step& step, bool whole_rows, int64_t multiprocessors)
    : step_(step), whole_rows_(whole_rows), multiprocessors_(multiprocessors) {
  entries_ = {kEntry};
  const EightLines formula = eight_lines(step);
  singles_ = formula.singles;
  const EncodedText encoded = encoded_text(step);
  TileBody t = tile_body(step);
  t.store += encoded.store;
  std::string scalings, sum_lines;
  for (size_t e = 0; e < step.encoders.size(); ++e) scalings += scaling_text(step, e);
  const std::vector<size_t> sums = stores_to(step, Store::To::column_sum);
  const Room room = room_of(step, formula);
  for (size_t i = 0; i < sums.size(); ++i)
    sum_lines += str("sums[", i, "].add(out[", sums[i], "], there, r, slots[", i, "]);\n");
  text_ = str(
      tile_skeletons(), scalings,
      arguments_text("TenonTileHead",
                     step.loads.size() + formula.singles.count() + step.stores.size(),
                     step.encoders.size() * kEncoderPlaces),
      "struct Body {\n  static constexpr int kTurned = ", turned_stores(step).size(),
      ", kSums = ", sums.size(), ", kStrip = ", partial_strip(step),
      ";\n  static constexpr bool kLight = ", flag(room.light),
      ", kLong = ", flag(formula.length() >= kManyLines), ", kWholeRows = ", flag(whole_rows),
      ", kWholeColumns = ", flag(step.cols % kTile == 0), ";\n",
      tile_members(step, t, formula, "const TenonWords2* now, "),
      "  __device__ static void codes(const Arguments& a, const float (&out)[kStores][8], "
      "TenonWords2* now) {\n",
      indented(encoded.codes),
      "  }\n  template <class Sum, class Slots>\n  __device__ static void sum(const float "
      "(&out)[kStores][8], bool there, int r, Sum* sums, Slots& slots) {\n",
      indented(sum_lines),
      "  }\n  __device__ static TenonU8* turned(const Arguments& a, int plane, TenonU32 column) "
      "{\n",
      indented(turned_lines(step)), "  }\n};\nextern \"C\" __launch_bounds__(", kThreads, ", ",
      room.blocks, ") __global__ void ", kEntry,
      "(const __grid_constant__ Arguments a) {\n  tenon_tile_map<Body>(a);\n}\n");
  const auto kernel = [&](const std::string& entry, const std::string& lines) {
    entries_.push_back(entry);
    text_ += str("extern \"C\" __launch_bounds__(1024) __global__ void ", entry,
                 "(const __grid_constant__ Arguments a) {\n", indented(lines), "}\n");
  };
  if (!sums.empty()) kernel(kSum, partial_lines(step, kTile));
  if (const std::string clear = clear_lines(step); !clear.empty()) kernel(kClear, clear);
}

bool TileProgram::fits(const RunArgs& args) const {
  if (args.rows == 0 || step_.cols == 0) return false;
  if (whole_rows_ && args.rows % kTile != 0) return false;
  if (!suits_eights(step_, singles_, args)) return false;
  // Columns are written 16 rows at a time.
  for (const Encoder& e : step_.encoders) {
    if (!e.columnwise) continue;
    const View& v = args.out[e.data(Orientation::columnwise)];
    if (reinterpret_cast<uintptr_t>(v.data) % 16 != 0 || v.stride % 16 != 0 || v.stride > INT32_MAX)
      return false;
  }
  return true;
}

size_t TileProgram::workspace(int64_t rows) const { return partial_bytes(step_, rows, kTile); }

std::vector<Launch> TileProgram::launches(const RunArgs& args) const {
  const Accesses at = accesses_of(step_, singles_, args);
  Places places;
  for (const Encoder& e : step_.encoders)
    for (const TenonPlace& p : encoder_places(e, args)) places.push_back(p);
  const TenonTileHead head = tile_head(step_, args, kTile);
  std::vector<Launch> list;
  const auto launch = [&](const char* entry, int64_t blocks, unsigned threads) {
    list.push_back(launch_of(number(entry), blocks, threads, head, at, places));
  };
  if (entries_.back() == kClear) launch(kClear, 1, 1);
  for (Launch& l : launches_of_tiles(number(kEntry), cdiv(step_.cols, kTile),
                                     cdiv(args.rows, kTile), kTile, kThreads, head, at, places))
    list.push_back(std::move(l));
  if (const int64_t blocks = partial_blocks(step_); blocks > 0)
    launch(kSum, blocks, partial_threads(step_, args.rows, kTile, multiprocessors_));
  return list;
}

namespace {

Attempt make(const Step& step, const Target& target, bool whole_rows) {
  if (std::string why = TileProgram::refusal(step); !why.empty())
    return Refusal{std::move(why), !step.is_map()};
  if (turned_stores(step).empty() && stores_to(step, Store::To::column_sum).empty() &&
      VectorProgram::refusal(step).empty())
    return Refusal{"nothing is summed or written along the columns"};
  return kernel_of(step.name, std::make_unique<TileProgram>(step, whole_rows, target.processors));
}

}  // namespace

Attempt make_whole_tiles(const Step& step, const Target& target) {
  return make(step, target, true);
}
Attempt make_tile(const Step& step, const Target& target) { return make(step, target, false); }

}  // namespace tenon::cuda
