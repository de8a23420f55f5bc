// Prints the body for whole rows.
#include "backend/cuda/row.h"

#include <algorithm>
#include <array>
#include <optional>

#include "backend/cuda/driver.h"
#include "backend/cuda/eight.h"
#include "backend/cuda/skeletons.h"
#include "step/split.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr int64_t kWarp = 32, kMostThreads = 1024, kMostVectors = 8;
constexpr int64_t kRegisters = 65536;        // registers of a multiprocessor
constexpr int64_t kOrdered = kTenonSumRows;  // for the gradients of gamma and beta
constexpr int64_t kParts = 512;              // sums that one launch adds
constexpr int64_t kMostStage = 96 * 1024;    // shared memory that every device supports
constexpr int64_t kRing = 112 * 1024;        // prefetched rows: two to four
constexpr const char* kEntry = "tenon_row_kernel";
constexpr const char* kSums = "tenon_row_sum";
constexpr const char* kClear = "tenon_row_clear";
constexpr const char* kEnd = "tenon_row_end";

// Floats of the partial sums of a block, in whole cache lines.
int64_t part_floats(const Step& step) { return rup(step.cols, kLine); }

bool has_sums(const Step& step) { return !stores_to(step, Store::To::column_sum).empty(); }

// Bytes per element of all loads of one kind.
int64_t bytes_of(const Step& step, Load::From from) {
  int64_t bytes = 0;
  for (const Load& l : step.loads)
    if (l.from == from) bytes += info(l.dtype).bytes;
  return bytes;
}

// Registers of a loaded vector before conversion.
int64_t words_of(const Step& step, Load::From from) { return kEight / 4 * bytes_of(step, from); }

// The split of a row over a thread block. `blocks` is the number of resident blocks per
// multiprocessor.
struct Size {
  int64_t threads = 0, vectors = 0, blocks = 0;
  [[nodiscard]] int64_t stage(const Step& step) const {
    return threads * vectors * kEight * bytes_of(step, Load::From::tile);
  }
  // Whether the next rows are prefetched to shared memory.
  [[nodiscard]] bool staged(const Step& step) const {
    return has_sums(step) && stage(step) > 0 && stage(step) <= kMostStage;
  }
};

// Without sums: four to eight vectors per thread, so that other blocks of the multiprocessor hide
// latency. With sums, a block processes rows in sequence: as few vectors as possible, because the
// sums and the next rows need registers too. 0 threads: the row is too long.
Size size_of(const Step& step) {
  const int64_t row = std::max<int64_t>(1, cdiv(step.cols, kEight));
  const auto threads = [&](int64_t vectors) { return rup(cdiv(row, vectors), kWarp); };
  const auto blocks = [](int64_t threads, int64_t registers) {
    return std::clamp<int64_t>(kRegisters / (threads * registers), 1, 8);
  };
  if (has_sums(step)) {
    constexpr int64_t kBeside = 34;  // other registers
    const auto sums = static_cast<int64_t>(stores_to(step, Store::To::column_sum).size());
    const int64_t held = kEight * sums + words_of(step, Load::From::row);
    int64_t vectors = 1;
    while (vectors <= kMostVectors &&
           (threads(vectors) > kMostThreads ||
            (threads(vectors) * (held * vectors + kBeside) > kRegisters && vectors < 4)))
      ++vectors;
    if (vectors > kMostVectors) return {};
    return {threads(vectors), vectors, blocks(threads(vectors), held * vectors + kBeside)};
  }
  constexpr int64_t kHeld = 84, kBeside = 32;  // registers for vectors; other registers
  const int64_t words = words_of(step, Load::From::tile) + words_of(step, Load::From::row);
  const int64_t most = std::clamp<int64_t>(kHeld / std::max<int64_t>(words, 1), 1, kMostVectors);
  const int64_t least = std::min({int64_t{4}, most, cdiv(row, kWarp)});
  constexpr int64_t kWanted = 256;
  Size best;
  for (int64_t v = least; v <= most; ++v) {
    const Size s{threads(v), v, 0};
    const auto rank = [](const Size& x) {
      return std::pair(x.threads * x.vectors, std::abs(x.threads - kWanted));
    };
    if (s.threads <= kMostThreads && (best.threads == 0 || rank(s) < rank(best))) best = s;
  }
  if (best.threads) best.blocks = blocks(best.threads, words * best.vectors + kBeside);
  if (best.threads && !step.totals().empty() && words_of(step, Load::From::row) == 0) {
    // If a row is read again after a total, the compiler keeps it decoded in registers, so fewer
    // blocks fit. At least two: a single block would be idle at its barriers.
    constexpr int64_t kBesideDecoded = 16;
    const auto tile = [](const Load& l) { return l.from == Load::From::tile; };
    const int64_t decoded = kEight * std::ranges::count_if(step.loads, tile) * best.vectors;
    const int64_t fewer = blocks(best.threads, decoded + kBesideDecoded);
    best.blocks = std::min(best.blocks, std::max<int64_t>(fewer, 2));
  }
  return best;
}

// Whether a node depends on a load for which `wanted` is true.
template <class Wanted>
bool reads(const Step& step, uint32_t node, const Wanted& wanted) {
  std::vector<uint32_t> open{node};
  std::vector<bool> seen(step.graph->size());
  while (!open.empty()) {
    const uint32_t id = open.back();
    open.pop_back();
    if (seen[id]) continue;
    seen[id] = true;
    const Node& n = (*step.graph)[id];
    if (n.word == Word::load && wanted(step.loads[n.slot])) return true;
    for (int i = 0; i < n.arity(); ++i) open.push_back(n.in[static_cast<size_t>(i)]);
  }
  return false;
}

// Whether row vectors are loaded at their use: no total reads them, and they need many registers.
bool late(const Step& step, int64_t vectors) {
  constexpr int64_t kMostHeld = 28;  // registers
  if (step.totals().empty() || has_sums(step) ||
      words_of(step, Load::From::row) * vectors <= kMostHeld)
    return false;
  return std::ranges::none_of(step.totals(), [&](uint32_t t) {
    return reads(step, t, [](const Load& l) { return l.from == Load::From::row; });
  });
}

// The first total of each group. The totals of a group are computed together.
std::string groups_of(const Step& step, int64_t vectors) {
  std::string text = "0";
  uint32_t first = 0;
  const auto count = static_cast<uint32_t>(step.totals().size());
  for (uint32_t t = 1; t < count; ++t) {
    const bool full = (t - first + 1) * vectors > kWarp;
    const auto wanted = [&](const Load& l) {
      return l.from == Load::From::total && l.arg >= first;
    };
    if (!full && !reads(step, step.totals()[t], wanted)) continue;
    first = t;
    text += str(", ", t);
  }
  return str(text, ", ", count);
}

struct RowBody {
  std::string raw, fetch, fixed, fetch_fixed, line, fetch_line, unpack;
  std::string stage, to_stage, from_stage;
};
RowBody loads_text(const Step& step) {
  RowBody t;
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    const int64_t bytes = info(l.dtype).bytes;
    const std::string at = str("at[", i, "]");
    const auto address = [&](const char* kind) {
      return str(at, ".data + ", element_eight(kind, l.columns, at), " * ", bytes);
    };
    const std::string member = str("    TenonRaw<", bytes, "> r", i);
    switch (l.from) {
      case Load::From::total:
        t.unpack += str("tenon_spread8(totals[", l.arg, "], in[", i, "]);\n");
        break;
      case Load::From::tile:
        t.raw += member + ";\n";
        t.stage += member + "[kVectors][kThreads];\n";
        t.fetch += str("raw.r", i, ".load(", address("tile"), ");\n");
        t.to_stage += str("tenon_copy<sizeof(TenonRaw<", bytes, ">)>(&stage.r", i,
                          "[n][threadIdx.x], ", address("tile"), ");\n");
        t.from_stage += str("raw.r", i, " = stage.r", i, "[n][threadIdx.x];\n");
        t.unpack += load_eight(step, i, str("raw.r", i));
        break;
      case Load::From::row:
        t.fixed += member + ";\n";
        t.fetch_fixed += str("fixed.r", i, ".load(", address("row"), ");\n");
        t.unpack += load_eight(step, i, str("fixed.r", i));
        break;
      case Load::From::column:
        t.line += str("    float c", i, ";\n");
        t.fetch_line += str("line.c", i, " = tenon_load<", format(l.dtype), ">(", at,
                            ", tenon_column(", at, ", row, 0));\n");
        t.unpack += str("tenon_spread8(line.c", i, ", in[", i, "]);\n");
        break;
      default:
        t.unpack += load_eight(step, i);
    }
  }
  return t;
}

struct RowStores {
  std::string store, columns, sum, end_sum;
};
RowStores stores_text(const Step& step) {
  RowStores t;
  std::string inside;
  size_t amaxes = 0, sums = 0;
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    const std::string to = str("a.at[kLoads + ", k, "]");
    const std::string store = str("tenon_store8<", format(s.dtype), ">(", to, ", ",
                                  element_eight("tile", s.columns, to), ", ");
    switch (s.to) {
      case Store::To::tile:
        inside += str(store, "out[", k, "]);\n");
        break;
      case Store::To::amax:
        inside += amax_eight(k, amaxes++);
        break;
      case Store::To::column:
        t.columns += str("tenon_store<", format(s.dtype), ">(", to, ", row * ", to, ".stride, out[",
                         k, "][0]);\n");
        break;
      case Store::To::column_sum:
        t.sum += str("for (int e = 0; e < 8; ++e) sums[", sums, "][n][e] = sums[", sums,
                     "][n][e] + out[", k, "][e];\n");
        t.end_sum += str("if (k == ", sums++, ") tenon_store<", format(s.dtype), ">(", to,
                         ", tenon_mapped(", to, ", column), v);\n");
        break;
      default: {
        const Blocks b = step.encoders[s.arg].format.blocks(Orientation::rowwise);
        if (b.single()) {
          inside += str("{\n", scale_eight(k, s.arg), store, "scaled);\n}\n");
          break;
        }
        // Outside the branch, because all lanes of a block of columns take part.
        t.store += str("{\nfloat scaled[8];\ntenon_scale8<Scaling", s.arg, ", ", b.cols, ", ",
                       flag(b.transposed), ">(a, row, column, there, out[", k,
                       "], scaled);\nif (there) ", store, "scaled);\n}\n");
      }
    }
  }
  t.store = str("if (there) {\n", inside, "}\n", t.store);
  return t;
}

// One rowwise encoding only. A warp must hold all columns of a scale.
std::string why_not(const Encoder& e, const Step& step) {
  const Blocks b = e.format.blocks(Orientation::rowwise);
  if (e.columnwise) return "the row map writes no columnwise encoding";
  if (e.counts) return "the row map counts nothing";
  if (b.single()) return "";
  if (b.rows != 1) return "the row map has no scales over several rows";
  return e.cols == step.cols ? "" : "the row map writes no part of a tensor with scales of blocks";
}

}  // namespace

std::string RowProgram::refusal(const Step& step) {
  if (step.gemm()) return "the row map has no product";
  if (step.is_map() && stores_to(step, Store::To::column).empty())
    return "the row map is for totals of rows";
  if (size_of(step).threads == 0) return str(step.cols, " columns are too many for the row map");
  for (const Load& l : step.loads)
    if (l.from == Load::From::block || l.transposed)
      return str("the row map does not read ",
                 l.transposed ? "transposed tensors" : "scales of blocks");
  for (const Store& s : step.stores) {
    if (s.to == Store::To::row_sum || s.to == Store::To::sum)
      return str("the row map has no ", kStoreNames[static_cast<size_t>(s.to)]);
    if (s.to == Store::To::column_sum && !s.ordered) return "the row map adds rows in order only";
  }
  for (const Encoder& e : step.encoders)
    if (std::string why = why_not(e, step); !why.empty()) return why;
  const size_t bytes = sizeof(TenonPlainHead) +
                       (step.loads.size() + step.stores.size()) * sizeof(TenonAccess) +
                       (step.encoders.size() * kEncoderPlaces + 1) * sizeof(TenonPlace);
  if (bytes > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

RowProgram::RowProgram(const Step& step) : step_(step) {
  entries_ = {kEntry};
  const Size size = size_of(step);
  const RowBody t = loads_text(step);
  const RowStores s = stores_text(step);
  const size_t sums = stores_to(step, Store::To::column_sum).size();
  const bool staged = size.staged(step);
  std::string scalings;
  for (size_t e = 0; e < step.encoders.size(); ++e) scalings += scaling_text(step, e);
  const char* const where = "TenonU32 row, TenonU32 column";
  const auto function = [&](const std::string& head, const std::string& lines) {
    return str("  __device__ static void ", head, " {\n", indented(lines), "  }\n");
  };
  text_ = str(
      row_skeletons(), scalings,
      arguments_text("TenonPlainHead", step.loads.size() + step.stores.size(),
                     step.encoders.size() * kEncoderPlaces),
      "struct Body {\n  static constexpr int kLoads = ", step.loads.size(),
      ", kStores = ", step.stores.size(), ", kRoots = ", step.stores.size() + step.totals().size(),
      ", kTotals = ", step.totals().size(), ", kSums = ", sums,
      ", kAmax = ", stores_to(step, Store::To::amax).size(), ", kThreads = ", size.threads,
      ", kVectors = ", size.vectors, ", kCols = ", step.cols,
      ";\n  static constexpr int kGroups[] = {", groups_of(step, size.vectors),
      "};\n  static constexpr bool kLate = ", flag(late(step, size.vectors)), ";\n  struct Raw {\n",
      t.raw, "  };\n  struct Fixed {\n", t.fixed, "  };\n  struct Line {\n", t.line,
      "  };\n  struct Stage {\n", t.stage, "  };\n",
      function(str("fetch(const TenonAccess* at, ", where, ", Raw& raw)"), t.fetch),
      function(str("fetch_fixed(const TenonAccess* at, ", where, ", Fixed& fixed)"), t.fetch_fixed),
      function("fetch_line(const TenonAccess* at, TenonU32 row, Line& line)", t.fetch_line),
      function(str("to_stage(const TenonAccess* at, ", where, ", int n, Stage& stage)"),
               t.to_stage),
      function("from_stage(const Stage& stage, int n, Raw& raw)", t.from_stage),
      function(str("unpack(const TenonAccess* at, const TenonU64* random, ", where,
                   ", const Raw& raw, const Fixed& fixed, const Line& line, const float* totals, "
                   "float (*in)[8])"),
               t.unpack),
      function("compute(const float* in, float* out)", compute_lines(step)),
      function(str("store(const Arguments& a, ", where,
                   ", bool there, const float (&out)[kRoots][8], TenonU32* most)"),
               s.store),
      function("columns(const Arguments& a, TenonU32 row, const float (&out)[kRoots][8])",
               s.columns),
      function("sum(const float (&out)[kRoots][8], int n, float (*sums)[kVectors][8])", s.sum),
      function("end_sum(const Arguments& a, int k, TenonU32 column, float v)", s.end_sum),
      function("finish(const Arguments& a, const TenonU32* most)", finish_lines(step)),
      "};\nextern \"C\" __launch_bounds__(", size.threads, ", ", size.blocks, ") __global__ void ",
      kEntry, "(const __grid_constant__ Arguments a) {\n  tenon_row_",
      sums == 0 ? "map"
      : staged  ? "ring"
                : "chunk",
      "<Body>(a);\n}\n");
  const auto kernel = [&](const char* entry, const std::string& lines) {
    entries_.emplace_back(entry);
    text_ += str("extern \"C\" __global__ void ", entry,
                 "(const __grid_constant__ Arguments a) {\n", indented(lines), "}\n");
  };
  if (sums > 0) kernel(kSums, "tenon_row_sums<Body>(a);\n");
  std::string end;
  for (size_t e = 0; e < step.encoders.size(); ++e) {
    const Blocks b = step.encoders[e].format.blocks(Orientation::rowwise);
    if (!b.single())
      end += str("tenon_encode_end<Scaling", e, ", true, ", b.rows, ", ", b.cols, ", ",
                 flag(b.transposed), ">(a);\n");
  }
  if (!end.empty()) kernel(kEnd, end);
  if (const std::string clear = clear_lines(step); !clear.empty()) kernel(kClear, clear);
}

bool RowProgram::fits(const RunArgs& args) const {
  if (args.rows == 0 || step_.cols == 0) return false;
  for (const size_t k : stores_to(step_, Store::To::encoded))
    if (!step_.encoders[step_.stores[k].arg].format.blocks(Orientation::rowwise).single() &&
        (step_.stores[k].columns.offset != 0 || !step_.stores[k].columns.contiguous()))
      return false;
  return suits_eights(step_, {}, args);
}

size_t RowProgram::workspace(int64_t rows) const {
  int64_t parts = 0;
  int64_t count = cdiv(rows, kOrdered);
  for (parts = count; count > kParts; parts += count) count = cdiv(count, kParts);
  const auto sums = static_cast<int64_t>(stores_to(step_, Store::To::column_sum).size());
  return static_cast<size_t>(sums * parts * part_floats(step_)) * sizeof(float);
}

std::vector<Launch> RowProgram::launches(const RunArgs& args) const {
  const Size size = size_of(step_);
  const Accesses at = accesses_of(step_, {}, args);
  Places places;
  for (const Encoder& e : step_.encoders)
    for (const TenonPlace& p : encoder_places(e, args)) places.push_back(p);
  std::vector<Launch> list;
  TenonPlainHead head{.rows = args.rows, .cols = step_.cols, .random = random_state(args)};
  auto* to = static_cast<float*>(args.workspace);
  head.to = to;
  const auto launch = [&](const char* entry, int64_t blocks, int64_t threads) -> Launch& {
    return list.emplace_back(
        launch_of(number(entry), blocks, static_cast<unsigned>(threads), head, at, places));
  };
  if (entries_.back() == kClear) launch(kClear, 1, 1);
  const auto sums = static_cast<int64_t>(stores_to(step_, Store::To::column_sum).size());
  head.count = sums > 0 ? cdiv(args.rows, kOrdered) : args.rows;
  Launch& main = launch(kEntry, head.count, size.threads);
  if (const int64_t stage = size.stage(step_); size.staged(step_)) {
    main.shared = static_cast<unsigned>(stage * std::clamp<int64_t>(kRing / stage, 2, 4));
    main.least_shared = static_cast<unsigned>(stage);
  }
  int64_t padded = 0;  // size of padded scale tensors
  for (const Encoder& e : step_.encoders) {
    const Blocks b = e.format.blocks(Orientation::rowwise);
    if (b.single()) continue;
    const View& v = args.out[e.scale_inv(Orientation::rowwise)];
    const Shape used = b.count(args.rows, e.cols);
    if (v.rows * v.cols > used.rows * used.cols) padded = std::max(padded, v.rows * v.cols);
  }
  constexpr int64_t kEndThreads = 256;
  if (padded > 0) launch(kEnd, cdiv(padded, kEndThreads), kEndThreads);
  for (bool left = sums > 0; left;) {
    const int64_t groups = cdiv(head.count, kParts);
    left = groups > 1;
    head.from = to;
    head.to = to += sums * head.count * part_floats(step_);
    launch(kSums, sums * groups * cdiv(step_.cols, kLine), kMostThreads);
    head.count = groups;
  }
  return list;
}

Attempt make_row(const Step& step, const Target& /*target*/) {
  const auto beyond = [&](const Encoder& e) { return !why_not(e, step).empty(); };
  if (!step.totals().empty() && !has_sums(step) && std::ranges::any_of(step.encoders, beyond))
    return split_after_totals(step);
  if (std::string why = RowProgram::refusal(step); !why.empty())
    return Refusal{std::move(why), step.is_map() || step.gemm()};
  return kernel_of(step.name, std::make_unique<RowProgram>(step));
}

}  // namespace tenon::cuda
