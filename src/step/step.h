// One kernel as data: the sources of its loads, its formulas, and the destinations of its results.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tenon/expr.h"
#include "tenon/format.h"
#include "tenon/options.h"

namespace tenon {

// Column c of the step is at (c ÷ block)·stride + c mod block + offset of the tensor. Halves of a
// gated tensor are thus read and written in place, in any layout.
struct ColumnMap {
  int64_t block = 1, stride = 1, offset = 0;

  [[nodiscard]] int64_t operator()(int64_t c) const {
    return c / block * stride + c % block + offset;
  }
  [[nodiscard]] bool contiguous() const { return block == stride; }
  friend bool operator==(const ColumnMap&, const ColumnMap&) = default;
};

struct Load {
  // block: the scale of an encoded input. random: 16 bits of the stream as a number. product: an
  // element of the Gemm head; a kernel may round it to `dtype`. total: a row total of the step.
  enum class From : uint8_t { tile, row, column, scalar, parameter, block, random, product, total };
  From from = From::tile;
  // Index of the input view, parameter or row total. For random, the index of its Dropout.
  uint32_t arg = 0;
  DType dtype = DType::f32;
  ColumnMap columns = {};
  bool transposed = false;  // tile: element (r, c) is in row c, column r
  Format format = {};       // block: format of the scaled tensor
  Orientation orientation = Orientation::rowwise;
};
// True if the load reads an input view. `arg` is its index.
constexpr bool reads_view(const Load& l) {
  return l.from != Load::From::parameter && l.from != Load::From::random &&
         l.from != Load::From::product && l.from != Load::From::total;
}

struct Store {
  // encoded: elements of an encoder's tensor. column: one value per row, which does not depend on
  // the column.
  enum class To : uint8_t { tile, column_sum, row_sum, sum, amax, encoded, column };
  To to = To::tile;
  uint32_t arg = 0;  // index of the output view or of the encoder
  DType dtype = DType::f32;
  ColumnMap columns = {};
  uint32_t value = 0;  // node of the graph
  bool join = false;   // amax: store the maximum of the result and the value in the view
  // column_sum: the rows of each aligned block of 32 are added in index order. A tree adds the
  // blocks.
  bool ordered = false;
};

inline constexpr std::array<std::string_view, 9> kLoadNames{
    "tile", "row", "column", "scalar", "parameter", "block", "random", "product", "total"};
inline constexpr std::array<std::string_view, 7> kStoreNames{"tile", "column_sum", "row_sum", "sum",
                                                             "amax", "encoded",    "column"};

// An output whose elements depend on their neighbours: it has block scales or a transposed copy.
// Its elements come from the stores that name it. A gated gradient in one tensor has two such
// stores.
struct Encoder {
  // Its views are consecutive in the outputs. scale_inv and health are used only if they exist.
  enum Out : uint32_t { row_data, row_scale, column_data, column_scale, health, outputs };

  Format format;
  int64_t cols = 0;    // columns of the tensor
  uint32_t out = 0;    // the first of its output views
  uint32_t scale = 0;  // input view: the multiplier (delayed) or the amax (current)
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

// An operand of a product: codes at input `arg`, and scale_inv at the next input if the format has
// one.
struct Matrix {
  uint32_t arg = 0;
  Format format = {};
  // The encoding of the tensor that the codes belong to.
  Orientation orientation = Orientation::rowwise;
  bool transposed = false;  // the product uses the transpose of the tensor

  // Whether memory holds the codes of the transposed tensor.
  [[nodiscard]] bool codes_transposed() const {
    return orientation == Orientation::columnwise && info(format.scaling).transposes;
  }
};

// product(r, c) = Σ a(r, k)·b(k, c) in fp32. The order of the sum depends only on the size of k.
// After transposition a is rows x inner and b is inner x cols.
struct Gemm {
  Matrix a, b;
  int64_t cols = 0;  // a gated body has half as many
  // 0: the rows of the call, as in a weight gradient; the step then fixes its own rows
  int64_t inner = 0;
  // FP8 operands may be summed with fewer bits than fp32 has, e.g. in the tensor cores of Hopper.
  bool fast = false;

  // The terms of each sum, in a call of `given` rows.
  [[nodiscard]] int64_t inner_for(int64_t given) const { return inner ? inner : given; }
};

inline constexpr uint32_t kNoNode = UINT32_MAX;
enum class NormKind : uint8_t { layer, rms, l2 };

// A head for operations on whole rows. `totals` are nodes. Later nodes load the tree sums of these
// nodes over the row. A node reads only totals with a smaller index than its own.
struct Norm {
  // Nodes of the graph: mean = Σx/n (layer), rstdev = rsqrt(Σ(x − mean)²/n + eps), without n for
  // l2, and the normalised y = (x − mean)·rstdev.
  struct Nodes {
    NormKind kind = NormKind::rms;
    uint32_t x = kNoNode, eps = kNoNode, mean = kNoNode, rstdev = kNoNode, y = kNoNode;
  };
  std::vector<uint32_t> totals;
  std::vector<Nodes> norms;  // norms of the step, in order
};

// The nodes of a norm's backward pass. Nodes that no store needs are absent. w is the gradient
// times gamma, mean and rstdev are the saved statistics, normal = (x − mean)·rstdev (not for l2).
struct NormGrad {
  struct Nodes {
    NormKind kind = NormKind::rms;
    uint32_t w = kNoNode, x = kNoNode, mean = kNoNode, rstdev = kNoNode, normal = kNoNode,
             dx = kNoNode;
  };
  std::vector<uint32_t> totals;
  std::vector<Nodes> norms;
};

// The nodes of one norm, to read or to renumber.
template <class Nodes>
auto nodes_of(Nodes& p) {
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
// element all loads come before all stores. Exact in-place calls are therefore correct.
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
  DType dtype = DType::f32;  // of the chain: native values between two steps are stored in it

  [[nodiscard]] bool is_map() const { return std::holds_alternative<Map>(head); }
  [[nodiscard]] const Gemm* gemm() const { return std::get_if<Gemm>(&head); }
  [[nodiscard]] const Norm* norm() const { return std::get_if<Norm>(&head); }
  [[nodiscard]] const NormGrad* norm_grad() const { return std::get_if<NormGrad>(&head); }
  [[nodiscard]] std::string_view head_name() const { return kHeads[head.index()]; }
  // The totals of a norm or of its backward pass.
  [[nodiscard]] std::span<const uint32_t> totals() const;
  // The values of the stores, then the totals.
  [[nodiscard]] std::vector<uint32_t> roots() const;
  // Rows of the body, in a call of `given` rows.
  [[nodiscard]] int64_t body_rows(int64_t given) const { return rows ? rows : given; }

  // Strict if requested, and strict if a result is stored in fp32: native gives the same guarantee
  // there. An amax follows the precision of the other results. A step that stores only an amax uses
  // the requested precision.
  [[nodiscard]] Precision effective_precision() const;
  // Whether the results have the bits of strict precision. Native results in fp32 may have others
  // with the same bounds, but not together with codes: an amax of the values that are encoded may
  // come from another step.
  [[nodiscard]] bool strict_bits() const;
  // The relative error that every result allows for a transcendental operation. 0 in strict
  // precision.
  [[nodiscard]] double native_error() const;

  // Minimum memory traffic of a call of `rows` rows, in bytes: each input and output once.
  [[nodiscard]] int64_t bytes(int64_t rows) const;
  // Two for each term of a product.
  [[nodiscard]] int64_t flops(int64_t rows) const;

  // Removes loads that no root reads.
  void drop_unused_loads();

  // Equal keys mean equal kernels. The key does not contain the rows.
  [[nodiscard]] std::string key() const;

  // One line: loads, operations, stores.
  [[nodiscard]] std::string describe() const;
};

// The numbers of the views that a step reads and writes. Optional views are included.
[[nodiscard]] std::set<uint32_t> input_views(const Step& step);
[[nodiscard]] std::set<uint32_t> output_views(const Step& step);

}  // namespace tenon
