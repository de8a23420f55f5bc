// Lowers words to 2^x, log2 x and 1/x as the GPU has them: a few units in the last place, fp32
// subnormals read and written as 0. Every sequence keeps clear of those.
#include "backend/cuda/native.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "expr/lower.h"
#include "expr/order.h"
#include "expr/print.h"
#include "expr/word.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

// No word of the formula is left when they stand in its graph, so each has the place of one.
constexpr Word kEx2 = Word::exp, kLg2 = Word::log, kRcp = Word::sigmoid;

std::string_view name_of(Word w) {
  return w == kEx2 ? "ex2" : w == kLg2 ? "lg2" : w == kRcp ? "rcp" : info(w).name;
}

Expr own(Word w, Expr x) { return x.graph()->intern({.word = w, .in = {x.id()}}); }
Expr ex2(Expr x) { return own(kEx2, x); }
Expr lg2(Expr x) { return own(kLg2, x); }
Expr rcp(Expr x) { return own(kRcp, x); }

const Node& node(Expr e) { return (*e.graph())[e.id()]; }
Expr input(Expr e, int i) { return {e.graph(), node(e).in[static_cast<size_t>(i)]}; }
bool is(Expr e, Word w) { return e.graph() && node(e).word == w; }

// A product with a constant: the constant, and the other factor.
struct Multiple {
  float factor;
  Expr of;
};
std::optional<Multiple> multiple(Expr e) {
  if (!is(e, Word::mul)) return std::nullopt;
  for (const int i : {0, 1})
    if (input(e, i).is_constant()) return Multiple{input(e, i).constant(), input(e, 1 - i)};
  return std::nullopt;
}

// x·f, where constants of x join f: an exponent errs far less than a word may.
Expr scaled(Expr x, float f) {
  for (;;) {
    const auto m = multiple(x);
    const float joined = f * (m ? m->factor : -1);
    if (!m && !is(x, Word::neg)) break;
    if (!(std::fabs(joined) > 0x1p-60F && std::fabs(joined) < 0x1p60F)) return x * f;
    f = joined;
    x = m ? m->of : input(x, 0);
  }
  // a + c·(b·a), as in gelu: one product less.
  if (is(x, Word::add))
    if (const auto m = multiple(input(x, 1)); m && is(m->of, Word::mul))
      for (const int i : {0, 1})
        if (const Expr a = input(x, 0); input(m->of, i).id() == a.id())
          return a * fma(input(m->of, 1 - i), f * m->factor, f);
  return x * f;
}

constexpr float kLog2e = words::kLog2e, kLn2 = words::kLn2;
constexpr float kLogSmall = 0x1p-5F;  // below it lg2's absolute error would show

// As words::Words, where what is left of a polynomial is its part near a zero.
struct Hardware : words::Words<words::NativeTables> {
  // The square reaches subnormal results.
  static Expr exp(Expr x) {
    const Expr half = ex2(scaled(x, kLog2e / 2));
    return half * half;
  }
  static Expr expm1(Expr x) {
    return select(abs(x) < kLn2 / 2, expm1_reduced(x), ex2(scaled(x, kLog2e)) - 1.0F);
  }
  static Expr log(Expr x) {
    const Expr f = x - 1.0F;
    return select(abs(f) < kLogSmall, log1p_small(f), lg2(x) * kLn2);
  }
  static Expr log1p(Expr x) {
    return select(abs(x) < kLogSmall, log1p_small(x), lg2(x + 1.0F) * kLn2);
  }
  // 1/(1 + 2^t) with both sides of the fraction 2^-24 as large, so that 2^t reaches 2^150.
  static Expr sigmoid(Expr x) {
    const Expr power = ex2(scaled(x, -kLog2e) + -24.0F);
    return rcp(power + 0x1p-24F) * 0x1p-24F;
  }
  static Expr tanh(Expr x) {
    return tanh_of(x, fma(-2.0F, rcp(ex2(scaled(x, 2 * kLog2e)) + 1.0F), 1.0F));
  }
  static Expr tanh_of(Expr x, Expr large) {
    const Expr small = x * words::polynomial(x * x, words::NativeTables::kTanh);
    return select(abs(x) < words::NativeTables::kTanhSmall, small, large);
  }
  static Expr erf(Expr x) {
    const Expr a = abs(x);
    const Expr p = words::polynomial(min(a, words::kErfHigh), words::NativeTables::kErfTail);
    const Expr large = 1.0F - ex2(p * kLog2e);
    return select(a < words::kErfSmall, erf_small(x), with_sign(large, x));
  }
  static Expr erfc(Expr x) {
    const Expr a = abs(x);
    const Expr u = rcp(a + words::NativeTables::kErfcShift);
    const Expr p =
        words::polynomial(u - words::NativeTables::kErfcCentre, words::NativeTables::kErfcTail);
    const Expr tail = fma(p, u, u) * exp(-(a * a));
    const Expr large = select(x < 0.0F, 2.0F - tail, tail);
    return select(a < words::kErfSmall, 1.0F - erf_small(x), large);
  }

 private:
  static Expr log1p_small(Expr x) {
    const Expr p = fma(fma(x, -0.25F, 1.0F / 3), x, -0.5F);
    return fma(x * x, p, x);
  }
};

// What a value lies between, unless it is NaN.
struct Range {
  float low = -words::kInfinity, high = words::kInfinity;
  [[nodiscard]] bool within(float a, float b) const { return low >= a && high <= b; }
};
Range range(Expr e, int depth = 8) {
  if (e.is_constant()) return {e.constant(), e.constant()};
  if (depth == 0) return {};
  const auto in = [&](int i) { return range(input(e, i), depth - 1); };
  switch (node(e).word) {
    case Word::min:
      return {std::min(in(0).low, in(1).low), std::min(in(0).high, in(1).high)};
    case Word::max:
      return {std::max(in(0).low, in(1).low), std::max(in(0).high, in(1).high)};
    case Word::add:
      return {in(0).low + in(1).low, in(0).high + in(1).high};
    case Word::mul:
      // Squares: of the numbers here, those that exp has made of halves.
      if (node(e).in[0] == node(e).in[1])
        return {0, std::max(in(0).low * in(0).low, in(0).high * in(0).high)};
      if (const auto m = multiple(e); m && m->factor > 0) {
        const Range r = range(m->of, depth - 1);
        return {r.low * m->factor, r.high * m->factor};
      }
      return {};
    case kEx2:
      return {0, std::exp2(in(0).high)};
    default:
      return {};
  }
}

// By a constant: a correctly rounded quotient from the rounded reciprocal.
Expr quotient(Expr a, float b) {
  const float inverse = 1 / b;
  const Expr q = a * inverse;
  const Expr better = fma(fma(q, -b, a), inverse, q);
  if (range(a).within(-0x1p60F, 0x1p60F)) return better;
  return select(abs(q) < words::kInfinity, better, q);
}
bool divides(float b) { return std::fabs(b) > 0x1p-60F && std::fabs(b) < 0x1p60F; }

// A few units in the last place off, for all numbers.
Expr rough_quotient(Expr a, Expr b) {
  if (range(b).within(0x1p-64F, 0x1p64F)) return a * rcp(b);
  const Expr up = select(abs(b) < 0x1p-64F, 0x1p64F, 1.0F);
  const Expr scale = select(abs(b) > 0x1p64F, 0x1p-64F, up);
  return a * rcp(b * scale) * scale;
}

class Lowering {
 public:
  Lowering(const Graph& graph, std::span<const uint32_t> roots)
      : graph_(graph),
        order_(order(graph, roots)),
        image_(graph.size()),
        uses_(graph.size(), 0),
        sigmoid_(graph.size(), kNone),
        negated_(graph.size(), kNone),
        doubled_(graph.size(), kNone),
        tolerant_(graph.size(), true),
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
    for (const uint32_t id : order_) {
      terms_[id] = terms(id);
      image_[id] = lowered(id);
    }
    for (const uint32_t root : roots) out_.roots.push_back(out_.graph.id(image_[root]));
  }
  [[nodiscard]] const Lowered& result() const { return out_; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

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
    if (opposite(id) == kNone) return Hardware::sigmoid(unclamped(id));
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
    int degree = 0;
    bool even = true;
    std::map<int, double> factors;
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
      degree = std::max(degree, power);
      even = even && power % 2 == 0;
    }
    const Terms product{{common, 1.0}};
    const auto stands = [&](uint32_t i) { return i < id && terms_[i] == product; };
    const auto place = std::ranges::find_if(order_, stands);
    if (of == kNone || place == order_.end() || !errs(*place) ||
        !range(image_[of]).within(-0x1p20F, 0x1p20F))
      return std::nullopt;
    const Expr x = even ? image_[of] * image_[of] : image_[of];
    Expr sum = static_cast<float>(factors[degree]);
    for (int power = degree; (power -= even ? 2 : 1) >= 0;)
      sum = fma(sum, x, static_cast<float>(factors[power]));
    return image_[*place] * sum;
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
    struct Value {
      float at_clamp;
      Expr without;
    };
    std::map<uint32_t, Value> values;
    for (const auto& [i, count] : uses) {
      const Node& n = graph_[i];
      if (n.word != Word::constant && count != uses_[i]) return image_[top];
      const Value &a = values[n.in[0]], &b = values[n.in[1]];
      if (n.word == Word::constant)
        values[i] = {n.value, n.value};
      else if (i == clamp)
        values[i] = {graph_[n.in[1]].value, image_[n.in[0]]};
      else if (n.word == Word::add)
        values[i] = {a.at_clamp + b.at_clamp, a.without + b.without};
      else
        values[i] = {a.at_clamp * b.at_clamp, a.without * b.without};
    }
    return values[top].at_clamp > 20 ? values[top].without : image_[top];
  }

  const Graph& graph_;
  std::vector<uint32_t> order_;
  std::vector<Expr> image_;
  std::vector<int> uses_;
  std::vector<uint32_t> sigmoid_, negated_, doubled_;  // by their arguments
  std::vector<bool> tolerant_;
  std::vector<Terms> terms_;
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

}  // namespace

std::string native_lines(const Graph& graph, std::span<const uint32_t> roots) {
  const auto approximate = [&](uint32_t id) {
    return info(graph[id].word).kind == Kind::transcendental;
  };
  if (std::ranges::none_of(order(graph, roots), approximate)) {
    const Lowered strict = with_quotients(lower(graph, roots, Precision::strict));
    return print(strict.graph, strict.roots);
  }
  const Lowered out = contracted(Lowering(graph, roots).result());
  return print(out.graph, out.roots, name_of);
}

}  // namespace tenon::cuda
