// Lazy values, and the builder that makes one step from them.
#pragma once

#include <array>
#include <map>
#include <memory>

#include "lazy/builder.h"
#include "lower/data.h"

namespace tenon {

class Assembly;

// A value with `cols` columns. `make` computes it at the columns of a map.
struct Lazy {
  std::function<Expr(Assembly&, const ColumnMap&)> make;
  int64_t cols = 0;
  const StoredTensor* stored = nullptr;  // set if the value is a plain tensor in memory
};
using Value = std::shared_ptr<const Lazy>;
// A tensor in memory, unchanged.
Value in_memory(const StoredTensor& tensor);
// The value after a round trip through memory in `dtype`.
Value rounded(const Value& value, DType dtype);

// One step under construction: its loads, each location once, and its stores.
class Assembly {
 public:
  Assembly(std::string name, int64_t cols, Precision precision)
      : build_(std::move(name), cols, precision) {}

  Expr at(const Value& value, const ColumnMap& columns);

  Expr load(const StoredTensor& tensor, const ColumnMap& columns);
  Expr row(const StoredTensor& tensor, const ColumnMap& columns);  // a vector along the columns
  Expr column(const StoredTensor& tensor);                         // one value per row
  Expr scalar(const StoredTensor& tensor);                         // one value
  Expr parameter(float value);
  Expr random(uint32_t ordinal);
  Expr product(const ColumnMap& columns);
  // A placeholder load. It replaces an input that the derivative does not read, so no result
  // depends on it.
  Expr hole() { return build_.load({.from = Load::From::parameter}); }
  Expr total(Expr value);
  void norm(const Norm::Nodes& nodes) { build_.norm(nodes); }
  void norm_grad(size_t op, const NormGrad::Nodes& nodes) { build_.norm_grad(op, nodes); }

  void store(const StoredTensor& tensor, std::span<const Piece> pieces);
  void store_columns_sum(const StoredTensor& tensor, const ColumnMap& columns, Expr value,
                         bool ordered);
  void store_column(const StoredTensor& tensor, Expr value);
  void store_row_sum(const StoredTensor& tensor, Expr value);
  void store_sum(const StoredTensor& tensor, Expr value);  // over all elements
  void store_amax(const StoredTensor& tensor, int buffer, std::span<const Piece> pieces, bool join);

  uint32_t matrix(const StoredTensor& tensor, Orientation o);  // view of an operand of a product
  std::vector<Expr> grad(Expr out, Expr seed, std::span<const Expr> wrt) {
    return build_.grad(out, seed, wrt);
  }

  PlanStep finish(std::optional<Gemm> gemm, int64_t fixed_rows);

 private:
  void store_one(Store::To to, const StoredTensor& tensor, Expr value);
  uint32_t input(const BufferView& view);
  uint32_t output(const BufferView& view);
  Expr once(const Load& load);

  StepBuilder build_;
  PlanStep made_;
  std::map<std::pair<const Lazy*, std::array<int64_t, 3>>, Expr> known_;
  std::vector<std::pair<Load, Expr>> loads_;
  std::vector<std::pair<uint32_t, Expr>> totals_;
  std::vector<Value> kept_;  // keeps the values alive: their addresses are the keys of known_
};

}  // namespace tenon
