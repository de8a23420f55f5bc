// Lowers a formula to the processor's own approximations, with what they allow beyond single words.
#include "backend/cuda/native.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "backend/cuda/native_words.h"
#include "expr/lower.h"
#include "expr/order.h"
#include "expr/print.h"
#include "expr/word.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

using namespace hardware;

// The sum of factor·x^power.
using Polynomial = std::map<int, double>;
Expr evaluated(const Polynomial& p, Expr x) {
  const bool even = std::ranges::all_of(p, [](const auto& term) { return term.first % 2 == 0; });
  if (even) x = x * x;
  int power = p.rbegin()->first;
  Expr sum = static_cast<float>(p.rbegin()->second);
  while ((power -= even ? 2 : 1) >= 0)
    sum = fma(sum, x, static_cast<float>(p.contains(power) ? p.at(power) : 0));
  return sum;
}

class Lowering {
 public:
  // Words may err by `error`, relative to their results.
  Lowering(const Graph& graph, std::span<const uint32_t> roots, double error)
      : graph_(graph),
        order_(order(graph, roots)),
        image_(graph.size()),
        uses_(graph.size(), 0),
        sigmoid_(graph.size(), kNone),
        negated_(graph.size(), kNone),
        doubled_(graph.size(), kNone),
        tolerant_(graph.size(), true),
        alone_(graph.size(), false),
        terms_(graph.size()) {
    for (const uint32_t root : roots) ++uses_[root];
    for (const uint32_t id : order_) {
      const Node& n = graph[id];
      for (int i = 0; i < n.arity(); ++i) ++uses_[n.in[i]];
      if (n.word == Word::sigmoid) sigmoid_[n.in[0]] = id;
      if (n.word == Word::neg) negated_[n.in[0]] = id;
      if (n.word == Word::add && n.in[0] == n.in[1]) doubled_[n.in[0]] = id;
    }
    for (const uint32_t root : roots) tolerant_[root] = false;
    for (size_t i = order_.size(); i-- > 0;) tolerate(order_[i]);
    for (const uint32_t id : order_) terms_[id] = terms(id);
    find_slopes(roots, error);
    for (const uint32_t id : order_) image_[id] = lowered(id);
    for (const uint32_t root : roots) out_.roots.push_back(out_.graph.id(image_[root]));
  }
  [[nodiscard]] const Lowered& result() const { return out_; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr float kCertain = 20;  // its sigmoid is 1

  Expr lowered(uint32_t id) {
    const Node& n = graph_[id];
    const auto in = [&](int i) { return i < n.arity() ? image_[n.in[i]] : Expr(); };
    switch (n.word) {
      case Word::constant:
        return {n.value};
      case Word::load:
        return out_.graph.load(n.slot);
      case Word::select:
        return select({n.rel(), in(0), in(1)}, in(2), in(3));
      case Word::round:
        return round(in(0), n.dtype());
      case Word::sigmoid:
        return sigmoid(id);
      case Word::mul:
        if (opposite(n.in[0]) == n.in[1] && n.in[0] != n.in[1]) {
          const Sides s = sides(argument(n.in[0]));
          return s.larger * s.smaller;
        }
        return in(0) * in(1);
      case Word::add:
        if (const auto slope = slopes_.find(id); slope != slopes_.end())
          return slope_of(slope->second);
        if (const std::optional<Expr> product = factored(id)) return *product;
        return in(0) + in(1);
      case Word::div:
        if (in(1).is_constant() && divides(in(1).constant()))
          return quotient(in(0), in(1).constant());
        return tolerant_[id] || errs(id) ? rough_quotient(in(0), in(1)) : in(0) / in(1);
      case Word::tanh:
        if (const uint32_t twice = doubled_[n.in[0]];
            twice != kNone && sigmoid_[twice] != kNone && opposite(sigmoid_[twice]) != kNone) {
          const Expr large = fma(sides(in(0) + in(0)).smaller, -2.0F, 1.0F);
          return Hardware::tanh_of(in(0), select(in(0) < 0.0F, -large, large));
        }
        return Hardware::tanh(in(0));
      default:
        return kWordTable<Hardware, Expr>[index(n.word)](in(0), in(1), in(2));
    }
  }

  // sigmoid(−a) where `id` is sigmoid(a), or the other way round.
  [[nodiscard]] uint32_t opposite(uint32_t id) const {
    if (graph_[id].word != Word::sigmoid) return kNone;
    const uint32_t a = graph_[id].in[0];
    if (graph_[a].word == Word::neg) return sigmoid_[graph_[a].in[0]];
    return negated_[a] == kNone ? kNone : sigmoid_[negated_[a]];
  }
  // The argument of a sigmoid without its sign.
  [[nodiscard]] Expr argument(uint32_t id) const {
    const uint32_t a = graph_[id].in[0];
    return image_[graph_[a].word == Word::neg ? graph_[a].in[0] : a];
  }

  // sigmoid(|a|) and sigmoid(−|a|), with a number of a's sign.
  struct Sides {
    Expr larger, smaller, sign;
  };
  static Sides sides(Expr a) {
    const Expr x = scaled(a, kLog2e / 2);
    const Expr half = ex2(-abs(x));
    const Expr e = half * half;  // may be subnormal
    const Expr r = rcp(1.0F + e);
    return {r, e * r, x};
  }

  Expr sigmoid(uint32_t id) {
    const uint32_t a = graph_[id].in[0];
    if (opposite(id) == kNone || alone_[id]) return Hardware::sigmoid(unclamped(id));
    const Sides s = sides(argument(id));
    return graph_[a].word == Word::neg ? select(s.sign < 0.0F, s.larger, s.smaller)
                                       : select(s.sign < 0.0F, s.smaller, s.larger);
  }

  // Whether some units in the last place of `id` show in nothing but words that err by far more.
  void tolerate(uint32_t id) {
    const Node& n = graph_[id];
    const bool linear = n.word == Word::neg || (n.word == Word::add && n.in[0] == n.in[1]);
    const bool hides = n.word == Word::tanh || n.word == Word::sigmoid;
    for (int i = 0; i < n.arity(); ++i)
      if (!hides && !(linear && tolerant_[id])) tolerant_[n.in[static_cast<size_t>(i)]] = false;
  }
  // Whether a word that errs is a factor of `id`.
  [[nodiscard]] bool errs(uint32_t id) const {
    const Node& n = graph_[id];
    if (n.word == Word::mul || n.word == Word::div) return errs(n.in[0]) || errs(n.in[1]);
    return info(n.word).kind == Kind::transcendental;
  }

  // A node as a sum of products; each node of another kind is a factor.
  using Powers = std::map<uint32_t, int>;
  using Terms = std::map<Powers, double>;
  static constexpr size_t kMostTerms = 4;

  [[nodiscard]] Terms terms(uint32_t id) const {
    const Node& n = graph_[id];
    const Terms itself{{{{id, 1}}, 1.0}};
    if (n.word == Word::constant) return {{{}, n.value}};
    if (n.word != Word::add && n.word != Word::mul) return itself;
    const Terms &a = terms_[n.in[0]], &b = terms_[n.in[1]];
    Terms all;
    if (n.word == Word::add) {
      all = a;
      for (const auto& [powers, factor] : b) all[powers] += factor;
    } else {
      for (const auto& [left, f] : a)
        for (const auto& [right, g] : b) {
          Powers product = left;
          for (const auto& [factor, power] : right) product[factor] += power;
          all[product] += f * g;
        }
    }
    return all.size() > kMostTerms ? itself : all;
  }

  // A sum as one product: that of the factors of all its terms, if it stands in the formula and a
  // word in it errs, times a polynomial of one bounded value.
  [[nodiscard]] std::optional<Expr> factored(uint32_t id) const {
    const Terms& all = terms_[id];
    if (all.size() < 2) return std::nullopt;
    Powers common = all.begin()->first;
    for (const auto& [powers, ignored] : all)
      for (auto& [factor, power] : common)
        power = std::min(power, powers.contains(factor) ? powers.at(factor) : 0);
    std::erase_if(common, [](const auto& p) { return p.second == 0; });
    uint32_t of = kNone;
    Polynomial factors;
    for (const auto& [powers, factor] : all) {
      int power = 0;
      for (const auto& [atom, p] : powers) {
        const int rest = p - (common.contains(atom) ? common.at(atom) : 0);
        if (rest == 0) continue;
        if (of != kNone && of != atom) return std::nullopt;
        of = atom;
        power = rest;
      }
      factors[power] = factor;
    }
    const Terms product{{common, 1.0}};
    const auto stands = [&](uint32_t i) { return i < id && terms_[i] == product; };
    const auto place = std::ranges::find_if(order_, stands);
    if (of == kNone || place == order_.end() || !errs(*place) ||
        !range(image_[of]).within(-0x1p20F, 0x1p20F))
      return std::nullopt;
    return image_[*place] * evaluated(factors, image_[of]);
  }

  // m·s + m·s·σ(−a)·k(u), the latter only while v <= c: the derivative of m·v·s, s = σ(a(u)),
  // u = min(v, c).
  struct Slope {
    uint32_t s, u;
    Powers m;
    double factor;    // of m
    Polynomial rest;  // k(u)/u
  };

  // Beside the first summand 1 − s is as good as σ(−a) if k is small, and with u for v it may stay
  // where v > c, if s is 1 there.
  [[nodiscard]] std::optional<Slope> slope(uint32_t id, int i, double error) const {
    const Node& n = graph_[id];
    if (n.word != Word::add) return std::nullopt;
    const uint32_t first = n.in[static_cast<size_t>(i)];
    const Node& guarded = graph_[n.in[static_cast<size_t>(1 - i)]];
    const auto constant = [&](uint32_t c) { return graph_[c].word == Word::constant; };
    if (guarded.word != Word::select || guarded.rel() != Rel::gt || !constant(guarded.in[1]) ||
        !constant(guarded.in[2]) || graph_[guarded.in[2]].value != 0 || terms_[first].size() != 1)
      return std::nullopt;
    const uint32_t v = guarded.in[0];
    const auto is_u = [&](uint32_t u) {
      const Node& m = graph_[u];
      return m.word == Word::min && m.in[0] == v && m.in[1] == guarded.in[1];
    };
    const auto u = std::ranges::find_if(order_, is_u);
    if (u == order_.end() || graph_[v].word != Word::max || !constant(graph_[v].in[1]))
      return std::nullopt;
    const auto& [known, factor] = *terms_[first].begin();
    Slope out{kNone, *u, known, factor, {}};
    for (const auto& [all, f] : terms_[guarded.in[3]]) {
      Powers powers = all;
      for (const auto& [atom, power] : known) powers[atom] -= power;
      int power = -1;
      for (const auto& [atom, p] : powers) {
        if (atom == v || atom == *u) {
          power += p;
        } else if (const uint32_t s = opposite(atom);
                   p == 1 && s != kNone && known.contains(s) && (out.s == kNone || out.s == s)) {
          out.s = s;
        } else if (p != 0) {
          return std::nullopt;
        }
      }
      if (power < 0 || out.s == kNone || !powers.contains(opposite(out.s))) return std::nullopt;
      out.rest[power] += f / factor;
    }
    const double low = graph_[graph_[v].in[1]].value, high = graph_[guarded.in[1]].value;
    double most = 0, last = 0;
    for (const auto& [power, f] : out.rest) {
      most += std::fabs(f) * std::pow(std::max(std::fabs(low), std::fabs(high)), power + 1);
      last += f * std::pow(high, power + 1);
    }
    constexpr double kOff = 0x1p-22;  // of 1 − s by the processor's words
    const std::optional<double> end = value_at(graph_[out.s].in[0], *u, high);
    if (most * kOff > 0.75 * error || !(last > 0) || !end || *end < kCertain) return std::nullopt;
    if (--out.m[out.s] == 0) out.m.erase(out.s);
    return out;
  }
  // All of them, if σ(−a) stands nowhere else.
  void find_slopes(std::span<const uint32_t> roots, double error) {
    for (const uint32_t id : order_)
      for (const int i : {0, 1})
        if (const std::optional<Slope> s = slope(id, i, error)) slopes_.emplace(id, *s);
    std::vector<bool> seen(graph_.size(), false);
    for (const uint32_t root : roots) seen[root] = true;
    for (size_t k = order_.size(); k-- > 0;) {
      const uint32_t id = order_[k];
      if (!seen[id]) continue;
      if (const auto found = slopes_.find(id); found != slopes_.end()) {
        const Slope& s = found->second;
        seen[s.s] = seen[s.u] = true;
        for (const auto& [atom, power] : s.m) seen[atom] = true;
      } else {
        for (int i = 0; i < graph_[id].arity(); ++i) seen[graph_[id].in[i]] = true;
      }
    }
    if (std::ranges::any_of(slopes_, [&](const auto& s) { return seen[opposite(s.second.s)]; }))
      slopes_.clear();
    for (const auto& [id, s] : slopes_) alone_[s.s] = true;
  }
  // m·(s·(1 + k(u)·(1 − s))), where kLess and the largest power's factor cost nothing.
  [[nodiscard]] Expr slope_of(const Slope& s) const {
    const float less = Hardware::kLess, last = static_cast<float>(s.rest.rbegin()->second);
    Polynomial rest = s.rest;
    for (auto& [power, factor] : rest) factor /= s.rest.rbegin()->second;
    const Expr u = image_[s.u], part = Hardware::sigmoid_over_less(unclamped(s.s));
    const Expr other = fma(part, -less * less * last, less * last);
    Expr m = static_cast<float>(s.factor);
    for (const auto& [atom, power] : s.m)
      for (int i = 0; i < power; ++i) m = m * image_[atom];
    return m * (part * fma(u * evaluated(rest, u), other, less));
  }

  // A node made of `of` and constants, where `of` has a value.
  [[nodiscard]] std::optional<double> value_at(uint32_t id, uint32_t of, double value) const {
    std::map<uint32_t, double> values{{of, value}};
    for (const uint32_t i : order_) {
      const Node& n = graph_[i];
      const auto known = [&](int k) { return values.contains(n.in[k]); };
      if (n.word == Word::constant)
        values[i] = n.value;
      else if ((n.word == Word::add || n.word == Word::mul) && known(0) && known(1) && i != of)
        values[i] = n.word == Word::add ? values[n.in[0]] + values[n.in[1]]
                                        : values[n.in[0]] * values[n.in[1]];
      if (i == id) break;
    }
    const auto found = values.find(id);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  }

  // The argument of a sigmoid without a clamp u = min(v, c) that shows in nothing else: sums and
  // products of u and positive constants, which at u = c make the sigmoid 1 already.
  Expr unclamped(uint32_t id) const {
    const uint32_t top = graph_[id].in[0];
    std::map<uint32_t, int> uses{{top, 1}};  // within; inputs have lower numbers than their node
    uint32_t clamp = kNone;
    for (auto it = uses.rbegin(); it != uses.rend(); ++it) {
      const Node& n = graph_[it->first];
      const bool first = clamp == kNone && n.word == Word::min;
      if (n.word == Word::constant && n.value > 0) continue;
      if (first && graph_[n.in[1]].word == Word::constant && graph_[n.in[1]].value > 0)
        clamp = it->first;
      else if (n.word == Word::add || n.word == Word::mul)
        for (const int i : {0, 1}) ++uses[n.in[i]];
      else
        return image_[top];
    }
    if (clamp == kNone) return image_[top];
    const std::optional<double> end = value_at(top, clamp, graph_[graph_[clamp].in[1]].value);
    if (!end || *end < kCertain) return image_[top];
    std::map<uint32_t, Expr> without;
    for (const auto& [i, count] : uses) {
      const Node& n = graph_[i];
      if (n.word != Word::constant && count != uses_[i]) return image_[top];
      const Expr &a = without[n.in[0]], &b = without[n.in[1]];
      if (n.word == Word::constant)
        without[i] = n.value;
      else if (i == clamp)
        without[i] = image_[n.in[0]];
      else
        without[i] = n.word == Word::add ? a + b : a * b;
    }
    return without[top];
  }

  const Graph& graph_;
  std::vector<uint32_t> order_;
  std::vector<Expr> image_;
  std::vector<int> uses_;
  std::vector<uint32_t> sigmoid_, negated_, doubled_;  // by their arguments
  std::vector<bool> tolerant_, alone_;
  std::vector<Terms> terms_;
  std::map<uint32_t, Slope> slopes_;
  Lowered out_;
};

// The same graph with what `change` has for some nodes; it reads the images of all before.
template <class Change>
Lowered rewritten(const Lowered& from, const Change& change) {
  Lowered out;
  std::vector<Expr> image(from.graph.size());
  for (const uint32_t id : order(from.graph, from.roots)) {
    const Node& n = from.graph[id];
    if (n.word == Word::constant) {
      image[id] = Expr(n.value);
    } else if (const std::optional<Expr> other = change(n, image)) {
      image[id] = *other;
    } else {
      Node copy = n;
      for (uint32_t& in : std::span(copy.in).first(static_cast<size_t>(n.arity())))
        in = out.graph.id(image[in]);
      image[id] = out.graph.intern(copy);
    }
  }
  for (const uint32_t root : from.roots) out.roots.push_back(out.graph.id(image[root]));
  return out;
}

using Images = std::vector<Expr>;

// Quotients by constants without a division.
Lowered with_quotients(const Lowered& from) {
  return rewritten(from, [](const Node& n, const Images& image) -> std::optional<Expr> {
    if (n.word != Word::div) return std::nullopt;
    const Expr a = image[n.in[0]], b = image[n.in[1]];
    if (!b.is_constant() || !divides(b.constant()) || a.is_constant()) return std::nullopt;
    return quotient(a, b.constant());
  });
}

// Where select(x < c, 0, ·) hides what lies below c, max(x, c) is x.
Lowered unclamped(const Lowered& from) {
  const Graph& graph = from.graph;
  const std::vector<uint32_t> nodes = order(graph, from.roots);
  const auto hides = [&](const Node& n, const Node& most) {
    return n.word == Word::select && n.rel() == Rel::lt && n.in[0] == most.in[0] &&
           n.in[1] == most.in[1] && graph[n.in[2]].word == Word::constant;
  };
  const auto hidden = [&](const Node& most) {
    if (most.word != Word::max || graph[most.in[1]].word != Word::constant ||
        graph[most.in[1]].value == 0)
      return false;
    std::vector<bool> seen(graph.size(), false);
    for (const uint32_t root : from.roots) seen[root] = true;
    for (size_t k = nodes.size(); k-- > 0;) {
      const Node& n = graph[nodes[k]];
      if (!seen[nodes[k]]) continue;
      if (&n == &most) return false;
      for (int i = 0; i < (hides(n, most) ? 3 : n.arity()); ++i) seen[n.in[i]] = true;
    }
    return true;
  };
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    return hidden(n) ? std::optional(image[n.in[0]]) : std::nullopt;
  });
}

// Sums of products become fma, which errs less.
Lowered contracted(const Lowered& from) {
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    const auto in = [&](int i) { return image[n.in[static_cast<size_t>(i)]]; };
    const auto product = [&](int i) { return from.graph[n.in[i]].word == Word::mul; };
    const auto factor = [&](int i, int k) { return image[from.graph[n.in[i]].in[k]]; };
    if (n.word == Word::add && (product(0) || product(1))) {
      const int i = product(0) ? 0 : 1;
      return fma(factor(i, 0), factor(i, 1), in(1 - i));
    }
    if (n.word == Word::sub && product(0)) return fma(factor(0, 0), factor(0, 1), -in(1));
    if (n.word == Word::sub && product(1)) return fma(-factor(1, 0), factor(1, 1), in(0));
    return std::nullopt;
  });
}

// The strict value of a formula where all loads are 0.
float value_of_zeros(const Graph& graph, uint32_t root) {
  std::vector<Expr> image(graph.size());
  for (const uint32_t id : order(graph, std::span(&root, 1))) {
    const Node& n = graph[id];
    std::array<Expr, 4> in;
    for (int i = 0; i < n.arity(); ++i) in[i] = image[n.in[i]];
    if (n.arity() == 0)
      image[id] = n.word == Word::constant ? n.value : 0.0F;
    else
      image[id] = apply_word(n.word, std::span(in).first(n.arity()), n.detail);
  }
  return image[root].constant();
}

// Whether a node is one of the loads that lie in pairs, and whether it is a number they have.
bool paired(const Node& n, const std::vector<bool>& pairs) {
  return n.word == Word::load && pairs[n.slot];
}
bool short_number(const Node& n) {
  return n.word == Word::constant && __builtin_bit_cast(uint32_t, n.value) % 0x10000 == 0;
}

// select(x < c, 0, ·) of everything, c <= 0, where · of zeros is 0: the loads become 0 instead, x
// at last.
std::string zeros_first(const Graph& formula, std::span<const uint32_t> roots, Lowered& from,
                        const std::vector<bool>& pairs) {
  const Graph& graph = from.graph;
  const Node& n = graph[from.roots[0]];
  if (std::ranges::any_of(from.roots, [&](uint32_t r) { return r != from.roots[0]; }) ||
      n.word != Word::select || n.rel() != Rel::lt || !paired(graph[n.in[0]], pairs) ||
      !short_number(graph[n.in[1]]) || graph[n.in[2]].word != Word::constant ||
      graph[n.in[2]].value != 0 || !(graph[n.in[1]].value <= 0) ||
      value_of_zeros(formula, roots[0]) != 0)
    return "";
  const uint32_t x = graph[n.in[0]].slot;
  const auto line = [&](uint32_t slot) {
    return str("tenon_zero8(in[", slot, "], in[", x, "], ", literal(graph[n.in[1]].value), ");\n");
  };
  std::string lines;
  for (const uint32_t id : order(graph, from.roots)) {
    const Node& l = graph[id];
    if (l.word != Word::load || l.slot == x) continue;
    if (!pairs[l.slot]) return "";
    lines += line(l.slot);
  }
  for (uint32_t& root : from.roots) root = n.in[3];
  return lines + line(x);
}

// Clamps of loads that stand for nothing else.
EightLines clamps_first(const Lowered& from, const std::vector<bool>& pairs, std::string ready) {
  const Graph& graph = from.graph;
  const std::vector<uint32_t> nodes = order(graph, from.roots);
  std::vector<int> uses(graph.size(), 0);
  for (const uint32_t root : from.roots) ++uses[root];
  for (const uint32_t id : nodes)
    for (int i = 0; i < graph[id].arity(); ++i) ++uses[graph[id].in[i]];
  const auto clamps = [&](uint32_t id) {
    const Node& n = graph[id];
    return (n.word == Word::min || n.word == Word::max) && paired(graph[n.in[0]], pairs) &&
           uses[n.in[0]] == 1 && short_number(graph[n.in[1]]);
  };
  const auto found = std::ranges::find_if(nodes, clamps);
  if (found == nodes.end()) return {std::move(ready), print(from.graph, from.roots, name_of)};
  const Node& clamp = graph[*found];
  ready += str("tenon_", info(clamp.word).name, "8(in[", graph[clamp.in[0]].slot, "], ",
               literal(graph[clamp.in[1]].value), ");\n");
  const auto without = [&](const Node& n, const Images& image) {
    return &n == &clamp ? std::optional(image[n.in[0]]) : std::nullopt;
  };
  return clamps_first(rewritten(from, without), pairs, std::move(ready));
}

bool approximates(const Graph& graph, std::span<const uint32_t> roots) {
  return std::ranges::any_of(order(graph, roots), [&](uint32_t id) {
    return info(graph[id].word).kind == Kind::transcendental;
  });
}

Lowered approximated(const Graph& graph, std::span<const uint32_t> roots, double error) {
  return contracted(unclamped(Lowering(graph, roots, error).result()));
}

}  // namespace

std::string native_lines(const Graph& graph, std::span<const uint32_t> roots, double error) {
  if (!approximates(graph, roots)) {
    const Lowered strict = with_quotients(lower(graph, roots, Precision::strict));
    return print(strict.graph, strict.roots);
  }
  const Lowered out = approximated(graph, roots, error);
  return print(out.graph, out.roots, name_of);
}

EightLines native_eight(const Graph& graph, std::span<const uint32_t> roots, double error,
                        const std::vector<bool>& pairs) {
  if (!approximates(graph, roots)) return {"", native_lines(graph, roots, error)};
  Lowered out = approximated(graph, roots, error);
  std::string ready = zeros_first(graph, roots, out, pairs);
  return clamps_first(out, pairs, std::move(ready));
}

}  // namespace tenon::cuda
