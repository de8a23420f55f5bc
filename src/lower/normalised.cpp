// Lowers norms of rows with row totals of the open step.
#include "lazy/norm.h"
#include "lower/stage.h"

namespace tenon {

namespace {

class NormalisedStage final : public Stage {
 public:
  NormalisedStage(Planner& planner, OpState& op, const Normalised& e)
      : Stage(planner, op), norm_(e), saved_(op.kept_input), m_(op.kept_mean), r_(op.kept_rstdev) {
    if (!op.parameters.empty()) gamma_ = op.parameters[0];
    if (op.parameters.size() > 1) beta_ = op.parameters[1];
  }
  [[nodiscard]] bool trains() const override { return gamma_.grad || beta_.grad; }
  // The gradient of beta reads nothing from the forward pass.
  void prepare(bool needs_input, const Stage* /*before*/) override {
    saves_ = needs_input || gamma_.grad != nullptr;
  }

  void forward(Flow& flow) override {
    flow.whole_rows(op_.name + ".in");
    const Value x = flow.value();
    flow.apply_row([this](Assembly& a, Expr e) {
      const NormStatistics n = statistics(a, e);
      Expr y = n.from_mean * n.rstdev;
      a.norm(norm_nodes(norm_.kind, e, a.parameter(norm_.eps), n, y));
      if (gamma_.value) y = y * scale(a);
      if (beta_.value) y = y + a.row(*beta_.value, {});
      return leaving(y);
    });
    if (saves_ && !planner_.keeps_nothing()) {
      saved_ = &flow.keep(x, Operand(planner_.request().dtype), Role::saved, op_.name + ".in");
      r_ = &planner_.tensor(op_.name + ".rstdev", Role::saved, Operand(DType::f32), 1, flow.rows());
      if (norm_.kind == NormKind::layer)
        m_ = &planner_.tensor(op_.name + ".mean", Role::saved, Operand(DType::f32), 1, flow.rows());
    }
    if (!m_ && !r_) return;
    flow.side([this, x](Assembly& a) {
      const NormStatistics n = statistics(a, a.at(x, {}));
      if (m_) a.store_column(*m_, *n.mean);
      if (r_) a.store_column(*r_, n.rstdev);
    });
  }

  void backward(Flow& flow, bool needs_input) override {
    flow.whole_rows(op_.name + ".dy");
    const Value g = flow.value();
    if (trains()) flow.side([this](Assembly& a) { a.norm_grad(op_.index, {.kind = norm_.kind}); });
    if (beta_.grad) sum_into(planner_, flow, op_.index, beta_, g, true);
    if (gamma_.grad) {
      auto product = std::make_shared<Lazy>();
      product->cols = op_.cols;
      product->make = [this, g](Assembly& a, const ColumnMap& m) {
        const Expr e = a.at(g, m) * (from_mean(a, m) * a.column(*r_));
        a.norm_grad(op_.index, nodes(a, m));
        return e;
      };
      sum_into(planner_, flow, op_.index, gamma_, product, true);
    }
    if (!needs_input) return;
    flow.apply_row([this](Assembly& a, Expr e) {
      const Expr w = gamma_.value ? e * scale(a) : e;
      const Expr dx =
          norm_gradient(norm_.kind, op_.cols, w, from_mean(a, {}), a.column(*r_), total(a));
      NormGrad::Nodes said = nodes(a, {});
      said.w = w.id();
      said.dx = dx.id();
      a.norm_grad(op_.index, said);
      return leaving_backward(dx);
    });
  }

 private:
  static RowTotal total(Assembly& a) {
    return [&a](Expr e) { return a.total(e); };
  }
  NormStatistics statistics(Assembly& a, Expr x) const {
    return norm_statistics(norm_.kind, op_.cols, x, a.parameter(norm_.eps), total(a));
  }
  Expr scale(Assembly& a) const {
    const Expr gamma = a.row(*gamma_.value, {});
    return norm_.zero_centered_gamma ? gamma + 1.0F : gamma;
  }
  Expr from_mean(Assembly& a, const ColumnMap& m) const {
    const Expr x = a.load(*saved_, m);
    return m_ ? x - a.column(*m_) : x;
  }

  NormGrad::Nodes nodes(Assembly& a, const ColumnMap& m) const {
    return norm_grad_nodes(norm_.kind, a.load(*saved_, m),
                           m_ ? std::optional(a.column(*m_)) : std::nullopt, a.column(*r_));
  }

  Normalised norm_;
  ParameterTensor gamma_, beta_;
  bool saves_ = false;
  const StoredTensor* saved_;
  const StoredTensor* m_;
  const StoredTensor* r_;
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Normalised& e) {
  return std::make_unique<NormalisedStage>(planner, op, e);
}

}  // namespace tenon
