// One pass while it is lowered: the open value, what the open step must also store, and closing it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lower/assembly.h"
#include "lower/planner.h"

namespace tenon {

class Flow {
 public:
  using Parts = std::vector<StepBuilder::Part>;
  using Side = std::function<void(Assembly&)>;

  Flow(Planner& planner, Pass pass) : planner_(planner), pass_(pass) {}

  [[nodiscard]] const Value& value() const { return value_; }
  [[nodiscard]] int64_t cols() const { return value_->cols; }
  [[nodiscard]] Factor rows() const { return rows_; }
  [[nodiscard]] int64_t serial() const { return serial_; }  // of the open step

  // The value is a tensor in memory, or any other that needs no step before.
  void begin(const StoredTensor& tensor);
  void begin(const Value& value);

  // value := f(value), element by element.
  void apply(std::function<Expr(Assembly&, Expr, const ColumnMap&)> f);
  // Before row totals, and before halves: ends a step that cannot hold them; `name` is the tensor
  // that then lies between.
  void whole_rows(const std::string& name);
  // Before what exists at the step's own columns only, as random numbers do: not where a value of
  // both halves is open.
  void own_columns(const std::string& name);
  void whole_halves(const std::string& name);
  // value := f(value's row), with row totals.
  void apply_row(std::function<Expr(Assembly&, Expr)> f);
  // Halves of one tensor to one value, and back.
  void gate(const std::array<ColumnMap, 2>& halves, std::function<Expr(Assembly&, Expr, Expr)> f);
  void ungate(const std::array<ColumnMap, 2>& halves,
              std::function<std::array<Expr, 2>(Assembly&, Expr)> f);
  // value := a·b, the head of a new step. `fixed` rows, or the rows that a has.
  void product(const StoredTensor& a, Orientation ao, bool a_transposed, const StoredTensor& b,
               Orientation bo, bool b_transposed, int64_t cols, int64_t inner, Factor rows);
  void uses_random() { random_ = true; }

  // Something else that the open step stores.
  void side(Side side) {
    touch();
    sides_.push_back(std::move(side));
  }
  [[nodiscard]] Parts parts(Assembly& a, const Value& v) const;
  // A value of the open step as a plain tensor in memory; where it is one already, that one.
  const StoredTensor& keep(const Value& v, const Operand& as, Role role, const std::string& name);

  // A value that lies in workspace already becomes the caller's; null where it does not.
  const StoredTensor* adopt(const std::string& name, Role role);
  // Stores the value and ends the step; the value is then what was stored.
  void close(const StoredTensor& to);
  // The value in memory, as an operand; nothing is stored where it is there already.
  const StoredTensor& materialise(const std::string& name, Role role, const Operand& as);
  // Ends the open step where it has something to store beside its value.
  void finish();
  // A step of its own, once the open one is closed.
  void later(std::function<void()> emit) { later_.push_back(std::move(emit)); }
  void later_now();

  // The op that extends the value from here on.
  void op(size_t index) { op_ = index; }
  void why(const std::string& text) { why_ += (why_.empty() ? "" : "; ") + text; }

 private:
  // The op takes part in the open step.
  void touch() {
    if (ops_.empty() || ops_.back() != op_) ops_.push_back(op_);
  }
  void emit(const std::function<void(Assembly&)>& body);

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
  std::vector<std::function<void()>> later_;
  size_t op_ = 0;
  std::vector<size_t> ops_;
  std::string why_;
};

}  // namespace tenon
