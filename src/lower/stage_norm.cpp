// Norms of rows: totals of the open step.
#include "lower/stage_parts.h"
#include "ops/norm.h"
#include "tenon/error.h"

namespace tenon {

namespace {

class NormStage final : public Stage {
 public:
  NormStage(const StageContext& c, NormKind type, float eps, bool zero_centered)
      : Stage(c), planner_(c.planner), type_(type), eps_(eps), zero_centered_(zero_centered) {
    const float one = zero_centered ? 0.0F : 1.0F;
    if (type != NormKind::l2) gamma_ = ParameterPlace::make(c, "gamma", 1, c.cols, {one, one});
    if (type == NormKind::layer) beta_ = ParameterPlace::make(c, "beta", 1, c.cols, {});
  }
  [[nodiscard]] bool trains() const override { return gamma_.grad || beta_.grad; }
  // The gradient of beta needs nothing of the forward pass.
  void prepare(bool, bool needs_input, const Stage*) override {
    saves_ = needs_input || gamma_.grad != nullptr;
  }

  void forward(Flow& flow) override {
    const std::string name = planner_.op_name(index_);
    flow.whole_rows(name + ".in");
    const Value x = flow.value();
    flow.apply_row([this](Assembly& a, Expr e) {
      const NormStatistics n = statistics(a, e);
      Expr y = n.from_mean * n.rstdev;
      a.norm(norm_part(type_, e, a.parameter(eps_), n, y));
      if (gamma_.value) y = y * scale(a);
      if (beta_.value) y = y + a.row(*beta_.value, {});
      return planner_.between(y);
    });
    if (!saves_) return;
    saved_ = &flow.keep(x, Operand(planner_.request().dtype), Role::saved, name + ".in");
    r_ = &planner_.place(name + ".rstdev", Role::saved, Operand(DType::f32), 1, flow.rows());
    if (type_ == NormKind::layer)
      m_ = &planner_.place(name + ".mean", Role::saved, Operand(DType::f32), 1, flow.rows());
    flow.side([this, x](Assembly& a) {
      const NormStatistics n = statistics(a, a.at(x, {}));
      if (m_) a.store_column(*m_, *n.mean);
      a.store_column(*r_, n.rstdev);
    });
  }

  void backward(Flow& flow, bool needs_input) override {
    flow.whole_rows(planner_.op_name(index_) + ".dy");
    const Value g = flow.value();
    if (trains()) flow.side([this](Assembly& a) { a.norm_grad(index_, {.kind = type_}); });
    if (beta_.grad) sum_into(planner_, flow, index_, beta_, g, true);
    if (gamma_.grad) {
      auto product = std::make_shared<Lazy>();
      product->cols = cols_;
      product->make = [this, g](Assembly& a, const ColumnMap& m) {
        const Expr e = a.at(g, m) * (from_mean(a, m) * a.column(*r_));
        a.norm_grad(index_, part(a, m));
        return e;
      };
      sum_into(planner_, flow, index_, gamma_, product, true);
    }
    if (!needs_input) return;
    flow.apply_row([this](Assembly& a, Expr e) {
      const Expr w = gamma_.value ? e * scale(a) : e;
      const Expr dx = norm_gradient(type_, cols_, w, from_mean(a, {}), a.column(*r_), total(a));
      NormGrad::Part said = part(a, {});
      said.w = w.id();
      said.dx = dx.id();
      a.norm_grad(index_, said);
      return planner_.between(dx);
    });
  }

 private:
  static RowTotal total(Assembly& a) {
    return [&a](Expr e) { return a.total(e); };
  }
  NormStatistics statistics(Assembly& a, Expr x) const {
    return norm_statistics(type_, cols_, x, a.parameter(eps_), total(a));
  }
  Expr scale(Assembly& a) const {
    const Expr gamma = a.row(*gamma_.value, {});
    return zero_centered_ ? gamma + 1.0F : gamma;
  }
  Expr from_mean(Assembly& a, const ColumnMap& m) const {
    const Expr x = a.load(*saved_, m);
    return m_ ? x - a.column(*m_) : x;
  }

  NormGrad::Part part(Assembly& a, const ColumnMap& m) const {
    return norm_grad_part(type_, a.load(*saved_, m),
                          m_ ? std::optional(a.column(*m_)) : std::nullopt, a.column(*r_));
  }

  Planner& planner_;
  NormKind type_;
  float eps_;
  bool zero_centered_;
  ParameterPlace gamma_, beta_;
  bool saves_ = false;
  const Place* saved_ = nullptr;
  const Place* m_ = nullptr;
  const Place* r_ = nullptr;
};

template <NormKind type>
std::unique_ptr<Stage> make_norm(const StageContext& c, const Arguments& a) {
  if (type != NormKind::l2) {
    const std::optional<int64_t> n = a.integer("n", 1);
    require(!n || *n == c.cols, a.who(), ": its input has ", c.cols, " columns, it wants ",
            n ? *n : 0);
  }
  const double eps = a.number("eps").value_or(type == NormKind::l2 ? 1e-6 : 1e-5);
  require(eps >= 0, a.who(), ": eps is ", eps, "; it must not be negative");
  return std::make_unique<NormStage>(
      c, type, static_cast<float>(eps),
      type != NormKind::l2 && a.flag("zero_centered_gamma").value_or(false));
}

}  // namespace

std::unique_ptr<Stage> make_layernorm(const StageContext& c, const Arguments& a) {
  return make_norm<NormKind::layer>(c, a);
}
std::unique_ptr<Stage> make_rmsnorm(const StageContext& c, const Arguments& a) {
  return make_norm<NormKind::rms>(c, a);
}
std::unique_ptr<Stage> make_l2norm(const StageContext& c, const Arguments& a) {
  return make_norm<NormKind::l2>(c, a);
}

}  // namespace tenon
