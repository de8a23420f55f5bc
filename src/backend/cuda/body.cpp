// Prints loads, formulas and stores.
#include "backend/cuda/body.h"

#include <algorithm>

#include "backend/cuda/native.h"
#include "core/scaling.h"
#include "expr/lower.h"
#include "expr/print.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

std::string element(std::string_view kind, size_t i) {
  return str("at[", i, "], tenon_", kind, "(at[", i, "], row, column)");
}

// The function of device/*.cuh that reads an element of the load.
std::string kind_of(const Load& l) {
  switch (l.from) {
    case Load::From::total:
      return "column";
    case Load::From::product:
      return "tile";
    case Load::From::tile:
      return l.transposed ? "tile_transposed" : "tile";
    case Load::From::block:
      return str("block<", block_arguments(l), ">");
    default:
      return std::string(kLoadNames[static_cast<size_t>(l.from)]);
  }
}

}  // namespace

std::string block_arguments(const Load& l) {
  const Blocks b = l.format.blocks(l.orientation);
  return str(b.rows, ", ", b.cols, ", ", flag(b.transposed), ", ", flag(l.format.swizzled), ", ",
             flag(l.orientation == Orientation::rowwise));
}

TenonAccess access(const View& view, const ColumnMap& columns) {
  return {.data = static_cast<TenonU8*>(view.data),
          .stride = view.stride,
          .block = columns.block,
          .block_stride = columns.stride,
          .offset = columns.offset};
}

TenonAccess load_access(const Load& l, const RunArgs& args) {
  if (l.from == Load::From::parameter) return {.value = args.parameters[l.arg]};
  if (!reads_view(l)) return {};
  TenonAccess a = access(args.in[l.arg], l.columns);
  const View& v = args.in[l.arg];
  if (l.from == Load::From::block)
    a.tiles = (l.orientation == Orientation::rowwise ? v.cols : v.rows) / 4;
  return a;
}

bool lies_turned(const Matrix& m) { return m.transposed != m.codes_transposed(); }

const char* flag(bool b) { return b ? "true" : "false"; }
std::string format(DType d) { return str("tenon_", info(d).name); }

TenonPlace place(const View& v) {
  return {static_cast<TenonU8*>(v.data), v.stride, v.rows, v.cols};
}

const TenonU64* random_state(const RunArgs& args) {
  return reinterpret_cast<const TenonU64*>(args.random);
}

std::string arguments_text(std::string_view head, size_t accesses, size_t places) {
  return str("using Arguments = TenonArguments<", head, ", ", std::max<size_t>(1, accesses), ", ",
             std::max<size_t>(1, places), ">;\n");
}

std::array<TenonPlace, kEncoderPlaces> encoder_places(const Encoder& e, const RunArgs& args) {
  std::array<TenonPlace, kEncoderPlaces> all;
  for (uint32_t i = 0; i < Encoder::outputs; ++i)
    if (i != Encoder::health || e.counts) all[i] = place(args.out[e.out + i]);
  if (info(e.format.scaling).reads_scale)
    all[Encoder::outputs].data = static_cast<TenonU8*>(args.in[e.scale].data);
  all[Encoder::outputs].cols = e.cols;
  return all;
}

std::string scaling_text(const Step& step, size_t number) {
  const Encoder& e = step.encoders[number];
  const DTypeInfo& f = info(e.format.dtype);
  const auto number_of = [](const char* name, float v) {
    return str("  __device__ static float ", name, "() { return ", literal(v), "; }\n");
  };
  return str("struct Scaling", number, " {\n  using Format = ", format(e.format.dtype),
             ";\n  using Scale = ", format(info(e.format.scaling).scale),
             ";\n  static constexpr int kPlace = ", kEncoderPlaces * number,
             ";\n  static constexpr bool kScaled = ", flag(e.format.scaling != Scaling::none),
             ", kGiven = ", flag(info(e.format.scaling).scale_given),
             ", kE8M0 = ", flag(info(e.format.scaling).scale == DType::e8m0),
             ", kPowers = ", flag(e.format.powers()), ", kSwizzled = ", flag(e.format.swizzled),
             ";\n", number_of("most", f.max), number_of("inverse_most", 1.0F / f.max),
             number_of("eps", e.format.eps),
             number_of("saturation", saturation_threshold(e.format.dtype)),
             number_of("least", power_of_two(-f.bias - f.mantissa_bits)), "};\n");
}

std::string indented(const std::string& lines) {
  std::string text;
  for (size_t begin = 0; begin < lines.size();) {
    const size_t end = lines.find('\n', begin) + 1;
    text += "    " + lines.substr(begin, end - begin);
    begin = end;
  }
  return text;
}

std::string load_lines(const Step& step) {
  std::string text;
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    text += str("in[", i, "] = ");
    if (l.from == Load::From::parameter)
      text += str("at[", i, "].value;\n");
    else if (l.from == Load::From::random)
      text += str("tenon_random(random, row, column, ", l.arg, ");\n");
    else
      text += str("tenon_load<tenon_", info(l.dtype).name, ">(", element(kind_of(l), i), ");\n");
  }
  return text;
}

std::string store_lines(const Step& step) {
  std::string text;
  for (size_t i = 0; i < step.stores.size(); ++i)
    if (step.stores[i].to == Store::To::tile)
      text += str("tenon_store<tenon_", info(step.stores[i].dtype).name, ">(", element("tile", i),
                  ", out[", i, "]);\n");
  return text;
}

std::string compute_lines(const Step& step) {
  if (!step.strict_bits()) return native_lines(*step.graph, step.roots(), step.native_error());
  const Lowered lowered = lower(*step.graph, step.roots(), Precision::strict);
  return print(lowered.graph, lowered.roots);
}

}  // namespace tenon::cuda
