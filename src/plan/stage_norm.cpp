// Norms of rows: totals of the open step.
#include "plan/stage_parts.h"
#include "tenon/error.h"

namespace tenon {

namespace {

class Norm final : public Stage {
 public:
  enum class Type : uint8_t { layer, rms, l2 };
  Norm(const StageContext& c, Type type, float eps, bool zero_centered)
      : Stage(c), planner_(c.planner), type_(type), eps_(eps), zero_centered_(zero_centered) {
    if (type != Type::l2) gamma_ = ParameterPlace::make(c, "gamma", 1, c.cols);
    if (type == Type::layer) beta_ = ParameterPlace::make(c, "beta", 1, c.cols);
  }
  [[nodiscard]] bool trains() const override { return gamma_.grad || beta_.grad; }
  void prepare(bool used, bool, const Stage*) override { saves_ = used; }

  void forward(Flow& flow) override {
    const std::string name = planner_.op_name(index_);
    flow.whole_rows(name + ".in");
    const Value x = flow.value();
    flow.apply_row([this](Assembly& a, Expr e) {
      const Expr d = type_ == Type::layer ? e - mean(a, e) : e;
      const Expr y = d * rstdev(a, d);
      return planner_.between(weighted(a, y, {}));
    });
    if (!saves_) return;
    saved_ = &flow.keep(x, Operand(planner_.request().dtype), Role::saved, name + ".in");
    r_ = &planner_.place(name + ".rstdev", Role::saved, Operand(DType::f32), 1, flow.rows());
    if (type_ == Type::layer)
      m_ = &planner_.place(name + ".mean", Role::saved, Operand(DType::f32), 1, flow.rows());
    flow.side([this, x](Assembly& a) {
      const Expr e = a.at(x, {});
      const Expr d = type_ == Type::layer ? e - mean(a, e) : e;
      if (m_) a.store_column(*m_, mean(a, e));
      a.store_column(*r_, rstdev(a, d));
    });
  }

  void backward(Flow& flow, bool needs_input) override {
    flow.whole_rows(planner_.op_name(index_) + ".dy");
    const Value g = flow.value();
    if (beta_.grad) sum_into(planner_, flow, index_, beta_, g, true);
    if (gamma_.grad) {
      auto product = std::make_shared<Lazy>();
      product->cols = cols_;
      product->make = [this, g](Assembly& a, const ColumnMap& m) {
        return a.at(g, m) * normalised(a, m);
      };
      sum_into(planner_, flow, index_, gamma_, product, true);
    }
    if (!needs_input) return;
    flow.apply_row([this](Assembly& a, Expr e) {
      const Expr r = a.column(*r_);
      if (type_ == Type::l2) {
        const Expr x = a.load(*saved_, {});
        return planner_.between(r * (e - x * (r * r) * a.total(x * e)));
      }
      const Expr n = static_cast<float>(cols_);
      const Expr w = gamma_.value ? e * scale(a, {}) : e;
      const Expr hat = normalised(a, {});
      const Expr along = hat * (a.total(w * hat) / n);
      const Expr centred = type_ == Type::layer ? w - a.total(w) / n : w;
      return planner_.between(r * (centred - along));
    });
  }

 private:
  Expr mean(Assembly& a, Expr x) const { return a.total(x) / static_cast<float>(cols_); }
  Expr rstdev(Assembly& a, Expr d) const {
    const Expr s = a.total(d * d);
    return rsqrt((type_ == Type::l2 ? s : s / static_cast<float>(cols_)) + a.parameter(eps_));
  }
  Expr scale(Assembly& a, const ColumnMap& m) const {
    const Expr gamma = a.row(*gamma_.value, m);
    return zero_centered_ ? gamma + 1.0F : gamma;
  }
  Expr weighted(Assembly& a, Expr y, const ColumnMap& m) const {
    if (type_ != Type::l2) y = y * scale(a, m);
    return type_ == Type::layer ? y + a.row(*beta_.value, m) : y;
  }
  Expr normalised(Assembly& a, const ColumnMap& m) const {
    const Expr x = a.load(*saved_, m);
    return (type_ == Type::layer ? x - a.column(*m_) : x) * a.column(*r_);
  }

  Planner& planner_;
  Type type_;
  float eps_;
  bool zero_centered_;
  ParameterPlace gamma_, beta_;
  bool saves_ = false;
  const Place* saved_ = nullptr;
  const Place* m_ = nullptr;
  const Place* r_ = nullptr;
};

template <Norm::Type type>
std::unique_ptr<Stage> make_norm(const StageContext& c, const Arguments& a) {
  if (type != Norm::Type::l2) {
    const std::optional<int64_t> n = a.integer("n", 1);
    require(!n || *n == c.cols, a.who(), ": its input has ", c.cols, " columns, it wants ",
            n ? *n : 0);
  }
  const double eps = a.number("eps").value_or(type == Norm::Type::l2 ? 1e-6 : 1e-5);
  require(eps >= 0, a.who(), ": eps is ", eps, "; it must not be negative");
  return std::make_unique<Norm>(
      c, type, static_cast<float>(eps),
      type != Norm::Type::l2 && a.flag("zero_centered_gamma").value_or(false));
}

}  // namespace

std::unique_ptr<Stage> make_layernorm(const StageContext& c, const Arguments& a) {
  return make_norm<Norm::Type::layer>(c, a);
}
std::unique_ptr<Stage> make_rmsnorm(const StageContext& c, const Arguments& a) {
  return make_norm<Norm::Type::rms>(c, a);
}
std::unique_ptr<Stage> make_l2norm(const StageContext& c, const Arguments& a) {
  return make_norm<Norm::Type::l2>(c, a);
}

}  // namespace tenon
