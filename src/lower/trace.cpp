// Evaluates a formula on placeholder loads of its sources, and differentiates it by each source.
#include "lower/trace.h"

#include <algorithm>

#include "expr/order.h"

namespace tenon {

namespace {

// Each source is a load. Numbers without a gradient are loads too.
class Tracer final : public Element {
 public:
  explicit Tracer(size_t inputs) {
    for (size_t i = 0; i < inputs; ++i) this->inputs.push_back(of({Source::Kind::input, i}));
  }
  Expr parameter(size_t number) override { return of({Source::Kind::parameter, number}); }
  Expr extra(size_t number) override { return of({Source::Kind::extra, number}); }
  Expr random() override {
    draws = true;
    return load();
  }
  Expr constant(float /*value*/) override { return load(); }
  Expr load() { return graph.load(slots++); }

  Graph graph;
  std::vector<Expr> inputs;
  std::vector<Source> sources;
  std::vector<Expr> loads;  // loads of the sources
  uint32_t slots = 0;       // number of all loads
  bool draws = false;

 private:
  Expr of(const Source& s) {
    const auto found = std::ranges::find(sources, s);
    if (found != sources.end()) return loads[static_cast<size_t>(found - sources.begin())];
    const Expr e = load();
    sources.push_back(s);
    loads.push_back(e);
    return e;
  }
};

constexpr size_t kNone = static_cast<size_t>(-1);

}  // namespace

size_t Trace::at(Source::Kind kind, size_t number) const {
  return static_cast<size_t>(std::ranges::find(sources, Source{kind, number}) - sources.begin());
}

Trace trace(const Formula& formula, size_t inputs) {
  Tracer t(inputs);
  const Expr given = formula(t, t.inputs);
  const Expr y(&t.graph, t.graph.id(given));
  const Expr seed = t.load();
  Trace result{.sources = t.sources, .gradients = {}};
  result.identity = inputs > 0 && y.id() == t.inputs[0].id();
  result.random = t.draws;
  std::vector<size_t> source_of(t.slots, kNone);
  for (size_t i = 0; i < t.loads.size(); ++i) source_of[t.graph[t.loads[i].id()].slot] = i;
  for (const Expr& wrt : t.loads) {
    const Expr d = grad(y, seed, std::span(&wrt, 1))[0];
    const uint32_t id = t.graph.id(d);
    Trace::Gradient g{.seed = id == seed.id(), .mentions = std::vector<bool>(t.loads.size())};
    for (const uint32_t node : order(t.graph, std::vector{id}))
      if (t.graph[node].word == Word::load)
        if (const size_t s = source_of[t.graph[node].slot]; s != kNone) g.mentions[s] = true;
    result.gradients.push_back(std::move(g));
  }
  return result;
}

}  // namespace tenon
