// Activations and formulas as ops, for example act("x*sigmoid(x)") and swiglu(layout=swapped).
#include "expr/nearest.h"
#include "lazy/halves.h"
#include "ops/formulas.h"
#include "ops/op.h"
#include "tenon/activation.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr std::string_view kAct = "act";

// The formula text of act: its first argument, or the argument of that name. The parameters of the
// formula are arguments too.
std::string formula_of(const Op& op, const std::string& who) {
  for (const OpArgument& a : op.arguments)
    if (a.name.empty() || a.name == "formula")
      if (const auto* text = std::get_if<std::string>(&a.value)) return *text;
  fail(Code::invalid_argument, who, ": it has no formula; write act(\"x*sigmoid(x)\")");
}

[[noreturn]] void unknown(const Op& op, const std::string& who) {
  std::string known;
  Nearest nearest(op.name);
  for (const OpSchema& s : op_schemas()) {
    known += str(known.empty() ? "" : ", ", s.name);
    nearest.offer(s.name);
  }
  for (const std::string& name : activation_names()) nearest.offer(name);
  const bool wrapped = op.name == "gated" || op.name == "scaled";
  fail(Code::invalid_argument, who, ": there is no op of this name",
       wrapped ? std::string() : nearest.text(), "; ",
       wrapped ? str("write act(\"", op.name, "(…)\"); ") : "", "ops are ", known,
       ", act(\"formula\") and every activation");
}

Activation named(const Op& op, const std::string& who) {
  if (op.name == kAct) return activation(formula_of(op, who));
  try {
    return activation(op.name);
  } catch (const Error&) {
    unknown(op, who);
  }
}

}  // namespace

Layout layout_of(const Arguments& a) {
  const std::string text = a.text("layout").value_or("stacked");
  const std::optional<Layout> layout = layout_named(text);
  require(layout.has_value(), a.who(), ": layout is '", text,
          "'; it must be stacked, swapped or \"interleaved(k)\"");
  return *layout;
}

Formula activation_formula(const Activation& f, std::vector<float> values) {
  return [f, values = std::move(values)](Element& e, std::span<const Expr> x) {
    std::vector<Expr> parameters;
    for (const float v : values) parameters.push_back(e.constant(v));
    const Expr y = call(f, x, parameters);
    return f.scaled ? y * e.extra(0) : y;
  };
}

bool is_activation(const std::string& name) {
  if (name == kAct) return true;
  try {
    activation(name);
    return true;
  } catch (const Error&) {
    return false;
  }
}

OpSchema activation_op(const Op& op, const std::string& who) {
  const Activation f = named(op, who);
  OpSchema schema{.name = op.name, .summary = f.name};
  if (op.name == kAct) schema.arguments.push_back(text("formula"));
  schema.arguments.push_back(text("layout"));
  schema.arguments.push_back(text("keep"));
  for (const Parameter& p : f.parameters)
    schema.arguments.push_back(
        {.name = p.name, .value = p.value, .least = p.least, .most = p.most});
  if (f.scaled) schema.extra_inputs = {{.name = "scale", .kind = ExtraSchema::Kind::column}};
  const bool gated = f.inputs == 2;
  schema.same_columns = !gated;
  schema.output = [gated](const OpCall& call) {
    const std::string& who = call.arguments.who();
    if (gated) check_halves(who, "its input", call.cols, layout_of(call.arguments));
    require(gated || !call.arguments.text("layout"), who,
            ": it has no halves, so no layout; take the argument away");
    return OutputShape{.cols = gated ? call.cols / 2 : call.cols};
  };
  schema.forward = [f, gated](const OpCall& call) {
    std::vector<float> values;
    for (const Parameter& p : f.parameters)
      values.push_back(static_cast<float>(call.arguments.number(p.name)));
    Elementwise y{activation_formula(f, std::move(values))};
    if (gated) y.halves = layout_of(call.arguments);
    return std::vector<Extension>{y};
  };
  schema.float64.activation = f;
  return schema;
}

}  // namespace tenon
