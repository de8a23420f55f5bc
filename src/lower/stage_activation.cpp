// Activations: any formula, gated or not, with what is kept of its input.
#include "expr/nearest.h"
#include "lower/stage_parts.h"
#include "ops/activation.h"
#include "tenon/error.h"

namespace tenon {

namespace {

Keep keep_of(const StageContext& c, const Arguments& a) {
  const std::optional<std::string> text = a.text("keep");
  if (!text) return c.planner.request().keep;
  for (size_t i = 0; i < kKeeps.size(); ++i)
    if (kKeeps[i] == *text) return static_cast<Keep>(i);
  fail(Code::invalid_argument, a.who(), ": keep is '", *text,
       "'; it must be input, fp8 or recompute");
}

// What the policy `fp8` and a cached quantised input are: spec.md 2.
Operand kept_fp8() {
  Operand o;
  o.format = {.dtype = DType::e4m3, .scaling = Scaling::block1x128, .power_of_two = true};
  return o;
}

class Act final : public Stage {
 public:
  Act(const StageContext& c, Activation f, const Layout& layout, Keep keep)
      : Stage(c), planner_(c.planner), f_(std::move(f)), keep_(keep) {
    const std::string who = c.planner.op_name(c.index);
    if (f_.inputs == 2) {
      require(c.cols % 2 == 0, who, ": its input has ", c.cols,
              " columns; a gated input holds a and b, so its columns must be even");
      require(layout.kind != Layout::Kind::interleaved || c.cols / 2 % layout.k == 0, who,
              ": interleaved(", layout.k, ") needs a half width divisible by ", layout.k,
              ", it is ", c.cols / 2);
      halves_ = halves(layout, c.cols / 2);
    }
  }
  [[nodiscard]] int64_t out_cols() const override { return f_.inputs == 2 ? cols_ / 2 : cols_; }
  [[nodiscard]] size_t extra_inputs() const override { return f_.scaled ? 1 : 0; }
  [[nodiscard]] bool trains() const override { return f_.scaled && give_extra_grad[0] != nullptr; }

  void forward(Flow& flow) override {
    const std::string name = planner_.op_name(index_) + ".in";
    if (f_.inputs == 2) flow.whole_halves(name);
    if (saves_) {
      if (keep_ == Keep::recompute && !flow.value()->place) {
        // What backward computes again starts from here, so forward goes on from it too.
        const DType dtype = planner_.request().dtype;
        flow.apply([dtype](Assembly&, Expr e, const ColumnMap&) { return round(e, dtype); });
        flow.why(name + " is carried on as stored, since backward computes from it again");
      }
      const bool plain = keep_ != Keep::fp8;
      saved_ = &flow.keep(flow.value(), plain ? Operand(planner_.request().dtype) : kept_fp8(),
                          Role::saved, plain ? name : name + ".fp8");
    }
    if (f_.inputs == 1) {
      flow.apply([this](Assembly& a, Expr e, const ColumnMap&) {
        return planner_.between(value(a, std::span(&e, 1)));
      });
    } else {
      flow.gate(halves_, [this](Assembly& a, Expr x, Expr y) {
        const std::array in{x, y};
        return planner_.between(value(a, in));
      });
    }
  }

  void backward(Flow& flow, bool needs_input) override {
    const std::string name = planner_.op_name(index_) + ".dy";
    if (f_.inputs == 2) flow.whole_halves(name);
    if (f_.scaled) flow.own_columns(name);
    const Value seed = flow.value();
    if (f_.scaled && give_extra_grad[0]) {
      auto grad = std::make_shared<Lazy>();
      grad->cols = seed->cols;
      grad->make = [this, seed](Assembly& a, const ColumnMap&) {
        return gradients(a, a.at(seed, {})).back();
      };
      give_extra_grad[0](flow, grad);
    }
    if (!needs_input) return;
    if (f_.inputs == 1) {
      flow.apply([this](Assembly& a, Expr g, const ColumnMap& m) {
        return planner_.between(gradients(a, g, m)[0]);
      });
    } else {
      flow.ungate(halves_, [this](Assembly& a, Expr g) {
        const std::vector<Expr> d = gradients(a, g);
        return std::array{planner_.between(d[0]), planner_.between(d[1])};
      });
    }
  }

  void prepare(bool used, bool, const Stage*) override { saves_ = used; }
  [[nodiscard]] bool extra_is_column() const override { return true; }
  [[nodiscard]] Value again() const override {
    if (keep_ != Keep::recompute || !saves_) return nullptr;
    auto lazy = std::make_shared<Lazy>();
    lazy->cols = out_cols();
    lazy->make = [this](Assembly& a, const ColumnMap& m) {
      return planner_.between(value(a, inputs(a, m)));
    };
    return lazy;
  }

 private:
  Expr value(Assembly& a, std::span<const Expr> in) const {
    std::vector<Expr> parameters;
    for (const Parameter& p : f_.parameters) parameters.push_back(a.parameter(p.value));
    Expr y = call(f_, in, parameters);
    if (f_.scaled) y = y * a.column(*extra_in[0]->place);
    return y;
  }

  std::vector<Expr> inputs(Assembly& a, const ColumnMap& m = {}) const {
    if (f_.inputs == 1) return {a.load(*saved_, m)};
    return {a.load(*saved_, halves_[0]), a.load(*saved_, halves_[1])};
  }

  std::vector<Expr> gradients(Assembly& a, Expr g, const ColumnMap& m = {}) const {
    std::vector<Expr> wrt = inputs(a, m);
    std::vector<Expr> parameters;
    for (const Parameter& p : f_.parameters) parameters.push_back(a.parameter(p.value));
    Expr y = call(f_, wrt, parameters);
    if (f_.scaled) {
      const Expr s = a.column(*extra_in[0]->place);
      y = y * s;
      wrt.push_back(s);
    }
    return a.grad(y, g, wrt);
  }

  Planner& planner_;
  Activation f_;
  Keep keep_;
  std::array<ColumnMap, 2> halves_;
  bool saves_ = false;
  const Place* saved_ = nullptr;
};

Layout layout_of(const Arguments& a) {
  const std::string text = a.text("layout").value_or("stacked");
  const std::optional<Layout> layout = layout_named(text);
  require(layout.has_value(), a.who(), ": layout is '", text,
          "'; it must be stacked, swapped or \"interleaved(k)\"");
  return *layout;
}

// The first argument of act, or the one of that name; its parameters are arguments too.
std::string formula_of(const Op& op, const std::string& who) {
  for (const OpArgument& a : op.arguments)
    if (a.name.empty() || a.name == "formula")
      if (const auto* text = std::get_if<std::string>(&a.value)) return *text;
  fail(Code::invalid_argument, who, ": it has no formula; write act(\"x*sigmoid(x)\")");
}

}  // namespace

std::pair<Activation, Arguments> activation_op(const Op& op, const std::string& who) {
  Activation f;
  if (op.name == "act") {
    f = activation(formula_of(op, who));
  } else {
    try {
      f = activation(op.name);
    } catch (const Error&) {
      std::string known;
      Nearest nearest(op.name);
      for (const OpKind& k : op_kinds()) {
        known += str(known.empty() ? "" : ", ", k.name);
        nearest.offer(k.name);
      }
      for (const std::string& name : activation_names()) nearest.offer(name);
      const bool wrapped = op.name == "gated" || op.name == "scaled";
      fail(Code::invalid_argument, who, ": there is no op of this name",
           wrapped ? std::string() : nearest.text(), "; ",
           wrapped ? str("write act(\"", op.name, "(…)\"); ") : "", "ops are ", known,
           ", act(\"formula\") and every activation");
    }
  }
  std::string names = op.name == "act" ? "formula layout keep" : "layout keep";
  for (const Parameter& p : f.parameters) names += " " + p.name;
  Arguments a(op, names, who);
  for (Parameter& p : f.parameters)
    if (const std::optional<double> v = a.number(p.name)) {
      const auto value = static_cast<float>(*v);
      require(value >= p.least && value <= p.most, who, ": ", p.name, " is ", value,
              "; it must be from ", p.least, " to ", p.most);
      p.value = value;
    }
  require(f.inputs == 2 || !a.text("layout"), who,
          ": it has no halves, so no layout; take the argument away");
  return {std::move(f), std::move(a)};
}

std::unique_ptr<Stage> make_activation(const StageContext& c, const Op& op) {
  auto [f, a] = activation_op(op, c.planner.op_name(c.index));
  return std::make_unique<Act>(c, std::move(f), layout_of(a), keep_of(c, a));
}

}  // namespace tenon
