// Tests of products on Hopper tensor cores. Without a GPU: supported steps and calls, descriptors
// of operands, compilation. With a GPU: every epilogue and layout against float64.
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "backend/cuda/body.h"
#include "backend/cuda/cublaslt.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/nvrtc.h"
#include "backend/cuda/skeletons.h"
#include "bench/cubin.h"
#include "lazy/builder.h"
#include "lower/single_dropout.h"
#include "runtime/execute.h"
#include "support/cuda_emulator.h"
#include "support/formula.h"
#include "support/gpu_graph.h"
#include "support/support.h"
#include "support/verify.h"
#include "support/verify_product.h"

namespace tenon::test {
namespace {

using cuda::GemmProgram;
using cuda::GemmTile;
using support::call;
using From = Load::From;
using To = Store::To;

constexpr int64_t kProcessors = 132;

// The layouts of the operands: x·Wᵀ, x·W, xᵀ·y, xᵀ·yᵀ.
enum class Form : uint8_t { nt, nn, tn, tt };
constexpr Form kForms[] = {Form::nt, Form::nn, Form::tn, Form::tt};
constexpr const char* kFormNames[] = {"nt", "nn", "tn", "tt"};
bool turns_a(Form f) { return f == Form::tn || f == Form::tt; }
bool turns_b(Form f) { return f == Form::nt || f == Form::tt; }

// The inputs of all epilogues. The scales of an operand follow it.
enum In : uint32_t {
  in_a,
  in_scale_a,
  in_b,
  in_scale_b,
  in_bias,
  in_tile,
  in_column,
  in_scalar,
  inputs
};

// FP8 operands. Their codes have the inner dimension contiguous: rowwise codes of x·Wᵀ, or
// columnwise codes of xᵀ·y.
struct Codes {
  DType a, b;
  Scaling scaling_a, scaling_b;
  bool fast = false, columnwise = false;
};
constexpr Codes kCodes[] = {
    {DType::e4m3, DType::e4m3, Scaling::delayed, Scaling::delayed},
    {DType::e5m2, DType::e4m3, Scaling::delayed, Scaling::current, false, true},
    {DType::e4m3, DType::e4m3, Scaling::block1x128, Scaling::block128x128},
    {DType::e4m3, DType::e4m3, Scaling::block1x128, Scaling::block1x128},
    {DType::e4m3, DType::e4m3, Scaling::delayed, Scaling::delayed, true},
    {DType::e4m3, DType::e4m3, Scaling::block1x128, Scaling::block128x128, false, true},
    {DType::e5m2, DType::e4m3, Scaling::block1x128, Scaling::block1x128, false, true},
    {DType::e4m3, DType::e5m2, Scaling::current, Scaling::none, true, true},
    {DType::e5m2, DType::e5m2, Scaling::none, Scaling::current},
};

// The format of an output, to allocate its memory.
struct Out {
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0;
};
struct Made {
  StepBuilder build;
  DType out;
  int64_t rows, cols;  // of the epilogue
  int64_t n;           // columns of the product
  std::array<ColumnMap, 2> halves{};
  std::vector<Out> outputs = {};
  std::vector<float> parameters = {};
  bool random = false;

  Expr product(int half = 0) {
    return build.load({.from = From::product, .columns = halves[static_cast<size_t>(half)]});
  }
  Expr bias(int half = 0) {
    return build.load({From::row, in_bias, out, halves[static_cast<size_t>(half)]});
  }
  Expr tile(int half = 0) {
    return build.load({From::tile, in_tile, out, halves[static_cast<size_t>(half)]});
  }
  // Applies f to both halves of the product. Separate statements fix the order of node creation.
  Expr gate(const char* name, bool biased = false) {
    const Expr a = biased ? product(0) + bias(0) : product(0);
    const Expr b = biased ? product(1) + bias(1) : product(1);
    return call(name, a, b);
  }
  void store(Expr value, DType dtype, const ColumnMap& columns = {}) {
    build.store({To::tile, static_cast<uint32_t>(outputs.size()), dtype, columns}, value);
    outputs.push_back({dtype, rows, cols});
  }
  // Stores both halves of one tensor.
  void store_halves(Expr a, Expr b) {
    const auto arg = static_cast<uint32_t>(outputs.size());
    build.store({To::tile, arg, out, halves[0]}, a);
    build.store({To::tile, arg, out, halves[1]}, b);
    outputs.push_back({out, rows, 2 * cols});
  }
  void sum(Expr value) {
    build.store({To::column_sum, static_cast<uint32_t>(outputs.size()), DType::f32}, value);
    outputs.push_back({DType::f32, 1, cols});
  }
  // Stores the column sums of both halves in one row.
  void sum_halves(Expr a, Expr b) {
    const auto arg = static_cast<uint32_t>(outputs.size());
    build.store({To::column_sum, arg, DType::f32, halves[0]}, a);
    build.store({To::column_sum, arg, DType::f32, halves[1]}, b);
    outputs.push_back({DType::f32, 1, 2 * cols});
  }
  // Stores codes with one scale, and their amax.
  void encode(const Pieces& pieces, DType codes, Scaling scaling, bool rowwise = true,
              bool columnwise = false) {
    const auto arg = static_cast<uint32_t>(outputs.size());
    const auto wide = static_cast<int64_t>(pieces.size()) * cols;
    Operand o;
    o.format = {.dtype = codes, .scaling = scaling};
    o.rowwise = rowwise;
    o.columnwise = columnwise;
    build.store(o, arg, in_scalar, wide, pieces);
    const Out scale{DType::f32, 1, 1};
    outputs.push_back(rowwise ? Out{codes, rows, wide} : Out{});
    outputs.push_back(rowwise ? scale : Out{});
    outputs.push_back(columnwise ? Out{codes, wide, rows} : Out{});
    outputs.push_back(columnwise ? scale : Out{});
    outputs.push_back({});
    for (const Piece& piece : pieces)
      build.store({.to = To::amax,
                   .arg = static_cast<uint32_t>(outputs.size()),
                   .dtype = DType::f32,
                   .join = scaling == Scaling::delayed},
                  piece.value);
    outputs.push_back(scale);
  }
  void encode(Expr value, DType codes, Scaling scaling, bool rowwise = true,
              bool columnwise = false) {
    encode(Pieces{{value, {}}}, codes, scaling, rowwise, columnwise);
  }
  Expr masked(Expr x) {
    random = true;
    const DropoutRule rule = dropout_rule(0.3);
    parameters = {rule.threshold, rule.scale};
    const Expr bits = build.load({.from = From::random});
    return select(bits >= build.load({.from = From::parameter, .arg = 0}),
                  x * build.load({.from = From::parameter, .arg = 1}), 0.0F);
  }
};

// The epilogue of a product. A gated one has half of its columns.
struct Body {
  const char* name;
  bool gated;
  void (*make)(Made&);
};
constexpr Body kBodies[] = {
    {"plain", false, [](Made& m) { m.store(m.product(), m.out); }},
    {"f32", false, [](Made& m) { m.store(m.product(), DType::f32); }},
    {"bias", false, [](Made& m) { m.store(m.product() + m.bias(), m.out); }},
    {"bias gelu", false, [](Made& m) { m.store(call("gelu", m.product() + m.bias()), m.out); }},
    {"gelu_erf f32", false, [](Made& m) { m.store(call("gelu_erf", m.product()), DType::f32); }},
    {"saved, gelu", false,
     [](Made& m) {
       const Expr x = m.product() + m.bias();
       m.store(x, m.out);
       m.store(call("gelu", x), m.out);
     }},
    {"add", false, [](Made& m) { m.store(m.product() + m.tile(), m.out); }},
    {"accumulate", false,
     [](Made& m) {
       m.build.load({.from = From::scalar, .arg = in_scalar});
       m.store(m.build.load({From::tile, in_tile, DType::f32}) + m.product(), DType::f32);
     }},
    {"row scales", false,
     [](Made& m) {
       const Expr s = m.build.load({.from = From::column, .arg = in_column});
       m.store(
           call("silu", m.product()) * s + m.build.load({.from = From::scalar, .arg = in_scalar}),
           m.out);
     }},
    {"leaky_relu", false,
     [](Made& m) {
       m.parameters = {0.125F};
       const Expr x = m.product();
       m.store(select(x > 0.0F, x, x * m.build.load({.from = From::parameter, .arg = 0})), m.out);
     }},
    {"bias dropout add", false,
     [](Made& m) { m.store(m.tile() + m.masked(m.product() + m.bias()), m.out); }},
    {"gelu.bwd", false,
     [](Made& m) {
       const Expr x = m.tile();
       m.store(m.build.grad(call("gelu", x), m.product(), std::span(&x, 1))[0], m.out);
     }},
    {"swiglu.bwd", false,
     [](Made& m) {
       m.halves = {ColumnMap{1, 1, 0}, ColumnMap{1, 1, m.cols}};
       const std::array<Expr, 2> x{m.tile(0), m.tile(1)};
       const auto d = m.build.grad(call("swiglu", x[0], x[1]), m.product(0), x);
       m.store_halves(d[0], d[1]);
     }},
    {"gelu.bwd dbias", false,
     [](Made& m) {
       const Expr x = m.tile() + m.bias();
       const Expr d = m.build.grad(call("gelu", x), m.product(), std::span(&x, 1))[0];
       m.store(d, m.out);
       m.sum(d);
     }},
    {"swiglu.bwd dbias", false,
     [](Made& m) {
       m.halves = {ColumnMap{1, 1, 0}, ColumnMap{1, 1, m.cols}};
       const std::array<Expr, 2> x{m.tile(0), m.tile(1)};
       const auto d = m.build.grad(call("swiglu", x[0], x[1]), m.product(0), x);
       m.store_halves(d[0], d[1]);
       m.sum_halves(d[0], d[1]);
     }},
    {"dbias e5m2", false,
     [](Made& m) {
       m.encode(m.product(), DType::e5m2, Scaling::delayed);
       m.sum(m.product());
     }},
    {"swiglu", true, [](Made& m) { m.store(m.gate("swiglu"), m.out); }},
    {"bias geglu", true, [](Made& m) { m.store(m.gate("geglu", true), m.out); }},
    {"saved, swiglu", true,
     [](Made& m) {
       const Expr a = m.product(0);
       const Expr b = m.product(1);
       m.store_halves(a, b);
       m.store(call("swiglu", a, b), m.out);
     }},
    {"gelu e4m3", false,
     [](Made& m) { m.encode(call("gelu", m.product()), DType::e4m3, Scaling::delayed); }},
    {"swiglu e4m3", true,
     [](Made& m) { m.encode(m.gate("swiglu"), DType::e4m3, Scaling::delayed); }},
    {"bias e5m2 current", false,
     [](Made& m) { m.encode(m.product() + m.bias(), DType::e5m2, Scaling::current); }},
    {"saved, swiglu e4m3 rowcol", true,
     [](Made& m) {
       const Expr a = m.product(0);
       const Expr b = m.product(1);
       m.store_halves(a, b);
       m.encode(call("swiglu", a, b), DType::e4m3, Scaling::delayed, true, true);
     }},
    {"bias gelu e4m3 col", false,
     [](Made& m) {
       m.encode(call("gelu", m.product() + m.bias()), DType::e4m3, Scaling::current, false, true);
     }},
    {"gelu.bwd e5m2 rowcol dbias", false,
     [](Made& m) {
       const Expr x = m.tile() + m.bias();
       const Expr d = m.build.grad(call("gelu", x), m.product(), std::span(&x, 1))[0];
       m.encode(d, DType::e5m2, Scaling::delayed, true, true);
       m.sum(d);
     }},
    {"swiglu.bwd e5m2 rowcol", false,
     [](Made& m) {
       m.halves = {ColumnMap{1, 1, 0}, ColumnMap{1, 1, m.cols}};
       const std::array<Expr, 2> x{m.tile(0), m.tile(1)};
       const auto d = m.build.grad(call("swiglu", x[0], x[1]), m.product(0), x);
       m.encode(Pieces{{d[0], m.halves[0]}, {d[1], m.halves[1]}}, DType::e5m2, Scaling::delayed,
                true, true);
     }},
};

const Body& body(std::string_view name) {
  for (const Body& b : kBodies)
    if (b.name == name) return b;
  throw std::runtime_error("no such body");
}

struct Case {
  const Body* body = kBodies;
  Form form = Form::nt;
  DType in = DType::bf16, out = DType::bf16;
  int64_t m = 0, n = 0, k = 0;  // n columns of the epilogue
  Gate gate = Gate::stacked;
  bool inner_is_rows = false, specials = false;
  int64_t pad = 0;
  GemmTile tile = GemmProgram::kNarrow;
  const Codes* codes = nullptr;  // FP8 operands, instead of `in`
  unsigned blocks = 1;           // maximal number of blocks, so that a block computes several tiles

  [[nodiscard]] std::string text() const {
    return str(body->name, " ", kFormNames[static_cast<int>(form)], " ", info(in).name, " -> ",
               info(out).name, " ", m, "x", n, "x", k, " gate ", static_cast<int>(gate),
               inner_is_rows ? " inner=rows" : "", specials ? " specials" : "", " pad ", pad,
               " tile ", tile.rows, "x", tile.cols, " codes ", codes ? codes - kCodes : -1,
               " blocks ", blocks);
  }
};

struct Problem {
  Step step;
  std::vector<Out> outputs;
  std::vector<float> parameters;
  bool random = false;
};

Problem problem(const Case& c) {
  Made m{.build = StepBuilder(c.text(), c.n, Precision::native),
         .out = c.out,
         .rows = c.m,
         .cols = c.n,
         .n = c.body->gated ? 2 * c.n : c.n};
  if (c.body->gated) {
    const int64_t k = interleave(c.gate);
    const bool swapped = c.gate == Gate::swapped;
    for (const int64_t half : {0, 1})
      m.halves[static_cast<size_t>(half)] =
          k ? ColumnMap{k, 2 * k, half * k} : ColumnMap{1, 1, (swapped ? 1 - half : half) * c.n};
  }
  c.body->make(m);
  Problem p{m.build.finish(), std::move(m.outputs), std::move(m.parameters), m.random};
  const auto matrix = [&](uint32_t arg, bool transposed) {
    Matrix made{.arg = arg, .format = {.dtype = c.in}, .transposed = transposed};
    if (!c.codes) return made;
    made.format = arg == in_a ? Format{c.codes->a, c.codes->scaling_a}
                              : Format{c.codes->b, c.codes->scaling_b};
    if (!c.codes->columnwise || !info(made.format.scaling).transposes ||
        made.format.scaling == Scaling::none)
      return made;
    made.orientation = Orientation::columnwise;
    made.transposed = !transposed;
    return made;
  };
  p.step.head = Gemm{matrix(in_a, turns_a(c.form)), matrix(in_b, turns_b(c.form)), m.n,
                     c.inner_is_rows ? 0 : c.k, c.codes && c.codes->fast};
  if (c.inner_is_rows) p.step.rows = c.m;
  return p;
}

// Memory of a matrix with padding after each row, and some after the last.
struct Array {
  static constexpr uint8_t kPoison = 0xA5;
  static constexpr size_t kGuard = 256;
  View at{};
  std::vector<uint8_t> bytes;

  Array() = default;
  Array(DType dtype, int64_t rows, int64_t cols, int64_t stride)
      : at{nullptr, dtype, rows, cols, stride},
        bytes(static_cast<size_t>(rows * stride * info(dtype).bytes) + kGuard, kPoison) {}
  [[nodiscard]] bool given() const { return !bytes.empty(); }
  [[nodiscard]] View view() const {
    View v = at;
    v.data = given() ? const_cast<uint8_t*>(bytes.data()) : nullptr;
    return v;
  }
  void set(int64_t r, int64_t c, float v) {
    const auto size = static_cast<size_t>(info(at.dtype).bytes);
    const uint32_t code = encode(at.dtype, v);
    std::memcpy(bytes.data() + static_cast<size_t>(r * at.stride + c) * size, &code, size);
  }
  Array& fill(std::mt19937& random, float spread = 1) {
    std::normal_distribution<float> normal(0, spread);
    for (int64_t r = 0; r < at.rows; ++r)
      for (int64_t c = 0; c < at.cols; ++c) set(r, c, normal(random));
    return *this;
  }
  // Whether padding and guard bytes are unchanged.
  [[nodiscard]] bool guards_hold() const {
    const int64_t size = info(at.dtype).bytes;
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size()); ++i) {
      const int64_t row = i / (at.stride * size), in_row = i % (at.stride * size);
      const bool inside = row < at.rows && in_row < at.cols * size;
      if (!inside && bytes[static_cast<size_t>(i)] != kPoison) return false;
    }
    return true;
  }
};

struct Memory {
  std::vector<Array> in, out;
};

Memory memory_of(const Case& c, const Problem& p) {
  std::mt19937 random(static_cast<unsigned>(c.m * 7 + c.n * 3 + c.k));
  const auto array = [&](DType d, int64_t rows, int64_t cols) {
    return Array(d, rows, cols, rup(cols, info(d).bytes == 1 ? 16 : 8) + 2 * c.pad);
  };
  const int64_t n = p.step.gemm()->cols;
  const bool f32_tile = std::string_view(c.body->name) == "accumulate";
  const bool wide = std::string_view(c.body->name).starts_with("swiglu.bwd");
  Memory m;
  m.in.resize(inputs);
  const auto operand = [&](uint32_t arg, const Matrix& matrix, bool turned, int64_t lanes) {
    const DType d = matrix.format.dtype;
    m.in[arg] = turned ? array(d, c.k, lanes) : array(d, lanes, c.k);
    if (matrix.format.scaling == Scaling::none) return;
    const bool first = matrix.transposed == (arg == in_a);  // the inner dimension of the tensor
    const Shape s =
        matrix.format.scale_shape(first ? c.k : lanes, first ? lanes : c.k, matrix.orientation);
    m.in[arg + 1] = array(DType::f32, s.rows, s.cols);
  };
  operand(in_a, p.step.gemm()->a, turns_a(c.form), c.m);
  operand(in_b, p.step.gemm()->b, !turns_b(c.form), n);
  m.in[in_bias] = array(c.out, 1, n);
  m.in[in_tile] = array(f32_tile ? DType::f32 : c.out, c.m, wide ? 2 * n : n);
  m.in[in_column] = array(DType::f32, c.m, 1);
  m.in[in_scalar] = array(DType::f32, 1, 1);
  for (Array& a : m.in) a.fill(random);
  for (const uint32_t arg : {in_scale_a, in_scale_b})
    for (int64_t r = 0; r < m.in[arg].at.rows; ++r)
      for (int64_t k = 0; k < m.in[arg].at.cols; ++k)
        m.in[arg].set(r, k, 0.5F + static_cast<float>(random() % 1024) / 700);
  m.in[in_scalar].set(0, 0, 1.5F);
  if (c.specials) {
    const auto spoil = [&](Array& a) {
      for (const float v : {kInf, -kInf, kNan, 0.0F})  // in e4m3 NaN and the largest values
        a.set(static_cast<int64_t>(random()) % a.at.rows,
              static_cast<int64_t>(random()) % a.at.cols, v);
    };
    spoil(m.in[in_a]);
    spoil(m.in[in_b]);
  }
  for (const Out& o : p.outputs) m.out.push_back(o.rows ? array(o.dtype, o.rows, o.cols) : Array());
  for (size_t k = 0; k < p.step.stores.size(); ++k)  // a slot of a history that later runs update
    if (p.step.stores[k].to == To::amax) m.out[p.step.stores[k].arg].set(0, 0, 0.25F);
  if (f32_tile) m.out[0] = m.in[in_tile];
  return m;
}

const uint64_t kState[5] = {42, 7, 3, 5, 1 << 12};

RunArgs args_of(const Case& c, const Problem& p, std::span<const View> in,
                std::span<const View> out) {
  return {.rows = c.inner_is_rows ? c.k : c.m,
          .in = in,
          .out = out,
          .parameters = p.parameters,
          .random = p.random ? kState : nullptr};
}

std::vector<View> views(const std::vector<Array>& all) {
  std::vector<View> list;
  for (const Array& a : all) list.push_back(a.view());
  return list;
}

// Every epilogue with every layout, at sizes near those of tiles and vectors.
std::vector<Case> cases() {
  struct Size {
    int64_t m, n, k;
  };
  constexpr Size kSizes[] = {{128, 128, 64}, {1, 8, 8},       {129, 200, 72},  {300, 392, 131},
                             {63, 64, 1},    {257, 256, 320}, {500, 96, 1000}, {130, 328, 63},
                             {70, 416, 200}, {385, 288, 65}};
  std::vector<Case> all;
  size_t turn = 0;
  for (const Body& b : kBodies)
    for (const Form form : kForms)
      for (const GemmTile& tile : {GemmProgram::kNarrow, GemmProgram::kWide})
        for (const Gate gate : kGates) {
          if (gate == Gate::separate || (!b.gated && gate != Gate::stacked)) continue;
          if (b.gated && form != Form::nt && form != Form::tt) continue;
          // With alternating halves, epilogues that access them directly have no vectors.
          const std::string_view name = b.name;
          if (gate == Gate::by1 && name != "swiglu" && name != "swiglu e4m3") continue;
          const Size s = kSizes[turn % std::size(kSizes)];
          Case c{.body = &b,
                 .form = form,
                 .in = turn % 3 == 1 ? DType::f16 : DType::bf16,
                 .m = s.m,
                 .n = s.n,
                 .k = s.k,
                 .gate = gate,
                 .inner_is_rows = turns_a(form) && turn % 2 == 1,
                 .specials = turn % 5 == 2,
                 .pad = turn % 4 == 1 ? 8 : 0,
                 .tile = tile,
                 .blocks = 1 + static_cast<unsigned>(turn % 4)};
          c.out = turn % 7 == 3 ? DType::f16 : c.in;
          if (!test::fits(gate, c.n)) c.n = rup(c.n, 32);
          ++turn;
          if (GemmProgram::refusal(problem(c).step, tile).empty()) all.push_back(c);
        }
  // FP8 operands, with sizes of the inner dimension that a tensor map can copy.
  constexpr Size kCodeSizes[] = {{192, 128, 128}, {1, 8, 16},      {129, 200, 80}, {300, 392, 144},
                                 {63, 64, 16},    {385, 256, 640}, {500, 96, 992}, {194, 328, 1040},
                                 {70, 416, 208},  {577, 288, 272}};
  for (const Body& b : kBodies)
    for (const Codes& codes : kCodes)
      for (const GemmTile& tile :
           {GemmProgram::kNarrow, GemmProgram::kWide, GemmProgram::kPromoted}) {
        const Size s = kCodeSizes[turn % std::size(kCodeSizes)];
        Case c{.body = &b,
               .m = s.m,
               .n = s.n,
               .k = s.k,
               .inner_is_rows = codes.columnwise && turn % 2 == 1,
               .specials = turn % 5 == 2,
               .pad = turn % 4 == 1 ? 8 : 0,
               .tile = tile,
               .codes = &codes,
               .blocks = 1 + static_cast<unsigned>(turn % 4)};
        c.gate = b.gated && turn % 3 == 1 ? Gate::swapped : Gate::stacked;
        if (b.gated && c.codes->scaling_a == Scaling::block1x128) c.n = rup(c.n, 128);
        ++turn;
        if (GemmProgram::refusal(problem(c).step, tile).empty()) all.push_back(c);
      }
  return all;
}

std::string refusal(const Case& c) { return GemmProgram::refusal(problem(c).step, c.tile); }

TEST(CudaGemm, RefusesWithTheReason) {
  const Case plain{.m = 128, .n = 128, .k = 64};
  const auto expect = [&](const std::function<void(Step&)>& change, const char* part) {
    Step step = problem(plain).step;
    change(step);
    const std::string why = GemmProgram::refusal(step, GemmProgram::kNarrow);
    EXPECT_NE(why.find(part), std::string::npos) << why;
    const Attempt made = cuda::make_gemm(step, named_target("sm_90a"));
    ASSERT_TRUE(std::holds_alternative<Refusal>(made)) << part;
    EXPECT_EQ(std::get<Refusal>(made).why, why);
  };
  EXPECT_EQ(refusal(plain), "");
  expect([](Step& s) { s.head = Map{}; }, "map head");
  expect([](Step& s) { s.precision = Precision::strict; }, "strict");
  expect(
      [](Step& s) {
        std::get<Gemm>(s.head).b.format = {DType::e4m3, Scaling::delayed};
      },
      "e4m3 delayed");
  const auto codes = [](Step& s, Scaling a, Scaling b, bool fast) {
    Gemm& g = std::get<Gemm>(s.head);
    g.a.format = {DType::e4m3, a};
    g.b.format = {DType::e4m3, b};
    g.fast = fast;
  };
  expect([&](Step& s) { codes(s, Scaling::block128x128, Scaling::block1x128, false); }, "1x128 by");
  const auto reason = [&](const GemmTile& tile, const std::function<void(Step&)>& change) {
    Step step = problem(plain).step;
    change(step);
    return GemmProgram::refusal(step, tile);
  };
  using Tile = GemmProgram;
  const auto precise = [&](Step& s) { codes(s, Scaling::delayed, Scaling::delayed, false); };
  const auto fast = [&](Step& s) { codes(s, Scaling::delayed, Scaling::delayed, true); };
  EXPECT_EQ(reason(Tile::kPromoted, precise), "");
  EXPECT_EQ(reason(Tile::kWide, precise), "precise FP8 sums are promoted");
  EXPECT_EQ(reason(Tile::kWide, fast), "");
  EXPECT_EQ(reason(Tile::kPromoted, fast), "these sums need no promotion");
  EXPECT_EQ(reason(Tile::kPromoted, [](Step&) {}), "these sums need no promotion");
  EXPECT_NE(reason(Tile::kPromoted,
                   [&](Step& s) {
                     precise(s);
                     std::get<Gemm>(s.head).b.transposed = false;
                   })
                .find("inner dimension"),
            std::string::npos);
  // Half of the columns begins within a block of scales.
  Case gated{.body = &body("swiglu"), .m = 128, .n = 96, .k = 128, .tile = GemmProgram::kPromoted};
  gated.codes = &kCodes[2];
  EXPECT_NE(refusal(gated).find("block of scales"), std::string::npos);
  gated.n = 128;
  EXPECT_EQ(refusal(gated), "");
  expect([](Step& s) { std::get<Gemm>(s.head).a.format.dtype = DType::f16; },
         "f16 none and bf16 none");
  expect(
      [](Step& s) {
        std::get<Gemm>(s.head).a.format.dtype = std::get<Gemm>(s.head).b.format.dtype = DType::f32;
      },
      "two of");
  expect([](Step& s) { s.cols = 100; }, "100 columns");
  expect([](Step& s) { s.stores[0].to = To::row_sum; }, "row_sum");
  expect(
      [](Step& s) {
        s.stores[0].to = To::column_sum;
        s.stores[0].ordered = true;
      },
      "as a tree only");
  expect(
      [](Step& s) {
        s.stores[0].to = To::column_sum;
        s.stores.resize(3, s.stores[0]);
      },
      "too many sums");
  expect([](Step& s) { s.stores.clear(); }, "nothing to store");
  expect([](Step& s) { s.loads[0].columns = {8, 16, 0}; }, "some columns");
  const Attempt made = cuda::make_gemm(problem(plain).step, named_target("sm_100a"));
  ASSERT_TRUE(std::holds_alternative<Refusal>(made));
  EXPECT_NE(std::get<Refusal>(made).why.find("the target is sm_100a"), std::string::npos);
}

TEST(CudaGemm, GatedBodiesWantALayoutThatFillsTiles) {
  Case c{.body = &body("swiglu"), .m = 128, .n = 192, .k = 64};
  for (const Gate gate : {Gate::stacked, Gate::swapped, Gate::by1, Gate::by8, Gate::by32}) {
    c.gate = gate;
    for (const GemmTile& tile : {GemmProgram::kNarrow, GemmProgram::kWide}) {
      c.tile = tile;
      EXPECT_EQ(refusal(c), "") << c.text();
    }
  }
  Step odd = problem(c).step;
  for (Load& l : odd.loads) l.columns = {24, 48, l.columns.offset ? 24 : 0};
  EXPECT_EQ(GemmProgram::refusal(odd, GemmProgram::kWide), "");  // 96 = 4·24
  EXPECT_NE(GemmProgram::refusal(odd, GemmProgram::kNarrow).find("blocks of 24"),
            std::string::npos);
  c.form = Form::nn;
  EXPECT_NE(refusal(c).find("inner dimension of b"), std::string::npos);
}

// The element of memory for each place of shared memory, for the first copy of a box.
std::vector<int64_t> elements_of(const cuda::TensorBox& b, const void* base) {
  std::vector<int64_t> all;
  std::array<uint64_t, 5> i{};
  const int64_t first = static_cast<const std::byte*>(b.data) - static_cast<const std::byte*>(base);
  for (;;) {
    uint64_t bytes = i[0] * 2;
    for (unsigned d = 1; d < b.rank; ++d) bytes += i[d] * b.strides[d - 1];
    bool inside = true;
    for (unsigned d = 0; d < b.rank; ++d) inside = inside && i[d] < b.sizes[d];
    all.push_back(inside ? (first + static_cast<int64_t>(bytes)) / 2 : -1);
    unsigned d = 0;
    while (d < b.rank && ++i[d] == b.box[d]) i[d++] = 0;
    if (d == b.rank) return all;
  }
}

// Lane l of a copy of b is a column of the epilogue. Four threads have lanes 2t, 2t + 1 of each
// eight.
TEST(CudaGemm, CopiesBringEachThreadItsColumns) {
  for (const Gate gate : {Gate::stacked, Gate::swapped, Gate::by1, Gate::by8, Gate::by32})
    for (const int64_t n : {256, 200})
      for (const GemmTile& tile : {GemmProgram::kNarrow, GemmProgram::kWide}) {
        const int64_t width = tile.cols;
        Case c{.body = &body("swiglu"), .m = 128, .n = n, .k = 64, .gate = gate, .tile = tile};
        if (!test::fits(gate, n)) continue;
        SCOPED_TRACE(c.text());
        const Problem p = problem(c);
        const GemmProgram program(p.step, tile, kProcessors);
        const Memory memory = memory_of(c, p);
        const std::vector<View> in = views(memory.in), out = views(memory.out);
        const auto boxes = program.boxes(args_of(c, p, in, out));
        ASSERT_EQ(boxes.size(), 3U);
        const bool ordered = boxes[1].rank == 5;
        EXPECT_EQ(ordered, n % 32 == 0 && gate != Gate::by8 && gate != Gate::by32);
        for (const int half : {0, 1}) {
          const std::vector<int64_t> seen =
              elements_of(boxes[1 + static_cast<size_t>(half)], in[in_b].data);
          ASSERT_EQ(seen.size(), static_cast<size_t>(64 * width / 2));
          for (int64_t lane = 0; lane < width / 2; ++lane) {
            const int64_t t = lane % 8 / 2, j = lane % 32 / 8;
            const int64_t column = ordered ? lane / 32 * 32 + 8 * t + 2 * j + lane % 2 : lane;
            for (int64_t k = 0; k < 64; ++k)
              ASSERT_EQ(seen[static_cast<size_t>(lane * 64 + k)],
                        gated_column(gate, n, half, column) * in[in_b].stride + k)
                  << "half " << half << ", lane " << lane << ", " << k;
          }
        }
      }
}

TEST(CudaGemm, TakesCallsWhoseAddressesSuit) {
  const Case c{.body = &body("bias gelu"), .m = 256, .n = 256, .k = 72};
  const Problem p = problem(c);
  const GemmProgram program(p.step, c.tile, kProcessors);
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };  // NOLINT
  std::vector<View> in(inputs), out(1);
  in[in_a] = matrix(at(0x10000), DType::bf16, c.m, c.k, 72);
  in[in_b] = matrix(at(0x90000), DType::bf16, c.n, c.k, 72);
  in[in_bias] = matrix(at(0xa0000), DType::bf16, 1, c.n);
  out[0] = matrix(at(0xb0000), DType::bf16, c.m, c.n);
  const auto suits = [&](const std::function<void()>& change, int64_t rows = 256) {
    const std::vector<View> in_before = in, out_before = out;
    change();
    RunArgs args = args_of(c, p, in, out);
    args.rows = rows;
    const bool result = program.suits(args);
    in = in_before;
    out = out_before;
    return result;
  };
  EXPECT_TRUE(suits([] {}));
  EXPECT_FALSE(suits([] {}, 0));
  EXPECT_TRUE(suits([] {}, 1));
  EXPECT_FALSE(suits([&] { in[in_a].data = at(0x10002); }));
  EXPECT_FALSE(suits([&] { in[in_b].data = at(0x90008); }));
  EXPECT_FALSE(suits([&] { in[in_a].stride = 74; }));
  EXPECT_TRUE(suits([&] { in[in_b].stride = 80; }));
  EXPECT_FALSE(suits([&] { in[in_bias].data = at(0xa0004); }));
  EXPECT_FALSE(suits([&] { out[0].stride = 260; }));
  EXPECT_TRUE(suits([&] { out[0].stride = 264; }));
}

// Few rows use another kernel. The tile is chosen by the number of waves.
TEST(CudaGemm, ChoosesTheTileByRounds) {
  const auto widths = [](int64_t m, int64_t n, int64_t k) {
    const Case c{.m = m, .n = n, .k = k};
    const Problem p = problem(c);
    const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };  // NOLINT
    std::vector<View> in(inputs), out(1);
    in[in_a] = matrix(at(1 << 20), DType::bf16, m, k);
    in[in_b] = matrix(at(1 << 21), DType::bf16, n, k);
    out[0] = matrix(at(1 << 22), DType::bf16, m, n);
    const RunArgs args = args_of(c, p, in, out);
    const bool wide = GemmProgram(p.step, GemmProgram::kWide, kProcessors).fits(args);
    const bool narrow = GemmProgram(p.step, GemmProgram::kNarrow, kProcessors).fits(args);
    return wide ? 192 : narrow ? 128 : 0;
  };
  EXPECT_EQ(widths(8192, 28672, 4096), 192);
  EXPECT_EQ(widths(8192, 16384, 4096), 192);
  EXPECT_EQ(widths(4096, 4096, 4096), 128);
  EXPECT_EQ(widths(512, 28672, 4096), 128);
  EXPECT_EQ(widths(8, 28672, 4096), 0);
  EXPECT_EQ(widths(512, 512, 4096), 0);
  EXPECT_EQ(widths(8192, 4096, 14336), 0);
}

// Compiles the texts of all epilogues for their architecture, each with one width, and one for an
// architecture without these instructions.
TEST(CudaGemm, TextsCompile) {
  ASSERT_FALSE(cuda::why_no_nvrtc()) << *cuda::why_no_nvrtc() << "\nrun ./dev test";
  std::map<std::string, std::string> texts;  // text -> a case
  bool wide = false;
  for (const Body& b : kBodies) {
    wide = !wide;
    Case c{.body = &b,
           .m = 256,
           .n = 256,
           .k = 64,
           .tile = wide ? GemmProgram::kWide : GemmProgram::kNarrow};
    if (!refusal(c).empty()) c.tile = GemmProgram::kNarrow;
    texts.try_emplace(GemmProgram(problem(c).step, c.tile, kProcessors).text(), c.text());
  }
  for (const Codes& codes : kCodes)
    for (const Body& b : kBodies) {
      Case c{.body = &b, .m = 256, .n = 256, .k = 64, .codes = &codes};
      for (const GemmTile& tile :
           {GemmProgram::kNarrow, GemmProgram::kWide, GemmProgram::kPromoted}) {
        c.tile = tile;
        if (refusal(c).empty())
          texts.try_emplace(GemmProgram(problem(c).step, tile, kProcessors).text(), c.text());
      }
    }
  for (const Form form : {Form::nn, Form::tn, Form::tt}) {
    const Case c{.form = form, .in = DType::f16, .out = DType::f16, .m = 256, .n = 200, .k = 64};
    texts.try_emplace(GemmProgram(problem(c).step, c.tile, kProcessors).text(), c.text());
  }
  for (const auto& [text, name] : texts) {
    SCOPED_TRACE(name);
    const cuda::Compiled made = cuda::compile(text, "sm_90a");
    EXPECT_EQ(made.log.find("C7514"), std::string::npos) << made.log;
    const auto uses = bench::kernel_uses(made.image);
    ASSERT_TRUE(uses.contains("tenon_gemm_kernel"));
    EXPECT_EQ(uses.at("tenon_gemm_kernel").local_bytes, 0);
  }
  cuda::compile(texts.begin()->first, "sm_80");
}

// Column sums go to the workspace. The body stores the tile alone.
TEST(CudaGemm, SumsAreNoElementsOfAResult) {
  const Case c{.body = &body("gelu.bwd dbias"), .m = 256, .n = 256, .k = 64};
  const std::string text = GemmProgram(problem(c).step, c.tile, kProcessors).text();
  const std::string printed = text.substr(text.find("struct Body"));
  size_t stores = 0;
  for (size_t at = 0; (at = printed.find("tenon_store8<", at)) != std::string::npos; ++at) ++stores;
  EXPECT_EQ(stores, 1U) << printed;
}

// The body on given products, emulated on the host: each body with one tile and layout.
TEST(CudaGemm, BodiesAreRightOnGivenProducts) {
  std::vector<Case> all;
  size_t turn = 0;
  const auto add = [&](const Body& b, const GemmTile& tile, const Codes* codes) {
    constexpr int64_t kRows[] = {129, 63, 200, 257}, kCols[] = {136, 256, 160, 64};
    Case c{.body = &b,
           .m = kRows[turn % 4],
           .n = kCols[turn / 2 % 4],
           .k = 16,
           .pad = turn % 3 == 1 ? 8 : 0,
           .tile = tile,
           .codes = codes,
           .blocks = 1 + static_cast<unsigned>(turn % 2)};
    c.gate = b.gated && turn % 2 == 1 ? Gate::swapped : Gate::stacked;
    ++turn;
    if (refusal(c).empty()) all.push_back(c);
  };
  for (const Body& b : kBodies) {
    add(b, turn % 2 == 0 ? GemmProgram::kWide : GemmProgram::kNarrow, nullptr);
    add(b, GemmProgram::kPromoted, &kCodes[0]);
  }
  EXPECT_GT(all.size(), 45U);
  Emulator emulator(cuda::gemm_skeletons());
  std::vector<Problem> problems;
  std::vector<GemmProgram> programs;
  for (const Case& c : all) problems.push_back(problem(c));
  for (size_t i = 0; i < all.size(); ++i) {
    programs.emplace_back(problems[i].step, all[i].tile, kProcessors);
    emulator.add(programs[i].text());
  }
  emulator.compile();
  for (size_t i = 0; i < all.size(); ++i) {
    const Case& c = all[i];
    const Problem& p = problems[i];
    SCOPED_TRACE(c.text());
    Memory m = memory_of(c, p);
    const std::vector<View> in = views(m.in), out = views(m.out);
    RunArgs args = args_of(c, p, in, out);
    std::vector<std::byte> workspace(programs[i].workspace(c.m) + 128);
    args.workspace =
        workspace.data() + (128 - reinterpret_cast<uintptr_t>(workspace.data()) % 128) % 128;
    ASSERT_TRUE(programs[i].suits(args));
    // The products of the codes: the kernel multiplies them by the scales.
    const Gemm& g = *p.step.gemm();
    double scale = 1;
    for (const Matrix* side : {&g.a, &g.b})
      if (side->format.scaling != Scaling::none)
        scale *= decode(DType::f32, code_at(in[side->arg + 1], 0));
    const std::vector<Bounded> exact = products(p.step, args);
    std::vector<std::vector<float>> given;
    std::vector<TenonTensorMap> maps(1);
    for (const bool half : {false, true}) {
      std::vector<float>& values = given.emplace_back();
      for (int64_t r = 0; r < c.m; ++r)
        for (int64_t k = 0; k < c.n; ++k) {
          const int64_t column = c.body->gated ? gated_column(c.gate, c.n, half, k) : k;
          values.push_back(
              static_cast<float>(exact[static_cast<size_t>(r * g.cols + column)].v / scale));
        }
      maps.emplace_back();
      if (!half || c.body->gated)
        maps[half ? 1 : 0].data[0] = reinterpret_cast<uintptr_t>(values.data());
      maps[half ? 1 : 0].data[1] = static_cast<uint64_t>(c.n);
    }
    for (const cuda::Launch& l : programs[i].launches(args, maps)) {
      std::vector<std::byte> memory(l.arguments.size() + 128);  // aligned, as on the device
      const size_t shift = (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
      std::memcpy(memory.data() + shift, l.arguments.data(), l.arguments.size());
      emulator.run(i, programs[i].entries()[l.entry], l.entry == 0 ? c.blocks : l.blocks, l.down,
                   l.threads, memory.data() + shift);
    }
    const auto wrong = verify(p.step, args);
    EXPECT_FALSE(wrong) << *wrong;
    for (const Array& a : m.out)
      EXPECT_TRUE(!a.given() || a.guards_hold()) << "padding was written";
  }
}

// The tests below need a GPU.
class GemmOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    for (const auto& why : {cuda::why_no_gpu(), cuda::why_no_nvrtc()})
      if (why) GTEST_SKIP() << *why;
    if (!cuda::device_info(0).arch().starts_with("sm_90"))
      GTEST_SKIP() << "the device is " << cuda::device_info(0).arch();
  }

  struct OnDevice {
    std::vector<std::unique_ptr<cuda::DeviceBuffer>> buffers;
    std::vector<View> in, out;

    View upload(const Array& a) {
      View v = a.at;
      buffers.push_back(std::make_unique<cuda::DeviceBuffer>(a.bytes.size()));
      if (!a.given()) return {};
      buffers.back()->from_host(a.bytes.data());
      v.data = buffers.back()->data();
      return v;
    }
    void fetch(Memory& m) const {
      for (size_t i = 0; i < m.out.size(); ++i)
        if (m.out[i].given()) buffers[m.in.size() + i]->to_host(m.out[i].bytes.data());
    }
  };
  static OnDevice upload(const Memory& m, const Case& c) {
    OnDevice d;
    for (const Array& a : m.in) d.in.push_back(d.upload(a));
    for (const Array& a : m.out) d.out.push_back(d.upload(a));
    if (std::string_view(c.body->name) == "accumulate") d.in[in_tile] = d.out[0];
    return d;
  }

  // Launches like a kernel, with few blocks.
  static void launch(const GemmProgram& program, const RunArgs& args, unsigned blocks) {
    const cuda::CurrentContext context;
    for (cuda::Launch& l : program.launches(args)) {
      const cuda::Source source("test", program.text(), program.entries()[l.entry]);
      const cuda::LoadedKernel kernel = source.load(context, l.shared);
      ASSERT_GE(kernel.shared_bytes, l.least_shared);
      void* values[] = {l.arguments.data()};
      cuda::check(
          cuda::driver().launch_kernel(
              kernel.function, l.entry == 0 ? std::min(l.blocks, blocks) : l.blocks, 1, 1,
              l.threads, 1, 1, l.shared, static_cast<cuda::Stream>(args.stream), values, nullptr),
          "launching a product");
    }
  }
};

TEST_F(GemmOnGpu, EveryBodyAndLayoutIsRight) {
  EXPECT_GT(cases().size(), 400U);
  std::vector<Case> all;
  for (const Case& c : cases())
    if (chosen()) all.push_back(c);
  std::vector<Problem> problems;
  std::vector<GemmProgram> programs;
  for (const Case& c : all) problems.push_back(problem(c));
  for (size_t i = 0; i < all.size(); ++i)
    programs.emplace_back(problems[i].step, all[i].tile, kProcessors);
  const auto on_threads = [](size_t count, const std::function<void(size_t)>& work) {
    std::atomic<size_t> next = 0;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < std::max(1U, std::thread::hardware_concurrency()); ++t)
      threads.emplace_back([&] {
        for (size_t i = next++; i < count; i = next++) work(i);
      });
    for (std::thread& t : threads) t.join();
  };
  on_threads(all.size(), [&](size_t i) {
    try {
      const cuda::CurrentContext context;
      (void)cuda::Source("test", programs[i].text(), programs[i].entries()[0]).load(context);
    } catch (const std::exception&) {  // reported again at launch
    }
  });
  std::vector<Memory> memories;
  for (size_t i = 0; i < all.size(); ++i) {
    const Case& c = all[i];
    SCOPED_TRACE(c.text());
    Memory& m = memories.emplace_back(memory_of(c, problems[i]));
    const OnDevice d = upload(m, c);
    cuda::DeviceBuffer state(sizeof kState);
    state.from_host(kState);
    RunArgs args = args_of(c, problems[i], d.in, d.out);
    const cuda::DeviceBuffer workspace(std::max<size_t>(1, programs[i].workspace(args.rows)));
    args.workspace = workspace.data();
    if (problems[i].random) args.random = static_cast<const uint64_t*>(state.data());
    ASSERT_TRUE(programs[i].suits(args));
    launch(programs[i], args, c.blocks);
    d.fetch(m);
  }
  std::vector<std::string> wrong(all.size());
  on_threads(all.size(), [&](size_t i) {
    const std::vector<View> in = views(memories[i].in), out = views(memories[i].out);
    // A product of codes aligns 32 terms and a sum to the largest of them and keeps 13 bits below
    // it. Usually few terms are as large. The codes of infinities are.
    const double lost = !all[i].codes ? 0 : all[i].specials ? 33 * 0x1p-13 : 0x1p-11;
    const auto why = verify_losing(problems[i].step, args_of(all[i], problems[i], in, out), lost);
    if (why) wrong[i] = *why;
    for (const Array& a : memories[i].out)
      if (a.given() && !a.guards_hold()) wrong[i] += "; padding was written";
  });
  size_t bad = 0;
  for (size_t i = 0; i < all.size(); ++i)
    if (!wrong[i].empty()) {
      ++bad;
      ADD_FAILURE() << all[i].text() << ": " << wrong[i];
    }
  std::printf("%zu cases, %zu wrong\n", all.size(), bad);
}

// The order of additions depends only on the inner size. It does not depend on the tile, the number
// of rows or blocks, or the run.
TEST_F(GemmOnGpu, ARowsBitsDependOnNothingElse) {
  struct Kind {
    const Codes* codes;
    std::vector<GemmTile> tiles;
  };
  const std::vector<GemmTile> alternate{GemmProgram::kNarrow, GemmProgram::kWide};
  const std::vector<GemmTile> promoted{GemmProgram::kPromoted};
  for (const Kind& kind :
       {Kind{nullptr, alternate}, Kind{&kCodes[4], alternate}, Kind{&kCodes[0], promoted},
        Kind{&kCodes[2], promoted}, Kind{&kCodes[3], promoted}}) {
    const Case c{.body = &body("f32"), .m = 700, .n = 416, .k = 1008, .codes = kind.codes};
    const Problem p = problem(c);
    std::vector<uint8_t> first;
    for (const GemmTile& tile : kind.tiles)
      for (const unsigned blocks : {1U, 3U, 132U, 132U, 132U})
        for (const int64_t rows : {700, 130}) {
          Memory m = memory_of(c, p);
          const OnDevice d = upload(m, c);
          RunArgs args = args_of(c, p, d.in, d.out);
          args.rows = rows;
          launch(GemmProgram(p.step, tile, kProcessors), args, blocks);
          d.fetch(m);
          std::vector<uint8_t> bytes(m.out[0].bytes.begin(),
                                     m.out[0].bytes.begin() + 130 * m.out[0].at.stride * 4);
          if (first.empty()) first = bytes;
          EXPECT_TRUE(bytes == first)
              << c.text() << ": " << tile.cols << ", " << blocks << " blocks, " << rows << " rows";
        }
  }
}

// The library chooses this kernel, it can be captured in a graph, and unsupported calls use the
// next maker.
TEST_F(GemmOnGpu, PlansTakeIt) {
  Case c{.body = &body("bias gelu"), .m = 1024, .n = 2048, .k = 128};
  const Problem p = problem(c);
  const Chosen chosen = kernel_for(p.step, Device::cuda);
  EXPECT_EQ(chosen.maker, "gemm");
  for (const int64_t rows : {1024, 1000, 3}) {
    c.m = rows;
    Memory m = memory_of(c, p);
    const OnDevice d = upload(m, c);
    const GpuStream stream;
    cuda::DeviceBuffer workspace(chosen.kernel->workspace(rows));
    RunArgs args = args_of(c, p, d.in, d.out);
    args.workspace = workspace.data();
    args.stream = stream.get();
    chosen.kernel->run(args);
    stream.wait();
    d.fetch(m);
    const std::vector<uint8_t> once = m.out[0].bytes;
    const GpuGraph graph(stream, [&] { chosen.kernel->run(args); });
    graph.replay();
    d.fetch(m);
    EXPECT_TRUE(m.out[0].bytes == once) << rows;
    const std::vector<View> in = views(m.in), out = views(m.out);
    if (rows > 100) continue;  // the reference takes a minute for more rows
    const auto wrong = verify(p.step, args_of(c, p, in, out));
    EXPECT_FALSE(wrong.has_value()) << rows << ": " << *wrong;
  }
}

}  // namespace
}  // namespace tenon::test
