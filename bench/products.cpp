// Builds the steps of products with bodies.
#include "bench/products.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "lazy/builder.h"
#include "support/formula.h"
#include "tenon/error.h"

namespace tenon::bench {

namespace {

using From = Load::From;
using To = Store::To;
using support::call;

// A body under construction.
struct Draft {
  StepBuilder& build;
  DType dtype;
  int64_t m, n;  // of the results
  std::vector<ProductOutput>& outputs;

  Expr product(int64_t offset = 0) {
    return build.load({.from = From::product, .columns = {1, 1, offset}});
  }
  Expr swiglu() {
    const Expr x = product();
    return call("swiglu", x, product(n));
  }
  Expr bias() { return build.load({From::row, in_bias, dtype}); }
  void sum(uint32_t arg, Expr value) {
    build.store({To::column_sum, arg, dtype}, value);
    output(arg, {dtype, 1, n});
  }
  Expr tile(int64_t offset = 0) { return build.load({From::tile, in_tile, dtype, {1, 1, offset}}); }
  Expr parameter(uint32_t arg) { return build.load({.from = From::parameter, .arg = arg}); }

  void store(uint32_t arg, Expr value) {
    build.store({To::tile, arg, dtype}, value);
    output(arg, {dtype, m, n});
  }
  // Two halves of one tensor.
  void store_halves(uint32_t arg, Expr first, Expr second) {
    build.store({To::tile, arg, dtype}, first);
    build.store({To::tile, arg, dtype, {1, 1, n}}, second);
    output(arg, {dtype, m, 2 * n});
  }
  // Codes with one given scale, and their amax: six outputs.
  void encode(uint32_t arg, const Pieces& pieces, DType codes, bool columnwise = false) {
    const int64_t cols = static_cast<int64_t>(pieces.size()) * n;
    Operand o;
    o.format = {.dtype = codes, .scaling = Scaling::delayed};
    o.columnwise = columnwise;
    build.store(o, arg, in_scalar, cols, pieces);
    for (const Piece& p : pieces)
      build.store({.to = To::amax, .arg = arg + 5, .dtype = DType::f32, .join = true}, p.value);
    output(arg + Encoder::row_data, {codes, m, cols});
    output(arg + Encoder::row_scale, {DType::f32, 1, 1});
    if (columnwise) {
      output(arg + Encoder::column_data, {codes, cols, m});
      output(arg + Encoder::column_scale, {DType::f32, 1, 1});
    }
    output(arg + 5, {DType::f32, 1, 1});
  }
  void output(uint32_t arg, ProductOutput o) {
    outputs.resize(std::max<size_t>(outputs.size(), arg + 1));
    outputs[arg] = o;
  }
};

struct Body {
  std::string_view name;
  bool gated;
  void (*make)(Draft& d);
};
constexpr std::string_view kAccumulate = "f32 accumulate";
constexpr Body kBodies[] = {
    {"plain", false, [](Draft& d) { d.store(0, d.product()); }},
    {"bias", false, [](Draft& d) { d.store(0, d.product() + d.bias()); }},
    {"bias+gelu", false, [](Draft& d) { d.store(0, call("gelu", d.product() + d.bias())); }},
    {"bias+gelu, saved", false,
     [](Draft& d) {
       const Expr x = d.product() + d.bias();
       d.store(0, x);
       d.store(1, call("gelu", x));
     }},
    {"add", false, [](Draft& d) { d.store(0, d.product() + d.tile()); }},
    {"bias+dropout+add", false,
     [](Draft& d) {
       const Expr x = d.product() + d.bias();
       const Expr bits = d.build.load({.from = From::random});
       const Expr kept = select(bits >= d.parameter(0), x * d.parameter(1), 0.0F);
       d.store(0, d.tile() + kept);
     }},
    {kAccumulate, false,
     [](Draft& d) {
       d.dtype = DType::f32;
       d.store(0, d.tile() + d.product());
     }},
    {"gelu.bwd", false,
     [](Draft& d) {
       const Expr x = d.tile();
       d.store(0, d.build.grad(call("gelu", x), d.product(), std::span(&x, 1))[0]);
     }},
    {"gelu.bwd, dbias", false,
     [](Draft& d) {
       const Expr x = d.tile();
       const Expr dx = d.build.grad(call("gelu", x), d.product(), std::span(&x, 1))[0];
       d.store(0, dx);
       d.sum(1, dx);
     }},
    {"swiglu.bwd", false,
     [](Draft& d) {
       const std::array<Expr, 2> x{d.tile(), d.tile(d.n)};
       const auto grads = d.build.grad(call("swiglu", x[0], x[1]), d.product(), x);
       d.store_halves(0, grads[0], grads[1]);
     }},
    {"swiglu", true, [](Draft& d) { d.store(0, d.swiglu()); }},
    {"swiglu, saved", true,
     [](Draft& d) {
       const Expr x = d.product();
       const Expr y = d.product(d.n);
       d.store_halves(0, x, y);
       d.store(1, call("swiglu", x, y));
     }},
    {"swiglu -> e4m3 delayed", true,
     [](Draft& d) {
       d.encode(0, Pieces{{d.swiglu(), {}}}, DType::e4m3);
     }},
    {"swiglu -> e4m3 delayed rowcol", true,
     [](Draft& d) {
       d.encode(0, Pieces{{d.swiglu(), {}}}, DType::e4m3, true);
     }},
    {"swiglu, saved -> e4m3 delayed rowcol", true,
     [](Draft& d) {
       const Expr x = d.product();
       const Expr y = d.product(d.n);
       d.store_halves(6, x, y);
       d.encode(0, Pieces{{call("swiglu", x, y), {}}}, DType::e4m3, true);
     }},
    {"swiglu.bwd -> e5m2 delayed rowcol", false,
     [](Draft& d) {
       const ColumnMap second{1, 1, d.n};
       const std::array<Expr, 2> x{d.tile(), d.tile(d.n)};
       const auto grads = d.build.grad(call("swiglu", x[0], x[1]), d.product(), x);
       d.encode(0, Pieces{{grads[0], {}}, {grads[1], second}}, DType::e5m2, true);
     }},
};

}  // namespace

std::string ProductCase::name() const {
  return str(body, " ", m, "x", n, "x", k, " ", form, codes ? str(" e4m3 ", codes->name) : "");
}

std::vector<ProductCase> cpu_products() {
  std::vector<ProductCase> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const char* body : {"plain", "bias+gelu", "swiglu"})
      for (const char* form : {"nn", "nt"}) all.push_back({body, 2048, 2048, 2048, form, dtype});
    for (const int64_t m : {1, 8, 128}) all.push_back({"plain", m, 4096, 4096, "nt", dtype});
    all.push_back({"plain", 512, 4096, 1024, "nt", dtype});
  }
  return all;
}

std::vector<ProductCase> cuda_products() {
  return {
      {"plain", 8192, 28672, 4096},
      {"plain", 8192, 16384, 4096},
      {"plain", 4096, 4096, 4096},
      {"bias", 8192, 16384, 4096},
      {"bias", 8192, 4096, 14336},
      {"bias+gelu", 8192, 16384, 4096},
      {"bias+gelu", 8192, 4096, 14336},
      {"bias+gelu, saved", 8192, 16384, 4096},
      {"swiglu", 8192, 28672, 4096},
      {"swiglu", 8192, 8192, 14336},
      {"swiglu, saved", 8192, 28672, 4096},
      {"swiglu -> e4m3 delayed", 8192, 28672, 4096},
      {"gelu.bwd", 8192, 16384, 4096, "nn"},
      {"gelu.bwd, dbias", 8192, 16384, 4096, "nn"},
      {"swiglu.bwd", 8192, 14336, 4096, "nn"},
      {"plain", 8192, 4096, 28672, "nn"},
      {"plain", 28672, 4096, 8192, "tn"},
      {"f32 accumulate", 28672, 4096, 8192, "tn"},
      {"bias+dropout+add", 8192, 4096, 14336},
      {"add", 8192, 4096, 14336},
      {"bias+gelu", 8192, 16384, 1024},
      {"plain", 8192, 16384, 1024},
      {"swiglu", 64, 28672, 4096},
      {"swiglu", 128, 28672, 4096},
      {"swiglu", 256, 28672, 4096},
      {"swiglu", 512, 28672, 4096},
      {"swiglu", 1024, 28672, 4096},
      {"swiglu", 2048, 28672, 4096},
      {"bias+gelu", 512, 4096, 4096},
      {"bias+gelu", 1024, 1024, 4096},
      {"bias+gelu", 512, 512, 1024},
      {"plain", 512, 512, 8192},
      {"swiglu -> e4m3 delayed rowcol", 8192, 28672, 4096},
      {"plain", 8192, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"plain", 8192, 4096, 14336, "nt", DType::bf16, &kPrecise},
      {"plain", 4096, 4096, 4096, "nt", DType::bf16, &kPrecise},
      {"plain", 8192, 16384, 1024, "nt", DType::bf16, &kPrecise},
      {"plain", 8192, 4096, 28672, "nt", DType::bf16, &kPrecise},
      {"plain", 28672, 4096, 8192, "nt", DType::bf16, &kPrecise},
      {"bias+gelu", 8192, 16384, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu", 8192, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu", 512, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu", 1024, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu, saved", 8192, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu -> e4m3 delayed", 8192, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu -> e4m3 delayed rowcol", 8192, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu, saved -> e4m3 delayed rowcol", 8192, 28672, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu.bwd", 8192, 14336, 4096, "nt", DType::bf16, &kPrecise},
      {"swiglu.bwd -> e5m2 delayed rowcol", 8192, 14336, 4096, "nt", DType::bf16, &kPrecise},
      {"plain", 8192, 28672, 4096, "nt", DType::bf16, &kFast},
      {"plain", 8192, 4096, 14336, "nt", DType::bf16, &kFast},
      {"swiglu", 8192, 28672, 4096, "nt", DType::bf16, &kFast},
      {"swiglu -> e4m3 delayed rowcol", 8192, 28672, 4096, "nt", DType::bf16, &kFast},
      {"plain", 8192, 28672, 4096, "nt", DType::bf16, &kBlocks},
      {"plain", 8192, 4096, 14336, "nt", DType::bf16, &kBlocks},
      {"plain", 8192, 14336, 4096, "nt", DType::bf16, &kBlocks},
      {"plain", 8192, 4096, 28672, "nt", DType::bf16, &kBlocks},
      {"swiglu", 8192, 28672, 4096, "nt", DType::bf16, &kBlocks},
      {"swiglu, saved", 8192, 28672, 4096, "nt", DType::bf16, &kBlocks},
      {"plain", 512, 28672, 4096, "nt", DType::bf16, &kBlocks},
      {"plain", 28672, 4096, 8192, "nt", DType::bf16, &kLines},
      {"plain", 4096, 14336, 8192, "nt", DType::bf16, &kLines},
  };
}

DType tile_dtype(const ProductCase& c) { return c.body == kAccumulate ? DType::f32 : c.dtype; }

Product make_product(const ProductCase& c) {
  const auto* const body = std::ranges::find(kBodies, std::string_view(c.body), &Body::name);
  require(body != std::end(kBodies), "bench: there is no body '", c.body, "'");
  const int64_t cols = body->gated ? c.n / 2 : c.n;
  Product made;
  StepBuilder build(c.body, cols, Precision::native);
  Draft draft{build, c.dtype, c.m, cols, made.outputs};
  body->make(draft);
  made.step = build.finish();
  const auto side = [&](ProductIn arg) {
    return tenon::Matrix{
        .arg = arg, .format = c.format(arg), .transposed = c.transposed(arg == in_a ? 0 : 1)};
  };
  made.step.head = Gemm{side(in_a), side(in_b), c.n, c.k, c.codes && c.codes->fast};
  return made;
}

}  // namespace tenon::bench
