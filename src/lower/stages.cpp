// The ops of a chain: one class and one row of the table each.
#include <algorithm>
#include <utility>

#include "lower/stage_parts.h"
#include "ops/dropout.h"
#include "tenon/error.h"

namespace tenon {

namespace {

class Identity final : public Stage {
 public:
  explicit Identity(const StageContext& c) : Stage(c) {}
  void forward(Flow&) override {}
  void backward(Flow&, bool) override {}
};

class Scale final : public Stage {
 public:
  Scale(const StageContext& c, float factor) : Stage(c), planner_(c.planner), factor_(factor) {}
  void forward(Flow& flow) override { multiply(flow); }
  void backward(Flow& flow, bool) override { multiply(flow); }

 private:
  void multiply(Flow& flow) {
    flow.apply([this](Assembly& a, Expr e, const ColumnMap&) {
      return planner_.between(e * a.parameter(factor_));
    });
  }
  Planner& planner_;
  float factor_;
};

class Bias final : public Stage {
 public:
  explicit Bias(const StageContext& c)
      : Stage(c), planner_(c.planner), bias_(ParameterPlace::make(c, "bias", 1, c.cols, {})) {}
  [[nodiscard]] bool trains() const override { return bias_.grad != nullptr; }
  void forward(Flow& flow) override {
    flow.apply([this](Assembly& a, Expr e, const ColumnMap& m) {
      return planner_.between(e + a.row(*bias_.value, m));
    });
  }
  void backward(Flow& flow, bool) override {
    sum_into(planner_, flow, index_, bias_, flow.value(), false);
  }

 private:
  Planner& planner_;
  ParameterPlace bias_;
};

class Dropout final : public Stage {
 public:
  Dropout(const StageContext& c, double p) : Stage(c), planner_(c.planner), rule_(dropout_rule(p)) {
    if (!planner_.request().training) return;
    PlanData& d = planner_.data();
    ordinal_ = static_cast<uint32_t>(d.dropouts++);
    if (d.rng != kNoBuffer) return;
    const Buffer state{
        .name = "rng", .role = Role::rng, .rows = {0, 1, 1, 5}, .cols = 1, .random = true};
    d.rng = planner_.buffer(state);
    Buffer saved = state;
    saved.name = "rng.saved";
    saved.role = Role::saved;
    d.saved_rng = planner_.buffer(saved);
  }
  void forward(Flow& flow) override { mask(flow); }
  void backward(Flow& flow, bool needs_input) override {
    if (!needs_input) return;
    flow.own_columns(planner_.op_name(index_) + ".dy");
    mask(flow);
  }

 private:
  // Linear in its input, so its adjoint is itself.
  void mask(Flow& flow) {
    if (!planner_.request().training) return;
    flow.uses_random();
    flow.apply([this](Assembly& a, Expr e, const ColumnMap&) {
      const Expr kept = select(a.random(ordinal_) >= a.parameter(rule_.threshold),
                               e * a.parameter(rule_.scale), 0.0F);
      return planner_.between(kept);
    });
  }
  Planner& planner_;
  DropoutRule rule_;
  uint32_t ordinal_ = 0;
};

class Add final : public Stage {
 public:
  explicit Add(const StageContext& c) : Stage(c), planner_(c.planner) {}
  [[nodiscard]] size_t extra_inputs() const override { return 1; }
  [[nodiscard]] bool trains() const override { return give_extra_grad[0] != nullptr; }
  void forward(Flow& flow) override {
    flow.apply([this](Assembly& a, Expr e, const ColumnMap& m) {
      return planner_.between(a.at(extra_in[0], m) + e);
    });
  }
  void backward(Flow& flow, bool) override {
    if (give_extra_grad[0]) give_extra_grad[0](flow, flow.value());
  }

 private:
  Planner& planner_;
};

class ExtraOutput final : public Stage {
 public:
  explicit ExtraOutput(const StageContext& c) : Stage(c), planner_(c.planner) {}
  [[nodiscard]] size_t extra_outputs() const override { return 1; }
  void forward(Flow& flow) override { give_extra[0](flow, flow.value()); }
  void backward(Flow& flow, bool needs_input) override {
    if (!needs_input) return;
    const Value other = take_extra_grad[0](flow);
    if (!other) return;
    flow.apply([this, other](Assembly& a, Expr e, const ColumnMap& m) {
      return planner_.between(e + a.at(other, m));
    });
  }

 private:
  Planner& planner_;
};

class Reshape final : public Stage {
 public:
  Reshape(const StageContext& c, int64_t to)
      : Stage(c),
        planner_(c.planner),
        to_(to),
        after_(c.rows.times(c.cols, to, c.planner.op_name(c.index))) {
    planner_.data().whole.push_back({planner_.op_name(index_), after_});
  }
  [[nodiscard]] int64_t out_cols() const override { return to_; }
  [[nodiscard]] Factor out_rows() const override { return after_; }
  void forward(Flow& flow) override { change(flow, ".in", to_, after_); }
  void backward(Flow& flow, bool needs_input) override {
    if (needs_input) change(flow, ".dy", cols_, rows_);
  }

 private:
  void change(Flow& flow, const char* what, int64_t cols, Factor rows) {
    const Place& p = flow.materialise(planner_.op_name(index_) + what, Role::workspace,
                                      Operand(planner_.request().dtype));
    flow.begin(planner_.alias(p, cols, rows));
  }
  Planner& planner_;
  int64_t to_;
  Factor after_;
};

class Quantize final : public Stage {
 public:
  explicit Quantize(const StageContext& c) : Stage(c), planner_(c.planner) {}
  void forward(Flow& flow) override {
    const PlanRequest& r = planner_.request();
    if (r.recipe.quantises()) encode(flow, "", r.recipe.input);
  }
  void backward(Flow& flow, bool needs_input) override {
    const PlanRequest& r = planner_.request();
    if (needs_input && r.recipe.quantises()) encode(flow, "d", r.recipe.gradient);
  }

 private:
  void encode(Flow& flow, const char* prefix, const Format& format) {
    flow.materialise(prefix + planner_.op_name(index_), Role::workspace,
                     encoded(format, true, false));
    if (planner_.request().options.rounding == Rounding::eager)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return planner_.between(e); });
  }
  Planner& planner_;
};

template <class S>
std::unique_ptr<Stage> make_plain(const StageContext& c, const Arguments&) {
  return std::make_unique<S>(c);
}

std::unique_ptr<Stage> make_bias(const StageContext& c, const Arguments& a) {
  const std::optional<int64_t> n = a.integer("n", 1);
  require(!n || *n == c.cols, a.who(), ": its input has ", c.cols, " columns, it wants ",
          n ? *n : 0);
  return std::make_unique<Bias>(c);
}

std::unique_ptr<Stage> make_dropout(const StageContext& c, const Arguments& a) {
  const std::optional<double> p = a.number("p");
  require(p.has_value(), a.who(), ": it has no probability; write dropout(0.1)");
  require(*p >= 0 && *p <= 1, a.who(), ": p is ", *p, "; it must be from 0 to 1");
  return std::make_unique<Dropout>(c, *p);
}

std::unique_ptr<Stage> make_scale(const StageContext& c, const Arguments& a) {
  const std::optional<double> factor = a.number("c");
  require(factor.has_value(), a.who(), ": it has no factor; write scale(0.5)");
  return std::make_unique<Scale>(c, static_cast<float>(*factor));
}

std::unique_ptr<Stage> make_reshape(const StageContext& c, const Arguments& a) {
  const std::optional<int64_t> cols = a.integer("cols", 1);
  require(cols.has_value(), a.who(), ": it has no width; write reshape(128)");
  return std::make_unique<Reshape>(c, *cols);
}

constexpr std::array<OpKind, 15> kOps{{
    {"linear", "in out", "in", make_linear},
    {"bias", "n", "n", make_bias},
    {"scale", "c", "", make_scale},
    {"dropout", "p", "", make_dropout},
    {"add", "", "", make_plain<Add>},
    {"make_extra_output", "", "", make_plain<ExtraOutput>},
    {"layernorm", "n eps zero_centered_gamma", "n", make_layernorm},
    {"rmsnorm", "n eps zero_centered_gamma", "n", make_rmsnorm},
    {"l2norm", "eps", "", make_l2norm},
    {"quantize", "", "", make_plain<Quantize>},
    {"reshape", "cols", kUnknownWidth, make_reshape},
    {"identity", "", "", make_plain<Identity>},
    {"all_reduce", "", "", make_all_reduce},
    {"all_gather", "", "", make_all_gather},
    {"reduce_scatter", "", "", make_reduce_scatter},
}};

}  // namespace

std::span<const OpKind> op_kinds() { return kOps; }

std::optional<int64_t> width_read(const Op& op, const std::string& who) {
  const auto* const kind = std::ranges::find(kOps, op.name, &OpKind::name);
  if (kind == kOps.end())
    return activation_op(op, who).first.inputs == 1 ? std::nullopt : std::optional<int64_t>(0);
  const Arguments a(op, kind->arguments, who);
  if (kind->width == kUnknownWidth) return 0;
  return kind->width.empty() ? std::nullopt : a.integer(kind->width, 1);
}

std::unique_ptr<Stage> make_stage(const StageContext& c, const Op& op) {
  const std::string who = c.planner.op_name(c.index);
  const auto& opaque = c.planner.request().opaque;
  for (const OpKind& k : kOps) {
    if (k.name != op.name) continue;
    require(!opaque.contains(op.name), who, ": the opaque op '", op.name,
            "' is called as one of the library's; give it another name");
    return k.make(c, Arguments(op, k.arguments, who));
  }
  if (const auto it = opaque.find(op.name); it != opaque.end()) {
    const Arguments none(op, "", who);
    return make_opaque(c, it->second);
  }
  return make_activation(c, op);
}

}  // namespace tenon
