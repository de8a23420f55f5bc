// The state of one pass during lowering: the open value, and the open step with its other stores.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lower/assembly.h"
#include "lower/planner.h"

namespace tenon {

class Flow {
 public:
  using Side = std::function<void(Assembly&)>;

  Flow(Planner& planner, Pass pass) : planner_(planner), pass_(pass) {}

  [[nodiscard]] const Value& value() const { return value_; }
  [[nodiscard]] int64_t cols() const { return value_->cols; }
  [[nodiscard]] Factor rows() const { return rows_; }
  [[nodiscard]] int64_t serial() const { return serial_; }  // of the open step

  // Sets the value to a tensor in memory, or to another value that needs no earlier step.
  void begin(const StoredTensor& tensor);
  void begin(const Value& value);

  // value := f(value), elementwise.
  void apply(std::function<Expr(Assembly&, Expr, const ColumnMap&)> f);
  // whole_rows must be called before row totals. whole_halves must be called before a gate. Each
  // ends the open step if the step cannot hold them. The value is then stored in the tensor `name`.
  void whole_rows(const std::string& name);
  // Must be called before values that exist only at the step's own columns, such as random numbers.
  // Ends the open step if it has an open value of both halves.
  void own_columns(const std::string& name);
  void whole_halves(const std::string& name);
  // value := f(row of the value), with row totals.
  void apply_row(std::function<Expr(Assembly&, Expr)> f);
  // gate: two halves of one tensor to one value. ungate: one value to two halves.
  void gate(const std::array<ColumnMap, 2>& halves, std::function<Expr(Assembly&, Expr, Expr)> f);
  void ungate(const std::array<ColumnMap, 2>& halves,
              std::function<std::array<Expr, 2>(Assembly&, Expr)> f);
  // value := a·b, the head of a new step. The result has `rows.fixed` rows, or as many rows as a.
  void product(const StoredTensor& a, Orientation ao, bool a_transposed, const StoredTensor& b,
               Orientation bo, bool b_transposed, int64_t cols, int64_t inner, Factor rows,
               bool fast);
  void uses_random() { random_ = true; }

  // Adds another store to the open step.
  void side(Side side) {
    touch();
    sides_.push_back(std::move(side));
  }
  // Adds a store of the whole value in a plain tensor. A later reader of the same value uses it.
  void store(const Value& v, const StoredTensor& to);
  // The plain tensor of `dtype` in which the open step stores the value, or null.
  [[nodiscard]] const StoredTensor* stored(const Value& v, DType dtype) const;
  [[nodiscard]] Pieces pieces(Assembly& a, const Value& v) const;
  // A value of the open step as a plain tensor in memory. If the value is already in memory,
  // returns that tensor.
  const StoredTensor& keep(const Value& v, const Operand& as, Role role, const std::string& name);

  // If the value is already in workspace buffers, makes them the caller's output. Otherwise returns
  // null. `encoded`: the output is encoded.
  const StoredTensor* adopt(const std::string& name, Role role, bool encoded);
  // Stores the value and ends the step. The stored tensor becomes the value.
  void close(const StoredTensor& to);
  // The value in memory, encoded as an operand. Stores nothing if the value is already in memory.
  const StoredTensor& materialise(const std::string& name, Role role, const Operand& as);
  // Ends the open step if it has stores other than its value.
  void finish();
  // Adds a separate step after the open step is closed.
  void later(std::function<void()> emit) { later_.push_back(std::move(emit)); }
  void later_now();

  // The op that extends the value from now on.
  void op(size_t index) { op_ = index; }
  void why(const std::string& text) { why_ += (why_.empty() ? "" : "; ") + text; }

 private:
  // Records that the current op is part of the open step.
  void touch() {
    if (ops_.empty() || ops_.back() != op_) ops_.push_back(op_);
  }
  // `alone`: the name of a step that no op is part of.
  void emit(const std::function<void(Assembly&)>& body, const char* alone = "quantize");

  struct Product {
    const StoredTensor* a;
    const StoredTensor* b;
    Gemm gemm;
  };

  Planner& planner_;
  Pass pass_;
  Value value_;
  Factor rows_;
  int64_t serial_ = 0;
  std::optional<Product> gemm_;
  int64_t narrow_ = 0;  // columns of the step
  std::optional<std::array<ColumnMap, 2>> halves_;
  bool random_ = false, totals_ = false;
  std::vector<Side> sides_;
  std::vector<std::pair<Value, const StoredTensor*>> stored_;
  std::vector<std::function<void()>> later_;
  size_t op_ = 0;
  std::vector<size_t> ops_;
  std::string why_;
};

}  // namespace tenon
