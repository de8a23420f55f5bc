// Evaluates a formula on placeholder loads of its variables, and differentiates it by each
// variable.
#include "lower/trace.h"

#include <algorithm>

#include "expr/order.h"

namespace tenon {

namespace {

// Each variable is a load. Numbers without a gradient are loads too.
class Tracer final : public Element {
 public:
  explicit Tracer(size_t inputs) {
    for (size_t i = 0; i < inputs; ++i) this->inputs.push_back(of({Variable::Kind::input, i}));
  }
  Expr parameter(size_t number) override { return of({Variable::Kind::parameter, number}); }
  Expr extra(size_t number) override { return of({Variable::Kind::extra, number}); }
  Expr random() override {
    draws = true;
    return load();
  }
  Expr constant(float /*value*/) override { return load(); }
  Expr load() { return graph.load(slots++); }

  Graph graph;
  std::vector<Expr> inputs;
  std::vector<Variable> variables;
  std::vector<Expr> loads;  // loads of the variables
  uint32_t slots = 0;       // number of all loads
  bool draws = false;

 private:
  Expr of(const Variable& s) {
    const auto found = std::ranges::find(variables, s);
    if (found != variables.end()) return loads[static_cast<size_t>(found - variables.begin())];
    const Expr e = load();
    variables.push_back(s);
    loads.push_back(e);
    return e;
  }
};

constexpr size_t kNone = static_cast<size_t>(-1);

}  // namespace

size_t Trace::at(Variable::Kind kind, size_t number) const {
  return static_cast<size_t>(std::ranges::find(variables, Variable{kind, number}) -
                             variables.begin());
}

Trace trace(const Formula& formula, size_t inputs) {
  Tracer t(inputs);
  const Expr given = formula(t, t.inputs);
  const Expr y(&t.graph, t.graph.id(given));
  const Expr seed = t.load();
  Trace result{.variables = t.variables, .gradients = {}};
  result.identity = inputs > 0 && y.id() == t.inputs[0].id();
  result.random = t.draws;
  std::vector<size_t> variable_of(t.slots, kNone);
  for (size_t i = 0; i < t.loads.size(); ++i) variable_of[t.graph[t.loads[i].id()].slot] = i;
  for (const Expr& wrt : t.loads) {
    const Expr d = grad(y, seed, std::span(&wrt, 1))[0];
    const uint32_t id = t.graph.id(d);
    Trace::Gradient g{.seed = id == seed.id(), .mentions = std::vector<bool>(t.loads.size())};
    for (const uint32_t node : order(t.graph, std::vector{id}))
      if (t.graph[node].word == Word::load)
        if (const size_t s = variable_of[t.graph[node].slot]; s != kNone) g.mentions[s] = true;
    result.gradients.push_back(std::move(g));
  }
  return result;
}

}  // namespace tenon
