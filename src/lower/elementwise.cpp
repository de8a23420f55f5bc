// Lowers elementwise formulas. The backward pass is `grad` of the formula, with its inputs loaded
// from saved tensors. The gradient of a row vector is a column sum. The gradient of one value per
// row is a row sum. The gradient of a tensor is a tensor.
#include <algorithm>
#include <array>
#include <map>

#include "lazy/halves.h"
#include "lower/stage.h"
#include "lower/trace.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// The format in which the policy `fp8` saves tensors: docs/plans.md.
Operand kept_fp8() {
  Operand o;
  o.format = {.dtype = DType::e4m3, .scaling = Scaling::block1x128, .power_of_two = true};
  return o;
}

class ElementwiseStage final : public Stage {
 public:
  ElementwiseStage(Planner& planner, OpState& op, const Elementwise& e)
      : Stage(planner, op), formula_(e.formula), trace_(trace(e.formula, e.halves ? 2 : 1)) {
    if (e.halves) halves_ = halves(*e.halves, op.cols / 2);
    if (trace_.random) ordinal_ = planner.random_stream();
  }

  [[nodiscard]] bool trains() const override {
    for (size_t i = inputs(); i < trace_.variables.size(); ++i)
      if (wanted(i)) return true;
    return false;
  }

  void prepare(bool needs_input, const Stage* /*before*/) override {
    for (size_t i = 0; i < trace_.variables.size(); ++i) {
      if (i < inputs() ? !needs_input : !wanted(i)) continue;
      for (size_t s = 0; s < trace_.variables.size(); ++s)
        if (trace_.gradients[i].mentions[s]) kept_.push_back(s);
    }
    saves_ = keeps(0) || (halves_ && keeps(1));
    if (!saves_ || op_.keep != Keep::recompute) return;
    for (size_t s = 0; s < trace_.variables.size(); ++s) kept_.push_back(s);
  }

  void forward(Flow& flow) override {
    const std::string name = op_.name + ".in";
    if (halves_) flow.whole_halves(name);
    if (saves_) save(flow, name);
    for (size_t s = inputs(); s < trace_.variables.size(); ++s)
      if (trace_.variables[s].kind == Variable::Kind::extra && keeps(s)) save_extra(flow, s);
    if (trace_.identity && !halves_) return;
    if (trace_.random) flow.uses_random();
    if (!halves_)
      flow.apply([this](Assembly& a, Expr e, const ColumnMap& m) {
        return leaving(value(a, std::span(&e, 1), m));
      });
    else
      flow.gate(*halves_, [this](Assembly& a, Expr x, Expr y) {
        const std::array in{x, y};
        return leaving(value(a, in, {}));
      });
  }

  void backward(Flow& flow, bool needs_input) override {
    const std::string name = op_.name + ".dy";
    if (halves_) flow.whole_halves(name);
    if (own_columns()) flow.own_columns(name);
    const Value g = flow.value();
    for (size_t s = inputs(); s < trace_.variables.size(); ++s) {
      if (!wanted(s)) continue;
      const auto [kind, number] = trace_.variables[s];
      if (kind == Variable::Kind::parameter)
        sum_into(planner_, flow, op_.index, op_.parameters[number], gradient_value(g, s), false);
      else
        op_.give_extra_grad[number](flow, gradient_value(g, s));
    }
    if (!needs_input || (trace_.gradients[0].seed && !halves_)) return;
    if (trace_.random) flow.uses_random();
    if (!halves_)
      flow.apply([this](Assembly& a, Expr e, const ColumnMap& m) {
        return leaving_backward(gradient(a, 0, e, m));
      });
    else
      flow.ungate(*halves_, [this](Assembly& a, Expr e) {
        return std::array{leaving_backward(gradient(a, 0, e, {})),
                          leaving_backward(gradient(a, 1, e, {}))};
      });
  }

  [[nodiscard]] Value again() const override {
    if (op_.keep != Keep::recompute || !saves_) return nullptr;
    auto lazy = std::make_shared<Lazy>();
    lazy->cols = op_.out_cols;
    lazy->make = [this](Assembly& a, const ColumnMap& m) {
      std::vector<Expr> in;
      for (size_t i = 0; i < inputs(); ++i) in.push_back(kept_input(a, i, m));
      return leaving(value(a, in, m, Pass::backward));
    };
    return lazy;
  }

 private:
  // The loads of one element. A variable that the gradient does not read becomes a placeholder.
  class Loads final : public Element {
   public:
    Loads(const ElementwiseStage& s, Assembly& a, const ColumnMap& m, Pass pass,
          const Trace::Gradient* of = nullptr)
        : stage_(s), a_(a), columns_(m), pass_(pass), of_(of), seen_(s.trace_.variables.size()) {}

    Expr parameter(size_t n) override { return at({Variable::Kind::parameter, n}); }
    Expr extra(size_t n) override { return at({Variable::Kind::extra, n}); }
    Expr random() override { return a_.random(stage_.ordinal_); }
    Expr constant(float value) override { return a_.parameter(value); }

    Expr at(const Variable& s) {
      const size_t i = stage_.trace_.at(s.kind, s.number);
      const bool hole = of_ && !of_->mentions[i];
      if (!seen_[i]) seen_[i] = hole ? a_.hole() : stage_.load(a_, i, columns_, pass_);
      return *seen_[i];
    }

   private:
    const ElementwiseStage& stage_;
    Assembly& a_;
    ColumnMap columns_;
    Pass pass_;
    const Trace::Gradient* of_;
    std::vector<std::optional<Expr>> seen_;
  };

  [[nodiscard]] size_t inputs() const { return halves_ ? 2 : 1; }
  // True if the gradient of this parameter or extra input is needed.
  [[nodiscard]] bool wanted(size_t variable) const {
    const auto [kind, number] = trace_.variables[variable];
    return kind == Variable::Kind::parameter ? op_.parameters[number].grad != nullptr
                                             : op_.give_extra_grad[number] != nullptr;
  }
  [[nodiscard]] bool keeps(size_t variable) const {
    return std::ranges::find(kept_, variable) != kept_.end();
  }
  // True if the formula reads random numbers or needs row sums. Both exist only at the step's own
  // columns.
  [[nodiscard]] bool own_columns() const {
    if (trace_.random) return true;
    return std::ranges::find(op_.extras, ExtraSchema::Kind::column, &ExtraSchema::kind) !=
           op_.extras.end();
  }

  Expr value(Assembly& a, std::span<const Expr> in, const ColumnMap& m,
             Pass pass = Pass::forward) const {
    Loads loads(*this, a, m, pass);
    return formula_(loads, in);
  }

  Expr gradient(Assembly& a, size_t variable, Expr g, const ColumnMap& m) const {
    Loads loads(*this, a, m, Pass::backward, &trace_.gradients[variable]);
    std::vector<Expr> in;
    for (size_t i = 0; i < inputs(); ++i) in.push_back(loads.at(trace_.variables[i]));
    const Expr y = formula_(loads, in);
    const Expr wrt = loads.at(trace_.variables[variable]);
    return a.grad(y, g, std::span(&wrt, 1))[0];
  }

  [[nodiscard]] Value gradient_value(const Value& g, size_t variable) const {
    if (trace_.gradients[variable].seed) return g;
    auto lazy = std::make_shared<Lazy>();
    lazy->cols = g->cols;
    lazy->make = [this, g, variable](Assembly& a, const ColumnMap& m) {
      const Expr d = gradient(a, variable, a.at(g, m), m);
      const auto [kind, number] = trace_.variables[variable];
      const bool summed =
          kind == Variable::Kind::parameter || op_.extras[number].kind != ExtraSchema::Kind::tensor;
      return summed ? d : leaving_backward(d);
    };
    return lazy;
  }

  Expr kept_input(Assembly& a, size_t i, const ColumnMap& m) const {
    return a.at(saved_, halves_ ? (*halves_)[i] : m);
  }
  Expr load(Assembly& a, size_t variable, const ColumnMap& m, Pass pass) const {
    const auto [kind, number] = trace_.variables[variable];
    if (kind == Variable::Kind::input) return kept_input(a, number, m);
    if (kind == Variable::Kind::parameter) return a.row(*op_.parameters[number].value, m);
    const Value& v = op_.extra_in[number];
    switch (op_.extras[number].kind) {
      case ExtraSchema::Kind::column:
        return a.column(*v->stored);
      case ExtraSchema::Kind::scalar:
        return a.scalar(*v->stored);
      case ExtraSchema::Kind::tensor:
        break;
    }
    return a.at(pass == Pass::forward ? v : extra_saved_.at(number), m);
  }

  void save(Flow& flow, const std::string& name) {
    if (planner_.keeps_nothing()) {
      saved_ = flow.value();
      return;
    }
    const DType dtype = planner_.request().dtype;
    if (op_.keep == Keep::recompute && !flow.value()->stored) {
      // The backward pass computes from the stored input. The forward pass therefore rounds its
      // input in the same way.
      flow.apply([dtype](Assembly&, Expr e, const ColumnMap&) { return round(e, dtype); });
      flow.why(name + " is carried on as stored, since backward computes from it again");
    }
    const bool plain = op_.keep != Keep::fp8;
    saved_ = in_memory(flow.keep(flow.value(), plain ? Operand(dtype) : kept_fp8(), Role::saved,
                                 plain ? name : name + ".fp8"));
  }
  // Only tensors can still be lazy at this point.
  void save_extra(Flow& flow, size_t variable) {
    const size_t number = trace_.variables[variable].number;
    const Value& v = op_.extra_in[number];
    if (op_.extras[number].kind != ExtraSchema::Kind::tensor) return;
    extra_saved_[number] =
        planner_.keeps_nothing()
            ? v
            : in_memory(flow.keep(v, Operand(planner_.request().dtype), Role::saved,
                                  str(op_.name, ".", op_.extras[number].name)));
  }

  Formula formula_;
  Trace trace_;
  std::optional<std::array<ColumnMap, 2>> halves_;
  uint32_t ordinal_ = 0;
  std::vector<size_t> kept_;  // variables that the needed gradients read
  bool saves_ = false;
  Value saved_;  // the input, as the backward pass reads it
  std::map<size_t, Value> extra_saved_;
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Elementwise& e) {
  return std::make_unique<ElementwiseStage>(planner, op, e);
}

}  // namespace tenon
