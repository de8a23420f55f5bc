// Prints the lines of kernels that process eight elements per thread.
#include "backend/cuda/eight.h"

#include <algorithm>
#include <bit>

#include "tenon/error.h"

namespace tenon::cuda {

namespace {

std::vector<Loaded> loaded(const Step& step) {
  std::vector<Loaded> all;
  for (const Load& l : step.loads) {
    const bool vector = l.from == Load::From::tile || l.from == Load::From::row;
    all.push_back(l.from == Load::From::parameter    ? Loaded::single
                  : vector && l.dtype == DType::bf16 ? Loaded::pairs
                                                     : Loaded::otherwise);
  }
  return all;
}

// The total width of all partial sums.
int64_t partial_width(const Step& step) {
  return static_cast<int64_t>(stores_to(step, Store::To::column_sum).size()) * step.cols;
}
}  // namespace

std::string element_eight(std::string_view kind, const ColumnMap& columns, const std::string& at) {
  return str("tenon_", kind, columns.contiguous() ? "8(" : "8_blocks(", at, ", row, column)");
}

std::string load_eight(const Step& step, size_t i, const std::string& raw) {
  const Load& l = step.loads[i];
  const std::string_view kind = kLoadNames[static_cast<size_t>(l.from)];
  const std::string at = str("at[", i, "]");
  const std::string to = str("in[", i, "]);\n");
  switch (l.from) {
    case Load::From::parameter:
      return str("tenon_spread8(at[", i, "].value, ", to);
    case Load::From::random:
      return str("tenon_random8(random, row, column, ", l.arg, ", ", to);
    case Load::From::block:
      return str("tenon_block8<", format(l.dtype), ", ", block_arguments(l), ", ",
                 flag(l.columns.contiguous()), ">(", at, ", row, column, ", to);
    case Load::From::column:
    case Load::From::scalar:
      return str("tenon_spread8(tenon_load<", format(l.dtype), ">(", at, ", tenon_", kind, "(", at,
                 ", row, column)), ", to);
    default:
      if (l.transposed)
        return str("tenon_turned8<", format(l.dtype), ">(", at, ", row, column, ", to);
      if (!raw.empty()) return str("tenon_unpack8<", format(l.dtype), ">(", raw, ", ", to);
      return str("tenon_load8<", format(l.dtype), ">(", at, ", ",
                 element_eight(kind, l.columns, at), ", ", to);
  }
}

std::string amax_eight(size_t k, size_t slot) {
  return str("for (int e = 0; e < 8; ++e)\n  most[", slot,
             "] = __float_as_uint(tenon_max(tenon_bits(most[", slot, "]), tenon_abs(out[", k,
             "][e])));\n");
}

std::string scale_eight(size_t k, uint32_t number) {
  return str("const float multiplier = tenon_tensor_scale<Scaling", number,
             ">(a).multiplier;\nfloat scaled[8];\nfor (int e = 0; e < 8; ++e) scaled[e] = out[", k,
             "][e] * multiplier;\n");
}

std::string store_eight(const Step& step) {
  std::string text;
  size_t amaxes = 0, planes = 0;
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    const std::string to = str("a.at[kLoads + ", k, "]");
    const std::string store = str("tenon_store8<", format(s.dtype), ">(", to, ", ",
                                  element_eight("tile", s.columns, to), ", ");
    if (s.to == Store::To::tile)
      text += str(store, "out[", k, "]);\n");
    else if (s.to == Store::To::amax)
      text += amax_eight(k, amaxes++);
    else if (s.to == Store::To::encoded) {
      const Encoder& e = step.encoders[s.arg];
      text += str("{\nfloat scaled[8];\nfor (int e = 0; e < 8; ++e) scaled[e] = out[", k,
                  "][e] * multiplier[", s.arg, "];\n");
      if (!e.columnwise) {
        text += str(store, "scaled);\n}\n");
        continue;
      }
      text += str("const TenonWords2 codes = tenon_codes8<", format(s.dtype), ">(scaled);\n");
      if (e.rowwise)
        text += str("*reinterpret_cast<TenonWords2*>(", to, ".data + ",
                    element_eight("tile", s.columns, to), ") = codes;\n");
      text += str("turn(", planes++, ", codes);\n}\n");
    }
  }
  return text;
}

std::string multiplier_lines(const Step& step) {
  std::string text;
  for (size_t e = 0; e < step.encoders.size(); ++e)
    text += str("multiplier[", e, "] = tenon_tensor_scale<Scaling", e, ">(a).multiplier;\n");
  return text;
}

size_t argument_bytes(const Step& step, size_t head) {
  return head + (step.loads.size() + step.stores.size()) * sizeof(TenonAccess) +
         (step.encoders.size() * kEncoderPlaces + 1) * sizeof(TenonPlace);
}

EightLines eight_lines(const Step& step, size_t head) {
  if (step.effective_precision() != Precision::native)
    return {.ready = "", .lines = compute_lines(step)};
  const size_t bytes = argument_bytes(step, head);
  const size_t room = bytes > kArgumentBytes ? 0 : (kArgumentBytes - bytes) / sizeof(TenonAccess);
  return native_eight(*step.graph, step.roots(), step.native_error(), loaded(step), room);
}

std::string single_lines(const Step& step, const Singles& singles) {
  std::string text;
  for (size_t i = step.loads.size(); i < step.loads.size() + singles.count(); ++i)
    text += str("tenon_spread8(at[", i, "].value, in[", i, "]);\n");
  return text;
}

std::string below_eight(const ColumnMap& columns, int64_t bytes, const std::string& at,
                        const char* more) {
  return str("tenon_below8<", bytes, ">(", at, ", row, ",
             columns.contiguous() ? "column" : str("tenon_blocks8(", at, ", column)"), ", ", more,
             ")");
}

TenonTileHead tile_head(const Step& step, const RunArgs& args, int64_t tile_rows) {
  const auto tiles = [&](int64_t rows) {
    return static_cast<uint32_t>(rows / tile_rows * tile_rows);
  };
  return {.rows = args.rows,
          .cols = step.cols,
          .random = random_state(args),
          .partial = static_cast<float*>(args.workspace),
          .last = tiles(args.rows - 1),
          .whole = tiles(args.rows)};
}

std::vector<Launch> launches_of_tiles(size_t entry, int64_t across, int64_t down, int64_t tile_rows,
                                      unsigned threads, TenonTileHead head,
                                      std::span<const TenonAccess> at,
                                      std::span<const TenonPlace> places) {
  constexpr int64_t kMostDown = 65535;
  const int64_t each = cdiv(down, cdiv(down, kMostDown));  // balances the launches
  std::vector<Launch> list;
  for (; down > 0; down -= each) {
    list.push_back(launch_of(entry, across, threads, head, at, places));
    list.back().down = static_cast<unsigned>(std::min(down, each));
    head.last -= static_cast<uint32_t>(each * tile_rows);
  }
  return list;
}

int64_t held_bytes(const Step& step) {
  int64_t bytes = 0;
  for (const Load& l : step.loads)
    if (l.from == Load::From::tile) bytes += info(l.dtype).bytes;
  return bytes;
}

int64_t partial_strip(const Step& step) {
  constexpr int64_t kFew = 128;
  return partial_width(step) < kLine * kFew ? 8 : kLine;
}

size_t partial_bytes(const Step& step, int64_t rows, int64_t tile_rows) {
  const int64_t strip_lines = cdiv(cdiv(rows, tile_rows), kLine / partial_strip(step));
  return static_cast<size_t>(partial_blocks(step) * strip_lines * kLine) * sizeof(float);
}

std::string partial_lines(const Step& step, int64_t tile_rows) {
  const int64_t strip = partial_strip(step);
  const std::vector<size_t> sums = stores_to(step, Store::To::column_sum);
  std::string text = str("const float sum = tenon_sum_partials<", tile_rows, ", ", sums.size(),
                         ", ", strip, ">(a);\nif (threadIdx.x >= ", strip,
                         ") return;\nconst TenonU32 cols = static_cast<TenonU32>(a.cols);\n",
                         "const TenonU32 column = blockIdx.x * ", strip, " + threadIdx.x;\n");
  for (size_t i = 0; i < sums.size(); ++i) {
    const std::string to = str("a.at[Body::kLoads + ", sums[i], "]");
    text += str("if (column / cols == ", i, ")\n  tenon_store<", format(step.stores[sums[i]].dtype),
                ">(", to, ", tenon_mapped(", to, ", column - ", i, " * cols), sum);\n");
  }
  return text;
}

unsigned partial_threads(const Step& step, int64_t rows, int64_t tile_rows,
                         int64_t multiprocessors) {
  const int64_t many = multiprocessors * 512;  // twice as many threads still run at once
  unsigned threads = 256;
  while (threads < 1024 && partial_blocks(step) * threads < many &&
         threads / partial_strip(step) * 16 < cdiv(rows, tile_rows))
    threads *= 2;
  return threads;
}

int64_t partial_blocks(const Step& step) { return cdiv(partial_width(step), partial_strip(step)); }

TileBody tile_body(const Step& step) {
  TileBody t;
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    if (l.from != Load::From::tile) {
      t.unpack += load_eight(step, i);
      continue;
    }
    t.raw += str("    TenonRaw<", info(l.dtype).bytes, "> r", i, ";\n");
    const std::string at = str("at[", i, "]");
    t.fetch += str("raw.r", i, ".load(", below_eight(l.columns, info(l.dtype).bytes, at), ");\n");
    t.unpack += load_eight(step, i, str("raw.r", i));
  }
  size_t amaxes = 0;
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    const std::string to = str("a.at[kLoads + ", k, "]");
    if (s.to == Store::To::tile)
      t.store += str("TenonEight<", format(s.dtype), ">::store(",
                     below_eight(s.columns, info(s.dtype).bytes, to), ", out[", k, "]);\n");
    else if (s.to == Store::To::amax)
      t.store += amax_eight(k, amaxes++);
  }
  return t;
}

std::string tile_members(const Step& step, const TileBody& t, const EightLines& formula,
                         const std::string& store_arguments) {
  const char* const where = "TenonU32 row, TenonU32 column";
  return str("  static constexpr int kLoads = ", step.loads.size() + formula.singles.count(),
             ", kStores = ", step.stores.size(),
             ", kAmax = ", stores_to(step, Store::To::amax).size(), ";\n  struct Raw {\n", t.raw,
             "  };\n  __device__ static void fetch(const TenonAccess* at, ", where,
             ", int more, Raw& raw) {\n", indented(t.fetch),
             "  }\n  __device__ static void unpack(const TenonAccess* at, const TenonU64* random, ",
             where, ", const Raw& raw, float (*in)[8]) {\n",
             indented(t.unpack + single_lines(step, formula.singles) + formula.ready),
             "  }\n  __device__ static void compute(const float* in, float* out) {\n",
             indented(formula.lines), "  }\n  __device__ static void store(const Arguments& a, ",
             where, ", int more, const float (&out)[kStores][8], ", store_arguments,
             "TenonU32* most) {\n", indented(t.store),
             "  }\n  __device__ static void start(const Arguments& a, TenonU32* before) {\n",
             indented(start_lines(step)),
             "  }\n  __device__ static void finish(const Arguments& a, const TenonU32* most, const "
             "TenonU32* before) {\n",
             indented(finish_lines(step, true)), "  }\n");
}

std::string start_lines(const Step& step) {
  std::string text;
  size_t slot = 0;
  for (const size_t k : stores_to(step, Store::To::amax))
    text += str("before[", slot++, "] = *reinterpret_cast<const TenonU32*>(a.at[kLoads + ", k,
                "].data);\n");
  return text;
}

std::string finish_lines(const Step& step, bool early) {
  std::string text;
  size_t slot = 0;
  for (const size_t k : stores_to(step, Store::To::amax)) {
    const std::string before = early ? str(", before[", slot, "]") : "";
    text += str(early ? "tenon_join_amax" : "tenon_join_late", "(a.at[kLoads + ", k,
                "].data, most[", slot++, "]", before, ");\n");
  }
  for (size_t e = 0; e < step.encoders.size(); ++e) {
    const Format& f = step.encoders[e].format;
    if (!info(f.scaling).reads_scale) continue;
    text += "if (blockIdx.x == 0 && threadIdx.x == 0) {\n";
    for (const size_t side : {Encoder::row_scale, Encoder::column_scale})
      text += str("if (a.place[", e * kEncoderPlaces + side, "].data)\n  tenon_put<4>(a.place[",
                  e * kEncoderPlaces + side, "].data, tenon_tensor_scale<Scaling", e,
                  ">(a).inverse);\n");
    text += "}\n";
  }
  return text;
}

std::string clear_lines(const Step& step) {
  std::string text;
  for (const size_t k : stores_to(step, Store::To::amax))
    if (!step.stores[k].join) text += str("tenon_put<4>(a.at[Body::kLoads + ", k, "].data, 0);\n");
  return text;
}

std::vector<size_t> stores_to(const Step& step, Store::To to) {
  std::vector<size_t> all;
  for (size_t k = 0; k < step.stores.size(); ++k)
    if (step.stores[k].to == to) all.push_back(k);
  return all;
}

std::vector<size_t> turned_stores(const Step& step) {
  std::vector<size_t> all;
  for (const size_t k : stores_to(step, Store::To::encoded))
    if (step.encoders[step.stores[k].arg].columnwise) all.push_back(k);
  return all;
}

std::string turned_lines(const Step& step) {
  std::string text;
  size_t plane = 0;
  for (const size_t k : turned_stores(step)) {
    const Store& s = step.stores[k];
    const std::string to = str("a.at[kLoads + ", k, "]");
    const std::string data = str("a.place[", s.arg * kEncoderPlaces + Encoder::column_data, "]");
    text += str("if (plane == ", plane++, ") return ", data, ".data + tenon_wide(",
                s.columns.contiguous() ? "column" : str("tenon_blocks8(", to, ", column)"),
                " + static_cast<TenonU32>(", to, ".offset), static_cast<TenonU32>(", data,
                ".stride));\n");
  }
  return text + "return nullptr;\n";
}

namespace {
// The values of all loads that are parameters. 0 for other loads.
Few<float, 12> single_loads(const Step& step, const RunArgs& args) {
  Few<float, 12> values;
  for (const Load& l : step.loads)
    values.push_back(l.from == Load::From::parameter ? args.parameters[l.arg] : 0);
  return values;
}
}  // namespace

Accesses accesses_of(const Step& step, const Singles& singles, const RunArgs& args) {
  Accesses all;
  const auto add = [&](TenonAccess a, DType dtype, bool vectors) {
    if (vectors) a.data += a.offset * info(dtype).bytes;
    all.push_back(a);
  };
  for (const Load& l : step.loads)
    add(load_access(l, args), l.dtype,
        (l.from == Load::From::tile && !l.transposed) || l.from == Load::From::row);
  if (singles.formulas)
    for (const float v : singles.values(single_loads(step, args))) all.push_back({.value = v});
  for (const Store& s : step.stores) {
    const bool encoded = s.to == Store::To::encoded;
    const uint32_t arg = encoded ? step.encoders[s.arg].data(Orientation::rowwise) : s.arg;
    add(access(args.out[arg], s.columns), s.dtype, encoded || s.to == Store::To::tile);
  }
  return all;
}

bool aligned(const TenonAccess& a, int64_t element_bytes, bool rows) {
  const int64_t bytes = std::min<int64_t>(16, kEight * element_bytes);
  const auto whole = [&](int64_t elements) { return elements * element_bytes % bytes == 0; };
  return reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(bytes) == 0 &&
         (!rows || whole(a.stride)) && whole(a.offset) &&
         (a.block == a.block_stride || (a.block % kEight == 0 && whole(a.block_stride)));
}

namespace {
// Whether eight adjacent elements have one scale, or scales in one vector. See tenon_block8.
bool suits_block8(const Load& l, const TenonAccess& a) {
  TenonAccess columns = a;
  columns.data = nullptr;
  if (!aligned(columns, 1, false)) return false;
  const bool vector = l.format.blocks(l.orientation).cols == 1 && !l.format.swizzled;
  return !vector || aligned(a, info(l.dtype).bytes, true);
}
}  // namespace

bool suits_eights(const Step& step, const Singles& singles, const RunArgs& args) {
  if (step.cols % kEight != 0) return false;
  if ((singles.formulas || !singles.positive.empty()) && !singles.fit(single_loads(step, args)))
    return false;
  const Accesses all = accesses_of(step, {}, args);
  // Row and column indices are 32-bit, with room for the last tile. So are strides in bytes.
  const auto small = [](int64_t n) { return 0 <= n && n <= INT32_MAX; };
  constexpr int64_t kMostBytes = 4;
  if (!small(args.rows) || !small(step.cols)) return false;
  for (const TenonAccess& a : all)
    if (!small(a.stride * kMostBytes) || !small(a.block_stride)) return false;
  const auto whole = [](const void* data, size_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  for (const Encoder& e : step.encoders) {
    if (!whole(encoder_places(e, args).back().data, sizeof(float))) return false;
    if (e.format.blocks(Orientation::rowwise).single()) continue;
    const auto scale = static_cast<size_t>(info(info(e.format.scaling).scale).bytes);
    for (const Orientation o : kOrientations)
      if (e.has(o) && !whole(args.out[e.scale_inv(o)].data, scale)) return false;
  }
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    const bool tile = l.from == Load::From::tile;
    const bool vector = (tile && !l.transposed) || l.from == Load::From::row;
    if (vector && !aligned(all[i], info(l.dtype).bytes, tile)) return false;
    if (l.from == Load::From::block && !suits_block8(l, all[i])) return false;
  }
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    const TenonAccess& a = all[step.loads.size() + k];
    bool fine = true;
    if (s.to == Store::To::amax)
      fine = reinterpret_cast<uintptr_t>(a.data) % sizeof(uint32_t) == 0;
    else if (s.to == Store::To::tile || s.to == Store::To::encoded)
      fine = aligned(a, info(s.dtype).bytes, true);
    if (!fine) return false;
  }
  return true;
}

}  // namespace tenon::cuda
