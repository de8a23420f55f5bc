// An op of a chain while it is planned: how it extends the lazy value, in both passes.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lower/flow.h"
#include "tenon/activation.h"

namespace tenon {

// What a stage may ask for while it is made.
struct StageContext {
  Planner& planner;
  size_t index;  // of the op
  int64_t cols;  // of its input
  Factor rows;
};

class Stage {
 public:
  virtual ~Stage() = default;
  [[nodiscard]] virtual int64_t out_cols() const { return cols_; }
  [[nodiscard]] virtual Factor out_rows() const { return rows_; }
  [[nodiscard]] virtual size_t extra_inputs() const { return 0; }
  [[nodiscard]] virtual size_t extra_outputs() const { return 0; }
  // Whether a gradient of its own is wanted: parameters, extra inputs.
  [[nodiscard]] virtual bool trains() const { return false; }
  // An extra input is one number a row.
  [[nodiscard]] virtual bool extra_is_column() const { return false; }
  // Before anything is lowered: whether backward reaches it, and who makes its input.
  virtual void prepare(bool /*used*/, bool /*needs_input*/, const Stage* /*before*/) {}
  // Its output computed again in the backward pass, where it keeps only its input.
  [[nodiscard]] virtual Value again() const { return nullptr; }
  virtual void forward(Flow& flow) = 0;
  // `needs_input`: whether the gradient of its input is wanted.
  virtual void backward(Flow& flow, bool needs_input) = 0;

  std::vector<Value> extra_in;  // lazy where a channel of the open step feeds it
  std::vector<std::function<void(Flow&, const Value&)>> give_extra;       // extra outputs
  std::vector<std::function<void(Flow&, const Value&)>> give_extra_grad;  // of extra inputs
  std::vector<std::function<Value(Flow&)>> take_extra_grad;               // of extra outputs

 protected:
  explicit Stage(const StageContext& c) : index_(c.index), cols_(c.cols), rows_(c.rows) {}
  size_t index_;
  int64_t cols_;
  Factor rows_;
};

// The rows of the registry of ops: a name, what its arguments are called, how it is made.
class Arguments;
struct OpKind {
  std::string_view name;
  std::string_view arguments;  // names in order, separated by spaces
  // Which of them says how many columns its input has; without one its output has as many.
  std::string_view width;
  std::unique_ptr<Stage> (*make)(const StageContext&, const Arguments&);
};
inline constexpr std::string_view kUnknownWidth = "?";  // its output has others than its input
std::span<const OpKind> op_kinds();
// How many columns an op says that it reads, 0 where none can be told from here on; nothing if it
// only passes them on.
std::optional<int64_t> width_read(const Op& op, const std::string& who);

// Makers in files of their own.
std::unique_ptr<Stage> make_linear(const StageContext& c, const Arguments& a);
std::unique_ptr<Stage> make_layernorm(const StageContext& c, const Arguments& a);
std::unique_ptr<Stage> make_rmsnorm(const StageContext& c, const Arguments& a);
std::unique_ptr<Stage> make_l2norm(const StageContext& c, const Arguments& a);
std::unique_ptr<Stage> make_activation(const StageContext& c, const Op& op);
std::unique_ptr<Stage> make_opaque(const StageContext& c, const OpaqueOp& op);
std::unique_ptr<Stage> make_all_reduce(const StageContext& c, const Arguments& a);
std::unique_ptr<Stage> make_all_gather(const StageContext& c, const Arguments& a);
std::unique_ptr<Stage> make_reduce_scatter(const StageContext& c, const Arguments& a);

// The stage of an op; throws what is wrong with it.
std::unique_ptr<Stage> make_stage(const StageContext& context, const Op& op);

// The arguments of an op, by name or position; every one must be used.
class Arguments {
 public:
  Arguments(const Op& op, std::string_view names, std::string who);
  [[nodiscard]] const std::string& who() const { return who_; }
  [[nodiscard]] std::optional<double> number(std::string_view name) const;
  [[nodiscard]] std::optional<int64_t> integer(std::string_view name, int64_t least) const;
  [[nodiscard]] std::optional<std::string> text(std::string_view name) const;
  [[nodiscard]] std::optional<bool> flag(std::string_view name) const;

 private:
  [[nodiscard]] const OpArgument* find(std::string_view name) const;
  std::reference_wrapper<const Op> op_;
  std::vector<std::string> names_;
  std::string who_;
};

// An op that is none of the registry's: an activation or a formula, with its parameters.
std::pair<Activation, Arguments> activation_op(const Op& op, const std::string& who);

}  // namespace tenon
