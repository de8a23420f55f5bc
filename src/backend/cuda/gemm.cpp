// Products on tensor cores: accepted steps, tensor maps of the operands, and the choice of the
// tile.
#include "backend/cuda/gemm.h"

#include <algorithm>

#include "backend/cuda/driver.h"
#include "backend/cuda/eight.h"
#include "backend/cuda/lt_form.h"
#include "backend/cuda/plain.h"
#include "backend/cuda/skeletons.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr const char* kEntry = "tenon_gemm_kernel";
constexpr const char* kClear = "tenon_gemm_clear";
constexpr const char* kSum = "tenon_gemm_sums";
constexpr size_t kMostSums = 2, kMostTurned = 2;
constexpr int64_t kBoxLanes = 64;  // elements of 2 bytes
constexpr int64_t kOrder = 32;     // columns that a tensor map permutes
constexpr int64_t kBlock = 128;    // elements of a block with a scale
constexpr size_t kMapAlignment = kTenonMapAlignment;
constexpr uintptr_t kVector = 16;  // required alignment of a tensor copy, in bytes

int64_t element(const Step& step) { return info(step.gemm()->a.format.dtype).bytes; }
// Elements of a step along the inner dimension.
int64_t step_of(const Step& step) { return kTenonStepBytes / element(step); }
unsigned groups(const GemmTile& t) { return t.promoted ? 3 : 2; }
int64_t group_rows(const GemmTile& t) { return t.promoted ? 64 : t.rows; }
unsigned threads(const GemmTile& t) { return 128 * (groups(t) + 1); }

// The scales of an operand: none, one, or those of blocks.
enum class Scales : uint8_t { none, one, of_1x128, of_128x128, other };
Scales scales_of(const Matrix& m) {
  switch (m.format.scaling) {
    case Scaling::none:
      return Scales::none;
    case Scaling::block1x128:
      return Scales::of_1x128;
    case Scaling::block128x128:
      return Scales::of_128x128;
    default:
      return m.format.blocks(m.orientation).single() ? Scales::one : Scales::other;
  }
}
bool blocks(const Step& step) { return scales_of(step.gemm()->a) == Scales::of_1x128; }
bool scaled(const Step& step) {
  return scales_of(step.gemm()->a) == Scales::one || scales_of(step.gemm()->b) == Scales::one;
}

// The columns of the product that an element reads, without duplicates.
std::vector<ColumnMap> products_of(const Step& step) {
  std::vector<ColumnMap> all;
  for (const Load& l : step.loads)
    if (l.from == Load::From::product && std::ranges::find(all, l.columns) == all.end())
      all.push_back(l.columns);
  return all;
}

// Shared memory: space for the alignment, stages with their scales and barriers, the column sums
// and the transposed codes of all groups.
struct Shared {
  int64_t stages, bytes;
};
Shared shared_of(const Step& step, const GemmTile& tile) {
  constexpr int64_t kMost = 227 * 1024, kAlignment = 1024;  // of a block on sm_90
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  const auto products = static_cast<int64_t>(products_of(step).size());
  const auto sums = static_cast<int64_t>(stores_to(step, Store::To::column_sum).size());
  const auto turned = static_cast<int64_t>(turned_stores(step).size());
  const bool own = scales_of(step.gemm()->b) == Scales::of_1x128;  // each column of b
  const int64_t scales = blocks(step) ? (tile.rows + (own ? tile.cols : 0)) * kFloat : 0;
  const int64_t stage = (tile.rows + tile.cols) * kTenonStepBytes + scales + 16;
  const int64_t group = sums * group_rows(tile) / 8 * (tile.cols / products) * kFloat +
                        2 * turned * kTenonTurned * group_rows(tile);
  const int64_t other = kAlignment + int64_t{groups(tile)} * group + (turned > 0 ? 16 : 0);
  const int64_t stages = (kMost - other) / stage;
  return {stages, other + stages * stage};
}

// Whether the columns are equally spaced.
bool even(const ColumnMap& m) { return m.contiguous() || m.block == 1; }

// Whether rows of a, or columns of b, are contiguous. Otherwise the inner dimension is.
bool lanes_a(const Step& step) { return lies_turned(step.gemm()->a); }
bool lanes_b(const Step& step) { return !lies_turned(step.gemm()->b); }

// Whether the copies of b give each thread eight adjacent columns.
bool ordered(const Step& step) {
  return !lanes_b(step) && step.cols % kOrder == 0 && std::ranges::all_of(products_of(step), even);
}

// The wgmma instruction for 64 rows, with all its registers. FP8 operands cannot be transposed.
std::string multiply_text(const Step& step, int64_t width) {
  const int64_t registers = width / 2;
  std::string places, values;
  for (int64_t i = 0; i < registers; ++i) {
    const char* const comma = i ? ", " : "";
    places += str(comma, "%", i);
    values += str(comma, "\"+f\"(d[", i, "])");
  }
  const auto type = [](const Matrix& m) { return info(m.format.dtype).name; };
  const Gemm& g = *step.gemm();
  const std::string turns =
      element(step) == 2 ? str(", ", int{lanes_a(step)}, ", ", int{lanes_b(step)}) : "";
  return str("  __device__ static void multiply(float (&d)[", registers,
             "], TenonU64 a, TenonU64 b, TenonU32 adds) {\n    asm volatile(\"{.reg .pred p; "
             "setp.ne.b32 p, %",
             registers + 2, ", 0; wgmma.mma_async.sync.aligned.m64n", width, "k", step_of(step) / 4,
             ".f32.", type(g.a), ".", type(g.b), " {", places, "}, %", registers, ", %",
             registers + 1, ", p, 1, 1", turns, ";}\"\n        : ", values,
             "\n        : \"l\"(a), \"l\"(b), \"r\"(adds));\n  }\n");
}

bool draws(const Step& step) {
  return std::ranges::any_of(step.loads,
                             [](const Load& l) { return l.from == Load::From::random; });
}

// Loads of the body. Vectors are loaded in two steps, so that the next loads overlap with compute.
struct LoadText {
  std::string raw, fetch, raw_row, fetch_row, unpack, ahead;
};
LoadText load_text(const Step& step) {
  constexpr int64_t kLineBytes = 128;
  const std::vector<ColumnMap> products = products_of(step);
  LoadText t;
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    const int64_t bytes = info(l.dtype).bytes;
    const std::string at = str("at[", i, "]");
    if (l.from == Load::From::product) {
      const auto p = std::ranges::find(products, l.columns) - products.begin();
      t.unpack += str("for (int e = 0; e < 8; ++e) in[", i, "][e] = product[", p, "][e];\n");
    } else if (l.from == Load::From::tile) {
      t.raw += str("    TenonRaw<", bytes, "> r", i, ";\n");
      t.fetch += str("raw.r", i, ".load(", below_eight(l.columns, bytes, at, "0"), ");\n");
      t.unpack += load_eight(step, i, str("raw.r", i));
      if (l.columns.contiguous())
        t.ahead +=
            str("for (TenonU32 c = column; c < column + kWidth / kProducts && c < a.cols; c += ",
                kLineBytes / bytes, ")\n  tenon_ahead(tenon_below8<", bytes, ">(a.", at,
                ", row, c, 0));\n");
    } else if (l.from == Load::From::row) {
      t.raw_row += str("    TenonRaw<", bytes, "> r", i, ";\n");
      t.fetch_row += str("raw.r", i, ".load(", at, ".data + ", element_eight("row", l.columns, at),
                         " * ", bytes, ");\n");
      t.unpack += load_eight(step, i, str("raw_row.r", i));
    } else {
      t.unpack += load_eight(step, i);
    }
  }
  if (!t.ahead.empty()) t.ahead = str("if (row >= a.rows) return;\n", t.ahead);
  return t;
}

// Units whose loads are in flight. In tiles of all groups nothing else hides their latency, and the
// registers of the promoted sums are free. Column sums and random numbers take them.
int64_t depth(const Step& step, const GemmTile& tile, int64_t rows) {
  if (!tile.promoted || draws(step) || !stores_to(step, Store::To::column_sum).empty()) return 1;
  constexpr int64_t kRegisters = 32;
  int64_t bytes = rows * held_bytes(step);
  for (const Load& l : step.loads)
    if (l.from == Load::From::row) bytes += info(l.dtype).bytes;
  const int64_t part = tile.cols / static_cast<int64_t>(products_of(step).size());
  const int64_t units = part / 32 * 2 / rows;
  return bytes == 0 ? 1 : std::clamp<int64_t>(kRegisters / (2 * bytes), 1, units);
}

constexpr int kTensorMaps = 12000;  // the first driver that encodes them

std::string body_refusal(const Step& step) {
  for (const Load& l : step.loads)
    if (l.from == Load::From::block || l.from == Load::From::total || l.transposed)
      return str("its body does not read ", l.transposed                  ? "transposed tensors"
                                            : l.from == Load::From::block ? "scales of blocks"
                                                                          : "totals of rows");
  for (const Store& s : step.stores) {
    if (s.to != Store::To::tile && s.to != Store::To::amax && s.to != Store::To::encoded &&
        s.to != Store::To::column_sum)
      return str("its body has no ", kStoreNames[static_cast<size_t>(s.to)]);
    if (s.ordered) return "its body adds rows as a tree only";
  }
  if (stores_to(step, Store::To::column_sum).size() > kMostSums)
    return "too many sums for one tile";
  if (turned_stores(step).size() > kMostTurned) return "too many columnwise results for one tile";
  for (const Encoder& e : step.encoders) {
    if (e.columnwise && info(e.format.dtype).bytes != 1)
      return "its body turns codes of one byte only";
    if (!e.format.blocks(Orientation::rowwise).single())
      return "its body finds no scales of blocks";
    if (e.counts) return "its body counts nothing";
  }
  if (step.stores.empty()) return "there is nothing to store";
  if (argument_bytes(step, sizeof(TenonGemmHead)) + kMapAlignment > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

bool is_fp8(const Matrix& m) {
  return m.format.dtype == DType::e4m3 || m.format.dtype == DType::e5m2;
}

std::string operand_refusal(const Step& step, const GemmTile& tile) {
  const Gemm& g = *step.gemm();
  const DType type = g.a.format.dtype;
  const Scales a = scales_of(g.a), b = scales_of(g.b);
  const bool words = (type == DType::bf16 || type == DType::f16) && g.b.format.dtype == type &&
                     a == Scales::none && b == Scales::none;
  const auto single = [](Scales s) { return s == Scales::none || s == Scales::one; };
  const bool codes =
      is_fp8(g.a) && is_fp8(g.b) &&
      ((single(a) && single(b)) || (a == Scales::of_1x128 && (b == a || b == Scales::of_128x128)));
  if (!words && !codes)
    return str(
        "the matrices are ", info(type).name, " ", info(g.a.format.scaling).name, " and ",
        info(g.b.format.dtype).name, " ", info(g.b.format.scaling).name,
        "; the gemm takes two of bf16, two of f16, and FP8 with one scale each or 1x128 by 1x128 "
        "or 128x128");
  if (codes && (lanes_a(step) || lanes_b(step)))
    return "its FP8 products need the inner dimension of both contiguous";
  const bool promotes = codes && (blocks(step) || !g.fast);
  if (promotes != tile.promoted)
    return promotes ? "precise FP8 sums are promoted" : "these sums need no promotion";
  return "";
}

}  // namespace

std::string GemmProgram::refusal(const Step& step, const GemmTile& tile) {
  if (!step.gemm()) return str("the gemm has no ", step.head_name(), " head");
  if (step.precision == Precision::strict) return "strict fixes the order of a product's additions";
  if (std::string why = operand_refusal(step, tile); !why.empty()) return why;
  if (std::string why = body_refusal(step); !why.empty()) return why;
  if (step.cols % kEight != 0) return str(step.cols, " columns are no whole vectors of ", kEight);
  if (tile == kWide && draws(step))
    return "a body that draws random numbers needs the registers that a wide tile takes";
  if (tile == kWide && stores_to(step, Store::To::column_sum).size() > 1)
    return "two column sums need the registers that a wide tile takes";
  if (tile == kWide && turned_stores(step).size() > 1)
    return "two columnwise results need the registers that a wide tile takes";
  if (tile == kWide && scaled(step) && held_bytes(step) > 2)
    return "scales and two tensors need the registers that a wide tile takes";
  if (scales_of(step.gemm()->b) == Scales::of_1x128 &&
      !stores_to(step, Store::To::column_sum).empty())
    return "column sums need the registers that scales of 1x128 by 1x128 take";
  const std::vector<ColumnMap> products = products_of(step);
  if (products.empty() || products.size() > 2)
    return str("the body reads ", products.size(), " columns of the product; the gemm has 1 or 2");
  const int64_t part = tile.cols / static_cast<int64_t>(products.size());
  if (blocks(step))
    for (const ColumnMap& m : products) {
      if (!m.contiguous()) return "with scales of blocks, columns of b that it reads are adjacent";
      if (m.offset % part != 0)
        return str("half of ", step.cols, " columns does not begin with a block of scales");
    }
  if (products.size() == 1)
    return products[0].contiguous() ? "" : "the body reads only some columns of the product";
  if (lanes_b(step)) return "a gated body wants the inner dimension of b contiguous";
  const int64_t block = products[0].block;
  if (products[1].block != block || products[1].stride != products[0].stride)
    return "the halves of the product have different layouts";
  if (!even(products[0]) && part % block != 0 && block % part != 0)
    return str("halves in blocks of ", block, " columns do not fill tiles of ", part);
  return "";
}

GemmProgram::GemmProgram(const Step& step, const GemmTile& tile, int64_t multiprocessors,
                         bool library)
    : step_(step), tile_(tile), multiprocessors_(multiprocessors), library_(library) {
  entries_ = {kEntry};
  const EightLines formula = eight_lines(step, sizeof(TenonGemmHead) + kMapAlignment);
  singles_ = formula.singles;
  const LoadText load = load_text(step);
  // The accumulators of a wide tile leave registers for one row only.
  const int rows = tile == kWide || (tile.promoted && held_bytes(step) > 0) ? 1 : 2;
  const bool unrolled = formula.length() < kManyLines && !draws(step);
  std::string scalings;
  for (size_t e = 0; e < step.encoders.size(); ++e) scalings += scaling_text(step, e);
  const size_t loads = step.loads.size() + formula.singles.count();
  const size_t places = std::max<size_t>(1, step.encoders.size() * kEncoderPlaces);
  const std::vector<size_t> sums = stores_to(step, Store::To::column_sum);
  std::string sum_lines;
  for (size_t i = 0; i < sums.size(); ++i) sum_lines += str("to(", i, ", out[", sums[i], "]);\n");
  text_ = str(
      gemm_skeletons(), scalings, "using Arguments = TenonGemmArguments<",
      loads + step.stores.size(), ", ", places,
      ">;\nstruct Body {\n  static constexpr int kLoads = ", loads,
      ", kStores = ", step.stores.size(), ", kAmax = ", stores_to(step, Store::To::amax).size(),
      ", kEncoders = ", step.encoders.size(), ", kWidth = ", tile.cols,
      ", kProducts = ", products_of(step).size(), ", kRows = ", rows,
      ", kDepth = ", depth(step, tile, rows), ", kStages = ", shared_of(step, tile).stages,
      ", kStep = ", step_of(step), ", kSums = ", sums.size(), ", kStrip = ", partial_strip(step),
      ", kTurned = ", turned_stores(step).size(),
      ", kBlocksB = ", scales_of(step.gemm()->b) == Scales::of_128x128 ? kBlock : 1,
      ";\n  static constexpr bool kLanesA = ", flag(lanes_a(step)),
      ", kLanesB = ", flag(lanes_b(step)), ", kOrdered = ", flag(ordered(step)),
      ", kPromoted = ", flag(tile.promoted), ", kScaled = ", flag(scaled(step)),
      ", kBlocks = ", flag(blocks(step)), ", kUnrolled = ", flag(unrolled), ";\n",
      "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)\n", multiply_text(step, tile.cols), "#endif\n",
      "  struct Raw {\n", load.raw,
      "  };\n  __device__ static void ahead(const Arguments& a, TenonU32 row, TenonU32 column) {\n",
      indented(load.ahead),
      "  }\n  __device__ static void fetch(const TenonAccess* at, TenonU32 row, TenonU32 column, "
      "Raw& raw) {\n",
      indented(load.fetch), "  }\n  struct RawRow {\n", load.raw_row,
      "  };\n  __device__ static void fetch_row(const TenonAccess* at, TenonU32 row, TenonU32 "
      "column, RawRow& raw) {\n",
      indented(load.fetch_row),
      "  }\n  __device__ static void unpack(const TenonAccess* at, const TenonU64* random, "
      "TenonU32 "
      "row, TenonU32 column, const Raw& raw, const RawRow& raw_row, const float "
      "(&product)[kProducts][8], float (*in)[8]) "
      "{\n",
      indented(load.unpack + single_lines(step, formula.singles) + formula.ready),
      "  }\n  __device__ static void compute(const float* in, float* out) {\n",
      indented(formula.lines),
      "  }\n  template <class Turn>\n  __device__ static void store(const Arguments& a, TenonU32 "
      "row, "
      "TenonU32 column, const float (&out)[kStores][8], const float* multiplier, TenonU32* most, "
      "const Turn& turn) {\n",
      indented(store_eight(step)),
      "  }\n  __device__ static TenonU8* turned(const Arguments& a, int plane, TenonU32 column) "
      "{\n",
      indented(turned_lines(step)),
      "  }\n  template <class To>\n  __device__ static void sum(const float (&out)[kStores][8], "
      "const To& to) {\n",
      indented(sum_lines),
      "  }\n  __device__ static void start(const Arguments& a, TenonU32* before, float* "
      "multiplier) {\n",
      indented(start_lines(step) + multiplier_lines(step)),
      "  }\n  __device__ static void finish(const Arguments& a, const TenonU32* most, const "
      "TenonU32* before) {\n",
      indented(finish_lines(step, true)), "  }\n};\nextern \"C\" __launch_bounds__(", threads(tile),
      ", 1) __global__ void ", kEntry,
      "(const __grid_constant__ Arguments a) {\n  tenon_gemm<Body>(a);\n}\n");
  const auto kernel = [&](const char* entry, const char* bounds, const std::string& lines) {
    entries_.emplace_back(entry);
    text_ += str("extern \"C\" ", bounds, "__global__ void ", entry,
                 "(const __grid_constant__ Arguments a) {\n", indented(lines), "}\n");
  };
  if (!sums.empty())
    kernel(kSum, "__launch_bounds__(1024) ", partial_lines(step, group_rows(tile)));
  if (const std::string clear = clear_lines(step); !clear.empty()) kernel(kClear, "", clear);
}

size_t GemmProgram::workspace(int64_t rows) const {
  return partial_bytes(step_, step_.body_rows(rows), group_rows(tile_));
}

RunArgs GemmProgram::of_body(const RunArgs& args) const {
  RunArgs body = args;
  body.rows = step_.body_rows(args.rows);
  return body;
}

int64_t GemmProgram::inner(const RunArgs& args) const { return step_.gemm()->inner_for(args.rows); }

int64_t GemmProgram::cost(int64_t rows, const GemmTile& tile) const {
  const int64_t part = tile.cols / static_cast<int64_t>(products_of(step_).size());
  return cdiv(cdiv(rows, tile.rows) * cdiv(step_.cols, part), multiprocessors_) * tile.cols;
}

bool GemmProgram::suits(const RunArgs& args) const {
  constexpr int64_t kMost = INT32_MAX;
  const RunArgs body = of_body(args);
  if (body.rows <= 0 || step_.cols == 0 || inner(args) <= 0 || inner(args) > kMost) return false;
  if (!suits_eights(step_, singles_, body)) return false;
  for (const TensorBox& b : boxes(args)) {
    if (reinterpret_cast<uintptr_t>(b.data) % kVector != 0) return false;
    for (unsigned i = 0; i + 1 < b.rank; ++i)
      if (b.strides[i] % kVector != 0 || b.strides[i] >> 40 != 0) return false;
  }
  const auto whole = [](const View& v) {
    return reinterpret_cast<uintptr_t>(v.data) % kVector == 0 &&
           v.stride * info(v.dtype).bytes % static_cast<int64_t>(kVector) == 0 && v.stride <= kMost;
  };
  for (const Matrix* m : {&step_.gemm()->a, &step_.gemm()->b})
    if (blocks(step_) && !whole(args.in[m->arg + 1])) return false;
  for (const Encoder& e : step_.encoders)
    if (e.columnwise && !whole(args.out[e.data(Orientation::columnwise)])) return false;
  return cdiv(body.rows, tile_.rows) * cdiv(step_.cols, kNarrow.cols / 2) <= kMost;
}

// With few rows or few tiles, cuBLASLt splits the work better.
int64_t GemmProgram::least_body_rows() const {
  // Promoted sums were measured with three rows of tiles and more.
  const int64_t few_rows = tile_.promoted ? 2 * tile_.rows + 1 : 128;
  const int64_t part = kNarrow.cols / static_cast<int64_t>(products_of(step_).size());
  const int64_t down = cdiv(multiprocessors_, 2 * cdiv(step_.cols, part));  // least rows of tiles
  return std::max(few_rows, (down - 1) * tile_.rows + 1);
}

// If the step fixes its rows, they do not depend on the call.
int64_t GemmProgram::least_rows() const { return library_ && !step_.rows ? least_body_rows() : 0; }

bool GemmProgram::fits(const RunArgs& args) const {
  if (!suits(args)) return false;
  const int64_t rows = of_body(args).rows;
  if (library_ && (inner(args) > kLong || rows < least_body_rows())) return false;
  // Measured: a wide tile is 4.5 % faster for equal work, because it reads its operands less often.
  return tile_ != kWide || 1000 * cost(rows, kWide) <= 1045 * cost(rows, kNarrow);
}

std::vector<TensorBox> GemmProgram::boxes(const RunArgs& args) const {
  const Gemm& g = *step_.gemm();
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  const int64_t each = element(step_), step = step_of(step_);
  const auto bytes = [&](int64_t elements) { return static_cast<uint64_t>(elements * each); };
  const auto box_of = [&](const Matrix& m, int64_t width) {
    TensorBox b;
    b.data = args.in[m.arg].data;
    b.dtype = m.format.dtype;
    return std::pair{b, std::max(args.in[m.arg].stride, width)};
  };
  const int64_t rows = of_body(args).rows, k = inner(args);
  std::vector<TensorBox> all;
  auto [a, a_stride] = box_of(g.a, lanes_a(step_) ? rows : k);
  a.rank = 2;
  a.strides = {bytes(a_stride)};
  if (lanes_a(step_)) {
    a.sizes = {size(rows), size(k)};
    a.box = {kBoxLanes, static_cast<unsigned>(step)};
  } else {
    a.sizes = {size(k), size(rows)};
    a.box = {static_cast<unsigned>(step), static_cast<unsigned>(tile_.rows)};
  }
  all.push_back(a);
  const std::vector<ColumnMap> products = products_of(step_);
  const int64_t part = tile_.cols / static_cast<int64_t>(products.size());
  for (const ColumnMap& m : products) {
    auto [b, stride] = box_of(g.b, lanes_b(step_) ? g.cols : k);
    b.data = static_cast<std::byte*>(b.data) + m.offset * each * (lanes_b(step_) ? 1 : stride);
    const int64_t pitch = m.contiguous() ? stride : stride * m.stride;
    if (lanes_b(step_)) {
      b.rank = 2;
      b.sizes = {size(step_.cols), size(k)};
      b.strides = {bytes(stride)};
      b.box = {kBoxLanes, static_cast<unsigned>(step)};
    } else if (ordered(step_)) {
      // Lane 2t + 8j + e of a product is column 8t + 2j + e. Thread t of four has e = 0, 1 of every
      // j, so it has eight adjacent columns.
      b.rank = 5;
      b.sizes = {size(k), 2, 4, 4, size(step_.cols / kOrder)};
      b.strides = {bytes(pitch), bytes(8 * pitch), bytes(2 * pitch), bytes(kOrder * pitch)};
      b.box = {static_cast<unsigned>(step), 2, 4, 4, static_cast<unsigned>(part / kOrder)};
    } else {
      const int64_t block = even(m) ? step_.cols : m.block;
      b.rank = 3;
      b.sizes = {size(k), size(block), size(step_.cols / block)};
      b.strides = {bytes(even(m) ? pitch : stride),
                   bytes(even(m) ? pitch * step_.cols : stride * m.stride)};
      b.box = {static_cast<unsigned>(step),
               static_cast<unsigned>(even(m) ? part : std::min(block, part)),
               static_cast<unsigned>(even(m) ? 1 : std::max<int64_t>(1, part / block))};
    }
    all.push_back(b);
  }
  return all;
}

namespace {

// Constants of cuda.h.
constexpr int kUInt8 = 0, kReal16F = 6, kReal16BF = 9, kSwizzle128 = 3, kPromote128 = 2;

TenonTensorMap encoded(const TensorBox& b) {
  alignas(kMapAlignment) TenonTensorMap map;
  constexpr std::array<unsigned, 5> kOnes{1, 1, 1, 1, 1};
  const int type = b.dtype == DType::f16 ? kReal16F : b.dtype == DType::bf16 ? kReal16BF : kUInt8;
  check(driver().tensor_map_encode(&map, type, b.rank, b.data, b.sizes.data(), b.strides.data(),
                                   b.box.data(), kOnes.data(), 0, kSwizzle128, kPromote128, 0),
        "describing an operand");
  return map;
}

}  // namespace

std::vector<Launch> GemmProgram::launches(const RunArgs& args) const {
  std::vector<TenonTensorMap> maps;
  for (const TensorBox& b : boxes(args)) maps.push_back(encoded(b));
  return launches(args, maps);
}

std::vector<Launch> GemmProgram::launches(const RunArgs& args,
                                          std::span<const TenonTensorMap> maps) const {
  const RunArgs body = of_body(args);
  const std::vector<ColumnMap> products = products_of(step_);
  const int64_t part = tile_.cols / static_cast<int64_t>(products.size());
  TenonGemmHead head;
  std::ranges::copy(maps, head.map);
  head.rows = static_cast<uint32_t>(body.rows);
  head.cols = static_cast<uint32_t>(step_.cols);
  head.steps = static_cast<uint32_t>(cdiv(inner(args), step_of(step_)));
  head.down = static_cast<uint32_t>(cdiv(body.rows, tile_.rows));
  head.across = static_cast<uint32_t>(cdiv(step_.cols, part));
  head.block = static_cast<uint32_t>(even(products[0]) ? step_.cols : products[0].block);
  head.random = random_state(args);
  head.partial = static_cast<float*>(args.workspace);
  const auto scales = [&](const Matrix& m, const float*& data, uint32_t& pitch) {
    if (scales_of(m) == Scales::none) return;
    data = static_cast<const float*>(args.in[m.arg + 1].data);
    pitch = static_cast<uint32_t>(args.in[m.arg + 1].stride);
  };
  scales(step_.gemm()->a, head.scale_a, head.pitch_a);
  scales(step_.gemm()->b, head.scale_b, head.pitch_b);
  for (size_t p = 0; p < products.size(); ++p)
    head.start[p] = static_cast<uint32_t>(products[p].offset);
  const Accesses at = accesses_of(step_, singles_, body);
  Places places;
  for (const Encoder& e : step_.encoders)
    for (const TenonPlace& p : encoder_places(e, args)) places.push_back(p);
  std::vector<Launch> list;
  const auto launch = [&](const char* entry, int64_t blocks, unsigned threads) -> Launch& {
    Launch& l = list.emplace_back(launch_of(number(entry), blocks, threads, head, at, places));
    // Pads the struct to its alignment on the device.
    static constexpr std::array<std::byte, kMapAlignment> kNothing{};
    if (const size_t beyond = l.arguments.size() % kMapAlignment)
      l.arguments.append(std::span(kNothing).first(kMapAlignment - beyond));
    return l;
  };
  if (entries_.back() == kClear) launch(kClear, 1, 1);
  Launch& product = launch(kEntry, int64_t{head.down} * head.across, threads(tile_));
  product.per_multiprocessor = 1;
  product.shared = product.least_shared = static_cast<unsigned>(shared_of(step_, tile_).bytes);
  if (const int64_t blocks = partial_blocks(step_); blocks > 0)
    launch(kSum, blocks, partial_threads(step_, body.rows, group_rows(tile_), multiprocessors_));
  return list;
}

namespace {

// Why the target does not run it. Empty if it does.
std::string target_refusal(const Target& target) {
  if (target.sm != 90 || !target.sm_features)
    return str("the gemm is for sm_90a, and the target is ", target.name);
  if (target.driver < kTensorMaps)
    return "the driver has no cuTensorMapEncodeTiled; install one for CUDA 12 or newer";
  return "";
}

// The kernel, unless cuBLASLt is faster.
Attempt program(const Step& step, const Target& target, const GemmTile& tile, bool library) {
  if (library && step.gemm()->inner > GemmProgram::kLong)
    return Refusal{
        str("with sums of ", step.gemm()->inner, " terms cuBLASLt and a map are faster")};
  auto made = std::make_unique<GemmProgram>(step, tile, target.processors, library);
  if (library && step.rows && step.rows < made->least_body_rows())
    return Refusal{str(step.rows, " rows are too few tiles; cuBLASLt is faster")};
  return kernel_of(step.name, std::move(made));
}

// A refusal that holds for both widths has the same reason in both.
Attempt make(const Step& step, const Target& target, const GemmTile& tile) {
  const std::string narrow = GemmProgram::refusal(step, GemmProgram::kNarrow);
  if (!step.gemm()) return Refusal{narrow, true};
  const std::string wide = GemmProgram::refusal(step, GemmProgram::kWide);
  // The maker of promoted sums tells its own reasons.
  if (!narrow.empty())
    return Refusal{narrow, operand_refusal(step, GemmProgram::kPromoted).empty()};
  if (std::string why = target_refusal(target); !why.empty()) return Refusal{std::move(why)};
  const bool library = multiplies(step, target);
  // Measured on an H200: these steps are as fast or faster with cuBLASLt. If cuBLASLt does the
  // whole step, our product is faster only with contiguous inner dimensions and the wide tile.
  const bool whole = library && LtForm(step).is_whole();
  if (whole && (lanes_a(step) || lanes_b(step) || !wide.empty()))
    return Refusal{"cuBLASLt does the whole step in one product"};
  if (library && draws(step))
    return Refusal{"a body that draws random numbers is faster as a map after cuBLASLt's product"};
  // The maker of the other width accepts the step.
  if (tile == GemmProgram::kWide && !wide.empty()) return Refusal{wide, true};
  if (tile == GemmProgram::kNarrow && whole)
    return Refusal{"cuBLASLt is faster than narrow tiles", true};
  return program(step, target, tile, library);
}

}  // namespace

Attempt make_wide_gemm(const Step& step, const Target& target) {
  return make(step, target, GemmProgram::kWide);
}
Attempt make_gemm(const Step& step, const Target& target) {
  return make(step, target, GemmProgram::kNarrow);
}
Attempt make_promoted_gemm(const Step& step, const Target& target) {
  std::string why = GemmProgram::refusal(step, GemmProgram::kPromoted);
  // The other makers of this name tell the reasons of other operands.
  const bool other = !step.gemm() || !operand_refusal(step, GemmProgram::kPromoted).empty();
  if (!why.empty()) return Refusal{std::move(why), other};
  why = target_refusal(target);
  if (!why.empty()) return Refusal{std::move(why)};
  const bool library = multiplies(step, target);
  if (library && LtForm(step).is_whole())
    return Refusal{"cuBLASLt does the whole step in one product"};
  // Measured on an H200: the body is not hidden by products of another group.
  if (library && (draws(step) || turned_stores(step).size() > 1))
    return Refusal{
        draws(step) ? "a body that draws random numbers is faster as a map after cuBLASLt's product"
                    : "two columnwise results are faster as a map after cuBLASLt's product"};
  return program(step, target, GemmProgram::kPromoted, library);
}

}  // namespace tenon::cuda
