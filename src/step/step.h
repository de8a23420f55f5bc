// One kernel as data: where each load comes from, the formulas, where each result goes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tenon/expr.h"
#include "tenon/format.h"
#include "tenon/options.h"

namespace tenon {

// Column c of the step lies at (c ÷ block)·stride + c mod block + offset of the tensor, so halves
// of a gated tensor are read and written in place whatever their layout.
struct ColumnMap {
  int64_t block = 1, stride = 1, offset = 0;

  [[nodiscard]] int64_t operator()(int64_t c) const {
    return c / block * stride + c % block + offset;
  }
  [[nodiscard]] bool contiguous() const { return block == stride; }
  friend bool operator==(const ColumnMap&, const ColumnMap&) = default;
};

struct Load {
  // block: the scale of an encoded input; random: 16 bits of the stream as a number; product: an
  // element of the Gemm head; total: a row total of the step.
  enum class From : uint8_t { tile, row, column, scalar, parameter, block, random, product, total };
  From from = From::tile;
  // Which input view, parameter or row total; for random, the ordinal of its Dropout.
  uint32_t arg = 0;
  DType dtype = DType::f32;
  ColumnMap columns = {};
  bool transposed = false;  // tile: (r, c) lies in row c, column r
  Format format = {};       // block: of the tensor that is scaled
  Orientation orientation = Orientation::rowwise;
};

struct Store {
  // encoded: elements of an encoder's tensor; column: one number a row, which depends on no column.
  enum class To : uint8_t { tile, column_sum, row_sum, sum, amax, encoded, column };
  To to = To::tile;
  uint32_t arg = 0;  // which output view, or which encoder
  DType dtype = DType::f32;
  ColumnMap columns = {};
  uint32_t value = 0;  // node of the graph
  bool join = false;   // amax: the larger of the result and of what the view holds
  // column_sum: the rows of each aligned block of 32 are added in index order; blocks form the
  // tree.
  bool ordered = false;
};

inline constexpr std::array<std::string_view, 9> kLoadNames{
    "tile", "row", "column", "scalar", "parameter", "block", "random", "product", "total"};
inline constexpr std::array<std::string_view, 7> kStoreNames{"tile", "column_sum", "row_sum", "sum",
                                                             "amax", "encoded",    "column"};

// An output whose elements need their neighbours: scales of blocks, transposed copies. Its elements
// come from the stores that name it, two where a gated gradient is one tensor.
struct Encoder {
  // Its views follow one another in the outputs; scale_inv and health only where there is one.
  enum Out : uint32_t { row_data, row_scale, column_data, column_scale, health, outputs };

  Format format;
  int64_t cols = 0;    // of the tensor
  uint32_t out = 0;    // the first of its output views
  uint32_t scale = 0;  // input view: the multiplier of delayed, the amax of current
  bool rowwise = true, columnwise = false, counts = false;

  [[nodiscard]] bool has(Orientation o) const {
    return o == Orientation::rowwise ? rowwise : columnwise;
  }
  [[nodiscard]] uint32_t data(Orientation o) const {
    return out + (o == Orientation::rowwise ? row_data : column_data);
  }
  [[nodiscard]] uint32_t scale_inv(Orientation o) const {
    return out + (o == Orientation::rowwise ? row_scale : column_scale);
  }
};
inline constexpr std::array kOrientations{Orientation::rowwise, Orientation::columnwise};

// A tensor in a product: codes at input `arg`, scale_inv behind them where the format has one.
struct Matrix {
  uint32_t arg = 0;
  Format format = {};
  Orientation orientation = Orientation::rowwise;  // which encoding of the tensor the codes are
  bool transposed = false;                         // the product takes the tensor's transpose
};

// product(r, c) = Σ a(r, k)·b(k, c) in fp32, in an order that k alone decides. a is rows x inner,
// b inner x cols after their transpositions.
struct Gemm {
  Matrix a, b;
  int64_t cols = 0;   // a gated body has half as many
  int64_t inner = 0;  // 0: the call's rows, as in a weight's gradient; the step then fixes its own
};

inline constexpr uint32_t kNoNode = UINT32_MAX;
enum class NormKind : uint8_t { layer, rms, l2 };

// Whole rows. `totals` are nodes whose tree sums over the row are loads of later nodes; a node
// reads totals before its own only.
struct Norm {
  // mean = Σx/n (layer), rstdev = rsqrt(Σ(x − mean)²/n + eps), without n for l2, and the normalised
  // y = (x − mean)·rstdev: nodes of the graph.
  struct Part {
    NormKind kind = NormKind::rms;
    uint32_t x = kNoNode, eps = kNoNode, mean = kNoNode, rstdev = kNoNode, y = kNoNode;
  };
  std::vector<uint32_t> totals;
  std::vector<Part> parts;  // norms of the step, first to last
};

// What a norm's backward holds; the nodes that its stores do not need are absent. w is the gradient
// times gamma, mean and rstdev are the saved ones, normal = (x − mean)·rstdev (not of l2).
struct NormGrad {
  struct Part {
    NormKind kind = NormKind::rms;
    uint32_t w = kNoNode, x = kNoNode, mean = kNoNode, rstdev = kNoNode, normal = kNoNode,
             dx = kNoNode;
  };
  std::vector<uint32_t> totals;
  std::vector<Part> parts;
};

// The nodes of a part, to read or to renumber.
template <class Part>
auto nodes_of(Part& p) {
  if constexpr (requires { p.dx; })
    return std::array{&p.w, &p.x, &p.mean, &p.rstdev, &p.normal, &p.dx};
  else
    return std::array{&p.x, &p.eps, &p.mean, &p.rstdev, &p.y};
}

struct Map {};
using Head = std::variant<Map, Gemm, Norm, NormGrad>;
inline constexpr std::array<std::string_view, std::variant_size_v<Head>> kHeads{
    "map", "gemm", "norm", "norm_grad"};

// A body over rows x cols elements, after a head. Slot i of the graph reads loads[i]. Within one
// element all loads come before all stores, which is what makes exact in-place calls right.
struct Step {
  std::string name;
  std::shared_ptr<const Graph> graph;
  std::vector<Load> loads;
  std::vector<Store> stores;
  std::vector<Encoder> encoders;
  Head head;
  int64_t rows = 0;  // 0: the call gives them
  int64_t cols = 0;
  Precision precision = Precision::native;
  DType dtype = DType::f32;  // of the chain: what a native value between two steps is kept in

  [[nodiscard]] bool is_map() const { return std::holds_alternative<Map>(head); }
  [[nodiscard]] const Gemm* gemm() const { return std::get_if<Gemm>(&head); }
  [[nodiscard]] const Norm* norm() const { return std::get_if<Norm>(&head); }
  [[nodiscard]] const NormGrad* norm_grad() const { return std::get_if<NormGrad>(&head); }
  [[nodiscard]] std::string_view head_name() const { return kHeads[head.index()]; }
  // Of a norm or its backward.
  [[nodiscard]] std::span<const uint32_t> totals() const;
  // The stores' values, then the totals.
  [[nodiscard]] std::vector<uint32_t> roots() const;
  // Of the body, in a call of `given` rows.
  [[nodiscard]] int64_t body_rows(int64_t given) const { return rows ? rows : given; }

  // Strict where asked, and wherever a result is kept in fp32: native promises no less there.
  // An amax is a by-product and follows the others; alone it is as asked.
  [[nodiscard]] Precision effective_precision() const;
  // The relative error of a transcendental word that every result allows; 0 in strict precision.
  [[nodiscard]] double native_error() const;

  // Bytes that must move in a call of `rows` rows: each input and output once.
  [[nodiscard]] int64_t bytes(int64_t rows) const;
  // Two for each term of a product.
  [[nodiscard]] int64_t flops(int64_t rows) const;

  // Takes out loads that no root reads.
  void drop_unused_loads();

  // Equal keys mean equal kernels; rows are not part of it.
  [[nodiscard]] std::string key() const;

  // One line: loads, words, stores.
  [[nodiscard]] std::string describe() const;
};

}  // namespace tenon
