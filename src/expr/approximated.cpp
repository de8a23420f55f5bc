// Replaces functions by hardware approximations, and applies rewrites that these allow: slopes,
// factored sums, guards of clamps, and products in place of quotients.
#include "expr/approximated.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "expr/hardware.h"
#include "expr/order.h"
#include "expr/word.h"

namespace tenon {

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

// `Hardware`: HardwareOf, or Exact, which only changes compositions of functions.
template <class Hardware>
class Lowering {
  static constexpr bool kIeee = Hardware::kIeee;

 public:
  // Functions may err by `error`, relative to their results. If `loads` marks single loads, the
  // host may compute values of slopes from them.
  Lowering(const Graph& graph, std::span<const uint32_t> roots, double error,
           const std::vector<Loaded>& loads)
      : graph_(graph),
        loads_(loads),
        order_(order(graph, roots)),
        image_(graph.size()),
        uses_(graph.size(), 0),
        sigmoid_(graph.size(), kNone),
        negated_(graph.size(), kNone),
        users_(graph.size()),
        tolerant_(graph.size(), true),
        alone_(graph.size(), false),
        errs_(graph.size(), false),
        terms_(graph.size()),
        factors_(graph.size()) {
    for (const uint32_t root : roots) ++uses_[root];
    for (const uint32_t id : order_) {
      const Node& n = graph[id];
      for (int i = 0; i < n.arity(); ++i) ++uses_[n.in[i]];
      for (int i = 0; i < n.arity(); ++i) users_[n.in[i]].push_back(id);
      if (n.word == Word::sigmoid) sigmoid_[n.in[0]] = id;
      if (n.word == Word::neg) negated_[n.in[0]] = id;
    }
    for (const uint32_t root : roots) tolerant_[root] = false;
    for (size_t i = order_.size(); i-- > 0;) tolerate(order_[i]);
    for (const uint32_t id : order_) {
      const Node& n = graph[id];
      errs_[id] = n.word == Word::mul || n.word == Word::div
                      ? errs_[n.in[0]] || errs_[n.in[1]]
                      : info(n.word).kind == WordKind::transcendental;
      terms_[id] = terms(id);
      factors_[id] = factors(id);
    }
    if constexpr (!kIeee) find_slopes(roots, error);
    for (const uint32_t id : order_) image_[id] = lowered(id);
    for (const uint32_t root : roots) out_.roots.push_back(out_.graph.id(image_[root]));
  }
  [[nodiscard]] const Lowered& result() const { return out_; }
  // Single loads that must be positive.
  [[nodiscard]] const std::vector<uint32_t>& positive() const { return positive_; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  // Factors of a product with their powers, and a sum of products: factors that are not add or mul.
  using Powers = std::map<uint32_t, int>;
  using Terms = std::map<Powers, double>;
  static constexpr float kCertain = 20;  // the sigmoid of larger values is 1
  // erfc of larger values is 0, and so is exp(−x²) in fp32.
  static constexpr double kErfcBeyond = 10.1, kExpBeyond = 10.5;

  Expr lowered(uint32_t id) {
    const Node& n = graph_[id];
    const auto in = [&](int i) { return i < n.arity() ? image_[n.in[i]] : Expr(); };
    switch (n.word) {
      case Word::constant:
        return {n.value};
      case Word::load:
        return out_.graph.load(n.slot);
      case Word::select:
      case Word::log1p:
        if (const uint32_t x = softplus(id); x != kNone) return Hardware::log1p_exp(image_[x]);
        if (n.word == Word::log1p) return Hardware::log1p(in(0));
        if (const std::optional<Expr> outside = beyond(n)) return *outside;
        if (const std::optional<Expr> inside = slope_inside(n)) return *inside;
        return select({n.rel(), compared(n), in(1)}, in(2), in(3));
      case Word::max:
        if (const Node& least = graph_[n.in[0]]; clamped_too(n))
          return min(max(image_[least.in[0]], in(1)), image_[least.in[1]]);
        return max(in(0), in(1));
      case Word::min:
        if (constant(n.in[1])) return limited_to(in(0), graph_[n.in[1]].value);
        return min(in(0), in(1));
      case Word::round:
        return round(in(0), n.dtype());
      case Word::mul:
        if (const std::optional<Expr> product = erfc_product(n)) return *product;
        break;
      case Word::add:
        if (const std::optional<Expr> slope = erfc_slope(n)) return *slope;
        if (const std::optional<Expr> slope = mish_slope(n)) return *slope;
        break;
      case Word::tanh:
        if (const uint32_t x = softplus(n.in[0]); x != kNone) {
          const TanhSoftplus t = tanh_softplus(x);
          return t.n * t.r;
        }
        break;
      default:
        break;
    }
    if constexpr (!kIeee) return approximation(id);
    return kWordTable<Hardware, Expr>[index(n.word)](in(0), in(1), in(2));
  }
  Expr approximation(uint32_t id) {
    const Node& n = graph_[id];
    const auto in = [&](int i) { return i < n.arity() ? image_[n.in[i]] : Expr(); };
    switch (n.word) {
      case Word::sigmoid:
        return sigmoid(id);
      case Word::mul:
        if (opposite(n.in[0]) == n.in[1] && n.in[0] != n.in[1]) {
          const Sides s = sides(argument(n.in[0]));
          return s.larger * s.smaller;
        }
        if (const auto s = softplus_slope(id)) return image_[s->of] * softplus_sigmoid(s->x);
        return in(0) * in(1);
      case Word::add:
        if (const auto s = softplus_slope(id)) return image_[s->of] * softplus_sigmoid(s->x);
        if (const auto slope = slopes_.find(id); slope != slopes_.end())
          return slope_of(slope->second);
        if (const std::optional<Expr> product = factored(id)) return *product;
        return sum(in(0), in(1));
      case Word::div:
        if (in(1).is_constant() && divides(in(1).constant()))
          return times_inverse(id, in(1).constant()) ? in(0) * (1 / in(1).constant())
                                                     : quotient(in(0), in(1).constant());
        return tolerant_[id] || errs_[id] ? rough_quotient(in(0), in(1)) : in(0) / in(1);
      default:
        return kWordTable<Hardware, Expr>[index(n.word)](in(0), in(1), in(2));
    }
  }

  [[nodiscard]] bool constant(uint32_t id) const { return graph_[id].word == Word::constant; }

  // The left side of the comparison of a select. min(x, a) < c is x < c if c <= a. The same for
  // max.
  [[nodiscard]] Expr compared(const Node& n) const {
    const Node& left = graph_[n.in[0]];
    const bool hides = (n.rel() == Rel::lt && left.word == Word::min) ||
                       (n.rel() == Rel::gt && left.word == Word::max);
    if (!hides || !constant(n.in[1]) || !constant(left.in[1])) return image_[n.in[0]];
    const float c = graph_[n.in[1]].value, a = graph_[left.in[1]].value;
    return (n.rel() == Rel::lt ? c <= a : c >= a) ? image_[left.in[0]] : image_[n.in[0]];
  }

  // Matches select(min(x, a) < c, 0, select(x > a, 0, ·)).
  struct Outside {
    uint32_t x, a, least, c, inside;
  };
  [[nodiscard]] std::optional<Outside> outside(const Node& below) const {
    const Node &least = graph_[below.in[0]], &above = graph_[below.in[3]];
    const auto zero = [&](const Node& n, Rel rel) {
      return n.word == Word::select && n.rel() == rel && constant(n.in[2]) &&
             graph_[n.in[2]].value == 0;
    };
    if (!zero(below, Rel::lt) || !zero(above, Rel::gt) || least.word != Word::min ||
        above.in[0] != least.in[0] || above.in[1] != least.in[1])
      return std::nullopt;
    return Outside{above.in[0], above.in[1], below.in[0], below.in[1], above.in[3]};
  }
  // If c is −a, outside() is 0 for |x| > a.
  [[nodiscard]] std::optional<Expr> beyond(const Node& below) const {
    const std::optional<Outside> o = outside(below);
    if (!o || graph_[o->c].word != Word::neg || graph_[o->c].in[0] != o->a) return std::nullopt;
    return select(abs(image_[o->x]) > image_[o->a], 0.0F, image_[o->inside]);
  }
  // Case: outside() is m times a slope of w = max(min(x, a), c) with c <= 0 < a. Then m is set to 0
  // where w is not x. That is one comparison, before the slope. The slope is finite there, or NaN
  // if x is NaN.
  [[nodiscard]] std::optional<Expr> slope_inside(const Node& below) {
    const std::optional<Outside> o = outside(below);
    const auto found = o ? slopes_.find(o->inside) : slopes_.end();
    if (found == slopes_.end() || found->second.w == kNone) return std::nullopt;
    const Slope& s = found->second;
    const Node &w = graph_[s.w], &c = graph_[o->c], &product = graph_[s.first];
    // The divisor of a quotient is a load that find_slopes() requires to be positive.
    const uint32_t bound = c.word == Word::div ? c.in[0] : o->c;
    if (w.in[0] != o->least || w.in[1] != o->c || !constant(bound) || graph_[bound].value >= 0 ||
        product.word != Word::mul || (product.in[0] != s.s && product.in[1] != s.s))
      return std::nullopt;
    if (single(o->a))
      positive_.push_back(graph_[o->a].slot);
    else if (!constant(o->a) || graph_[o->a].value <= 0)
      return std::nullopt;
    const Expr m = image_[product.in[product.in[0] == s.s ? 1 : 0]];
    return select(image_[o->x] != image_[s.w], 0.0F, m) * own_factor(s);
  }

  // Whether both max(min(x, a), c) and max(x, c) occur, with c < a. Then min(max(x, c), a) is the
  // same.
  [[nodiscard]] bool clamped_too(const Node& n) const {
    const Node& least = graph_[n.in[0]];
    if (least.word != Word::min || !constant(least.in[1]) || !constant(n.in[1]) ||
        !(graph_[n.in[1]].value < graph_[least.in[1]].value))
      return false;
    return std::ranges::any_of(users_[least.in[0]], [&](uint32_t id) {
      return graph_[id].word == Word::max && graph_[id].in[0] == least.in[0] &&
             graph_[id].in[1] == n.in[1];
    });
  }

  // Adds two selects with one condition as one select, if at most one branch needs an addition.
  static Expr sum(Expr a, Expr b) {
    const auto zero = [](Expr e) { return e.is_constant() && e.constant() == 0; };
    const auto branch = [&](int i) {
      const Expr x = input(a, i), y = input(b, i);
      return zero(y) ? x : zero(x) ? y : sum(x, y);
    };
    const auto has_zero = [&](int i) { return zero(input(a, i)) || zero(input(b, i)); };
    const auto same = [&](int i) { return input(a, i).id() == input(b, i).id(); };
    if (!is(a, Word::select) || !is(b, Word::select) || node(a).detail != node(b).detail ||
        !same(0) || !same(1) || !(has_zero(2) || has_zero(3)))
      return a + b;
    return select({node(a).rel(), input(a, 0), input(a, 1)}, branch(2), branch(3));
  }

  // Whether a quotient by a constant may become a product with the rounded inverse. The inverse
  // errs by at most 2^-25. An exact operation may err by 0.5 ulp, which pays for it. Every path
  // from the quotient to a result must have such an operation: on a product of the quotient, or as
  // another factor of it. Each operation pays once: for its own value, or in each product that has
  // it as a factor.
  bool times_inverse(uint32_t id, double b) {
    const auto inverse = static_cast<float>(1 / b);
    if (!(std::fabs(inverse * b - 1) <= 0x1p-25)) return false;
    return spends_factor(graph_[id].in[0]) || may_err(id);
  }
  [[nodiscard]] static bool rounds_nothing(Word w) {
    return w == Word::min || w == Word::max || w == Word::neg || w == Word::abs ||
           w == Word::select;
  }
  bool spends_factor(uint32_t product) {
    const Node& n = graph_[product];
    if (n.word != Word::mul || spent_products_.contains(product)) return false;
    for (const uint32_t factor : {n.in[0], n.in[1]})
      if (rounds_nothing(graph_[factor].word) && !spent_.contains(factor)) {
        spent_factors_.insert(factor);
        return spent_products_.insert(product).second;
      }
    return false;
  }
  bool may_err(uint32_t id) {
    if (uses_[id] > static_cast<int>(users_[id].size())) return false;  // it is a result
    return std::ranges::all_of(users_[id], [&](uint32_t user) {
      const Node& n = graph_[user];
      const bool compared = n.word == Word::select && (n.in[0] == id || n.in[1] == id);
      if (rounds_nothing(n.word) && !compared)
        return !spent_factors_.contains(user) && spent_.insert(user).second;
      return n.word == Word::mul && (spends_factor(user) || may_err(user));
    });
  }

  // sigmoid(−a) if `id` is sigmoid(a), and the reverse.
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

  // sigmoid(|a|) and sigmoid(−|a|), and a value with the sign of a.
  struct Sides {
    Expr larger, smaller, sign;
  };
  static Sides sides(Expr a) {
    const Expr e = Hardware::exp_below(a);  // may be subnormal
    const Expr r = Hardware::reciprocal(1.0F + e);
    return {r, e * r, a};
  }

  Expr sigmoid(uint32_t id) {
    const uint32_t a = graph_[id].in[0];
    if (opposite(id) == kNone || alone_[id]) return Hardware::sigmoid(unclamped(id));
    const Sides s = sides(argument(id));
    return graph_[a].word == Word::neg ? select(s.sign < 0.0F, s.larger, s.smaller)
                                       : select(s.sign < 0.0F, s.smaller, s.larger);
  }

  // The x of log1p(exp(x)), or of select(x > c, x, log1p(exp(min(x, c)))), which is the same.
  [[nodiscard]] uint32_t softplus(uint32_t id) const {
    const Node& n = graph_[id];
    if (n.word == Word::log1p)
      return graph_[n.in[0]].word == Word::exp ? graph_[n.in[0]].in[0] : kNone;
    if (n.word != Word::select || n.rel() != Rel::gt || n.in[2] != n.in[0] || !certain(n.in[1]))
      return kNone;
    const uint32_t x = softplus(n.in[3]);
    return x != kNone && is_min(x, n.in[0], n.in[1]) ? n.in[0] : kNone;
  }
  [[nodiscard]] bool certain(uint32_t id) const {
    return constant(id) && graph_[id].value >= kCertain;
  }
  [[nodiscard]] bool is_min(uint32_t id, uint32_t x, uint32_t c) const {
    const Node& n = graph_[id];
    return n.word == Word::min && n.in[0] == x && n.in[1] == c;
  }
  // The x of sigmoid(±2·softplus(x)).
  [[nodiscard]] uint32_t doubled_softplus(uint32_t id) const {
    const Node& a = graph_[graph_[id].in[0]];
    const Node& twice = a.word == Word::neg ? graph_[a.in[0]] : a;
    return twice.word == Word::add && twice.in[0] == twice.in[1] ? softplus(twice.in[0]) : kNone;
  }
  // tanh(softplus(x)) = n/(n + 2) with n = e² + 2e and e = exp(x). From kCertain on it is 1.
  struct TanhSoftplus {
    Expr product, n, r;  // e + e², n, 1/(n + 2)
  };
  [[nodiscard]] TanhSoftplus tanh_softplus(uint32_t x) const {
    const Expr e = Hardware::exp_up_to(image_[x], kCertain);
    const Expr product = e * (1.0F + e), n = product + e;
    return {product, n, Hardware::reciprocal(n + 2.0F)};
  }

  // of·σ(x), the derivative of softplus: of/(1 + e)·e with e = exp(x), also with its limit.
  struct SoftplusSlope {
    uint32_t of, x;
  };
  [[nodiscard]] std::optional<SoftplusSlope> softplus_slope(uint32_t id) const {
    const Node& n = graph_[id];
    const auto selects = [&](uint32_t i, uint32_t x, uint32_t c) {
      const Node& s = graph_[i];
      return s.word == Word::select && s.rel() == Rel::gt && s.in[0] == x && s.in[1] == c;
    };
    if (n.word == Word::mul) {
      const Node &quotient = graph_[n.in[0]], &e = graph_[n.in[1]];
      if (quotient.word != Word::div || e.word != Word::exp) return std::nullopt;
      const Node& sum = graph_[quotient.in[1]];
      if (sum.word != Word::add || !constant(sum.in[0]) || graph_[sum.in[0]].value != 1 ||
          sum.in[1] != n.in[1])
        return std::nullopt;
      return SoftplusSlope{quotient.in[0], e.in[0]};
    }
    const Node& above = graph_[n.in[0]];
    if (n.word != Word::add || above.word != Word::select || !certain(above.in[1]))
      return std::nullopt;
    const uint32_t x = above.in[0], c = above.in[1];
    uint32_t below = n.in[1];
    const auto zero = [&](uint32_t i) { return constant(i) && graph_[i].value == 0; };
    if (!selects(n.in[0], x, c) || !selects(below, x, c) || !zero(above.in[3])) return std::nullopt;
    for (; selects(below, x, c); below = graph_[below].in[3])
      if (!zero(graph_[below].in[2])) return std::nullopt;
    const std::optional<SoftplusSlope> s = softplus_slope(below);
    if (!s || s->of != above.in[2] || !is_min(s->x, x, c)) return std::nullopt;
    return SoftplusSlope{s->of, x};
  }
  // σ(x). Shares exp(−|x|) with softplus(x).
  [[nodiscard]] Expr softplus_sigmoid(uint32_t x) const {
    const Expr a = image_[x];
    if (std::ranges::none_of(order_, [&](uint32_t i) { return softplus(i) == x; }))
      return Hardware::sigmoid(a);
    const Sides s = sides(a);
    return select(a < 0.0F, s.smaller, s.larger);
  }

  // The difference of the factors of two products.
  [[nodiscard]] Powers more(uint32_t product, uint32_t known) const {
    Powers all = factors_[product];
    for (const auto& [factor, power] : factors_[known]) all[factor] -= power;
    std::erase_if(all, [](const auto& p) { return p.second == 0; });
    return all;
  }
  // Whether `factor` is one of the factors of the product, and once.
  [[nodiscard]] bool once(uint32_t product, uint32_t factor) const {
    const auto found = factors_[product].find(factor);
    return found != factors_[product].end() && found->second == 1;
  }
  // Matches select(v > c, 0, other).
  struct Limited {
    uint32_t v, c, other;
  };
  [[nodiscard]] std::optional<Limited> limited(uint32_t id) const {
    const Node& n = graph_[id];
    if (n.word != Word::select || n.rel() != Rel::gt || !constant(n.in[1]) || !constant(n.in[2]) ||
        graph_[n.in[2]].value != 0)
      return std::nullopt;
    return Limited{n.in[0], n.in[1], n.in[3]};
  }

  // m·t + m·v·(4·σ(2s)·σ(−2s))·σ(u) with t = tanh(s), s = softplus(u), u = min(v, c): the
  // derivative of m·v·t. The second term is 0 for v > c, where it is also negligible.
  [[nodiscard]] std::optional<Expr> mish_slope(const Node& n) const {
    const std::optional<Limited> second = limited(n.in[1]);
    const auto s = second ? softplus_slope(second->other) : std::nullopt;
    if (!s || !is_min(s->x, second->v, second->c) || !certain(second->c)) return std::nullopt;
    const Powers rest = more(s->of, n.in[0]);
    uint32_t t = kNone;
    bool pair = false, four = false;
    for (const auto& [factor, power] : rest) {
      const Node& f = graph_[factor];
      if (f.word == Word::tanh && power == -1 && softplus(f.in[0]) == s->x)
        t = factor;
      else if (f.word == Word::sigmoid && power == 1 && doubled_softplus(factor) == s->x)
        pair = pair || rest.contains(opposite(factor));
      else if (f.word == Word::constant && power == 1 && f.value == 4)
        four = true;
      else if (factor != second->v || power != 1)
        return std::nullopt;
    }
    if (t == kNone || !pair || !four || !rest.contains(second->v) || !once(n.in[0], t))
      return std::nullopt;
    const TanhSoftplus parts = tanh_softplus(s->x);
    // The product with x comes first, because e may be subnormal.
    const Expr slope = parts.r * fma(4.0F * image_[s->x] * parts.r, parts.product, parts.n);
    return exchanged(n.in[0], {{t, slope}});
  }

  // Matches erfc(k·min(v, c)) with v = max(x, −c) and k < 0. Beyond c it is 0 or 2 in fp32.
  struct LimitedErfc {
    uint32_t x, v, u;
    double k;
    float c;
    [[nodiscard]] Expr magnitude(const std::vector<Expr>& image) const {
      const double beyond = kExpBeyond / k;
      return min(abs(image[x]), c < beyond ? c : static_cast<float>(beyond));
    }
  };
  [[nodiscard]] std::optional<LimitedErfc> limited_erfc(uint32_t id) const {
    constexpr double kSmallest = 0x1p-8, kLargest = 0x1p8;  // the tables have powers of k
    const Node& n = graph_[id];
    if (n.word != Word::erfc || graph_[n.in[0]].word != Word::mul) return std::nullopt;
    const Node& scale = graph_[n.in[0]];
    const int i = constant(scale.in[0]) ? 0 : 1;
    const Node &k = graph_[scale.in[i]], &u = graph_[scale.in[1 - i]];
    if (k.word != Word::constant || u.word != Word::min || !constant(u.in[1])) return std::nullopt;
    const float c = graph_[u.in[1]].value;
    const Node& v = graph_[u.in[0]];
    if (!(-k.value >= kSmallest) || !(-k.value <= kLargest) || !(-k.value * c >= kErfcBeyond) ||
        v.word != Word::max || !constant(v.in[1]) || graph_[v.in[1]].value != -c)
      return std::nullopt;
    return LimitedErfc{v.in[0], u.in[0], scale.in[1 - i], -double{k.value}, c};
  }
  // f·v·erfc(k·min(v, c)) = 2f·max(v, 0) − |v|·f·erfc(|k·v|).
  [[nodiscard]] std::optional<Expr> erfc_product(const Node& n) const {
    const std::optional<LimitedErfc> e = limited_erfc(n.in[1]);
    if (!e) return std::nullopt;
    const Node& left = graph_[n.in[0]];
    float f = 1;
    if (n.in[0] != e->v) {
      if (left.word != Word::mul || !constant(left.in[0]) || left.in[1] != e->v)
        return std::nullopt;
      f = graph_[left.in[0]].value;
    }
    const Expr a = e->magnitude(image_);
    // The product with a comes first, because 2^x may be subnormal.
    const Expr tail = Hardware::times_exp_square(a * Hardware::erfc_ratio(a, e->k, f), a, e->k);
    return max(image_[e->x], -0.0F) * (2 * f) - tail;
  }
  // m·erfc(k·u) + m·v·q·exp(−(k·u)²), the derivative of m·v·erfc(k·u). The second term is 0 for
  // v > c, where it is also negligible.
  [[nodiscard]] std::optional<Expr> erfc_slope(const Node& n) const {
    const std::optional<Limited> second = limited(n.in[0]);
    if (!second) return std::nullopt;
    const Powers rest = more(second->other, n.in[1]);
    uint32_t t = kNone, squared = kNone;  // erfc(t), exp(−squared²)
    double q = 1;
    for (const auto& [factor, power] : rest) {
      const Node& f = graph_[factor];
      if (f.word == Word::constant) {
        q *= std::pow(f.value, power);
      } else if (f.word == Word::erfc && power == -1 && t == kNone) {
        t = factor;
      } else if (f.word == Word::exp && power == 1 && squared == kNone &&
                 graph_[f.in[0]].word == Word::neg) {
        const Node& square = graph_[graph_[f.in[0]].in[0]];
        if (square.word != Word::mul || square.in[0] != square.in[1]) return std::nullopt;
        squared = square.in[0];
      } else if (factor != second->v || power != 1) {
        return std::nullopt;
      }
    }
    const auto e = t == kNone ? std::nullopt : limited_erfc(t);
    if (!e || graph_[t].in[0] != squared || e->v != second->v || !rest.contains(e->v) ||
        graph_[second->c].value != e->c || !once(n.in[1], t))
      return std::nullopt;
    // A constant factor is folded into the tables.
    std::map<uint32_t, Expr> changes;
    float f = 1;
    for (const auto& [factor, power] : factors_[n.in[1]])
      if (constant(factor) && power == 1 && f == 1) {
        f = graph_[factor].value;
        changes[factor] = 1.0F;
      }
    const Expr x = image_[e->x], a = e->magnitude(image_);
    const Expr below = Hardware::times_exp_square(
        fma(a, static_cast<float>(-q * f), Hardware::erfc_ratio(a, e->k, f)), a, e->k);
    changes[t] = select(x > 0.0F, 2 * f - below, below);
    return exchanged(n.in[1], changes);
  }

  // Marks nodes whose errors of a few ulp matter: those with a user other than tanh and sigmoid,
  // which err by far more.
  void tolerate(uint32_t id) {
    const Node& n = graph_[id];
    const bool linear = n.word == Word::neg || (n.word == Word::add && n.in[0] == n.in[1]);
    const bool hides = n.word == Word::tanh || n.word == Word::sigmoid;
    for (int i = 0; i < n.arity(); ++i)
      if (!hides && !(linear && tolerant_[id])) tolerant_[n.in[static_cast<size_t>(i)]] = false;
  }
  static constexpr size_t kMostTerms = 4;
  static constexpr int kMostPower = 64;

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
    const auto long_product = [](const auto& term) {
      return std::ranges::any_of(term.first, [](const auto& p) { return p.second > kMostPower; });
    };
    return all.size() > kMostTerms || std::ranges::any_of(all, long_product) ? itself : all;
  }

  // Rewrites a sum as one product: the common factors of all terms, times a polynomial of one
  // bounded value. The product of the common factors must be in the formula and must be inexact.
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
    if (of == kNone || place == order_.end() || !errs_[*place] ||
        !range(image_[of]).within(-0x1p20F, 0x1p20F))
      return std::nullopt;
    return image_[*place] * evaluated(factors, image_[of]);
  }

  // m·s + m·s·σ(−a)·k(u) with s = σ(a(u)) and u = min(v, c): the derivative of m·v·s. The second
  // term applies only if v <= c.
  struct Slope {
    uint32_t first, s, u;  // m·s, s, u
    Polynomial rest = {};  // k(u)/u
    uint32_t w = kNone;    // the factor of u with a lower bound, if k(u) is u
  };

  // If k is small, 1 − s may replace σ(−a): the first term hides its error. If s is 1 for v > c,
  // the second term may stay there, with u for v.
  [[nodiscard]] std::optional<Slope> slope(uint32_t id, int i, double error) const {
    const Node& n = graph_[id];
    if (n.word != Word::add) return std::nullopt;
    const uint32_t first = n.in[static_cast<size_t>(i)];
    const Node& guarded = graph_[n.in[static_cast<size_t>(1 - i)]];
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
    Slope out{.first = first, .s = kNone, .u = *u};
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
    constexpr double kOff = 0x1p-22;  // error of 1 − s by the hardware functions
    const std::optional<double> end = value_at(graph_[out.s].in[0], *u, high);
    if (most * kOff > 0.75 * error || !(last > 0) || !end || *end < kCertain) return std::nullopt;
    if (!once(first, out.s)) return std::nullopt;
    return out;
  }
  // The factors of a product. Sums and long products count as one factor.
  [[nodiscard]] Powers factors(uint32_t id) const {
    const Node& n = graph_[id];
    Powers all;
    if (n.word == Word::mul)
      for (const uint32_t in : {n.in[0], n.in[1]})
        for (const auto& [factor, power] : factors_[in]) all[factor] += power;
    int count = 0;
    for (const auto& [factor, power] : all) count += power;
    constexpr int kMostFactors = 8;
    return n.word == Word::mul && count <= kMostFactors ? all : Powers{{id, 1}};
  }
  // Finds the factor w = max(·, c) of a product that is w, w times a positive constant, or max(·,
  // c/p) times p. The host checks that p is positive. So the product has a lower bound, and it is
  // finite where its sigmoid is 0.
  [[nodiscard]] uint32_t bounded_factor(const Powers& all) const {
    const auto moderate = [](float f) { return std::fabs(f) < 0x1p60F; };
    for (const auto& [w, power] : all) {
      const Node& most = graph_[w];
      if (most.word != Word::max || power != 1 || all.size() > 2) continue;
      const uint32_t p = all.begin()->first == w ? all.rbegin()->first : all.begin()->first;
      const Node &low = graph_[most.in[1]], &beside = graph_[p];
      if (p != w && all.at(p) != 1) continue;
      if (low.word == Word::constant && moderate(low.value) &&
          (p == w || (constant(p) && beside.value > 0 && moderate(beside.value))))
        return w;
      if (low.word == Word::div && constant(low.in[0]) && moderate(graph_[low.in[0]].value) &&
          low.in[1] == p && single(p))
        return w;
    }
    return kNone;
  }
  [[nodiscard]] bool single(uint32_t id) const {
    const Node& n = graph_[id];
    return n.word == Word::load && n.slot < loads_.size() && loads_[n.slot] == Loaded::single;
  }
  // m·s + m·s·σ(−a)·a with s = σ(a): the derivative of w·s if a is a multiple of w.
  [[nodiscard]] std::optional<Slope> own_slope(uint32_t id, int i) const {
    const Node& n = graph_[id];
    if (n.word != Word::add) return std::nullopt;
    const uint32_t first = n.in[static_cast<size_t>(i)];
    const Powers& known = factors_[first];
    Powers more = factors_[n.in[static_cast<size_t>(1 - i)]];
    for (const auto& [factor, power] : known) more[factor] -= power;
    std::erase_if(more, [](const auto& p) { return p.second == 0; });
    for (const auto& [s, power] : known) {
      const uint32_t other = opposite(s);
      if (other == kNone || !once(first, s)) continue;
      Powers expected = factors_[graph_[s].in[0]];
      const uint32_t w = bounded_factor(expected);
      ++expected[other];
      if (more != expected || w == kNone) continue;
      return Slope{.first = first, .s = s, .u = graph_[s].in[0], .w = w};
    }
    return std::nullopt;
  }
  // Uses slopes only if σ(−a) occurs nowhere else.
  void find_slopes(std::span<const uint32_t> roots, double error) {
    for (const uint32_t id : order_)
      for (const int i : {0, 1}) {
        if (const std::optional<Slope> s = slope(id, i, error)) slopes_.emplace(id, *s);
        if (const std::optional<Slope> s = own_slope(id, i)) slopes_.emplace(id, *s);
      }
    std::vector<bool> seen(graph_.size(), false);
    for (const uint32_t root : roots) seen[root] = true;
    for (size_t k = order_.size(); k-- > 0;) {
      const uint32_t id = order_[k];
      if (!seen[id]) continue;
      if (const auto found = slopes_.find(id); found != slopes_.end()) {
        const Slope& s = found->second;
        seen[s.first] = seen[s.u] = true;
      } else {
        for (int i = 0; i < graph_[id].arity(); ++i) seen[graph_[id].in[i]] = true;
      }
    }
    if (std::ranges::any_of(slopes_, [&](const auto& s) { return seen[opposite(s.second.s)]; }))
      slopes_.clear();
    for (const auto& [id, s] : slopes_) {
      alone_[s.s] = true;
      for (const auto& [factor, power] : factors_[s.u])
        if (s.w != kNone && single(factor)) positive_.push_back(graph_[factor].slot);
    }
  }
  // Replaces factors of a product. Keeps the order, so that overflow occurs where the formula
  // overflows.
  [[nodiscard]] Expr exchanged(uint32_t id, const std::map<uint32_t, Expr>& by) const {
    if (const auto found = by.find(id); found != by.end()) return found->second;
    const Node& n = graph_[id];
    const auto concerned = [&](const auto& change) { return factors_[id].contains(change.first); };
    if (n.word != Word::mul || std::ranges::none_of(by, concerned)) return image_[id];
    return exchanged(n.in[0], by) * exchanged(n.in[1], by);
  }
  // The factor of m in a slope with k(u) = u.
  [[nodiscard]] Expr own_factor(const Slope& s) const {
    const Expr sigmoid = Hardware::sigmoid(unclamped(s.s)), w = image_[s.w];
    Expr k = fma(-w, sigmoid, w);
    for (const auto& [factor, power] : factors_[s.u])
      if (factor != s.w) k = k * image_[factor];
    return fma(k, sigmoid, sigmoid);
  }
  // m·(s·(1 + k(u)·(1 − s))). kLess and the leading coefficient are folded into constants. If k(u)
  // is u > 0 and large, s is 1, because 1/2^n is exact.
  [[nodiscard]] Expr slope_of(const Slope& s) const {
    if (s.w != kNone) return exchanged(s.first, {{s.s, own_factor(s)}});
    const Expr u = image_[s.u];
    const float less = Hardware::kLess, last = static_cast<float>(s.rest.rbegin()->second);
    Polynomial rest = s.rest;
    for (auto& [power, factor] : rest) factor /= s.rest.rbegin()->second;
    const Expr part = Hardware::sigmoid_over_less(unclamped(s.s));
    const Expr other = fma(part, -less * less * last, less * last);
    return exchanged(s.first, {{s.s, part * fma(u * evaluated(rest, u), other, less)}});
  }

  // The value of a node of constants and `of`, if `of` is `value`.
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

  // The argument of a sigmoid without its clamp u = min(v, c). Conditions: u has no other use, the
  // argument consists of sums and products of u and positive constants, and the sigmoid at u = c is
  // 1.
  Expr unclamped(uint32_t id) const {
    const uint32_t top = graph_[id].in[0];
    std::map<uint32_t, int> uses{{top, 1}};  // in the argument; ids ascend from inputs to users
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
  const std::vector<Loaded>& loads_;
  std::vector<uint32_t> order_;
  std::vector<Expr> image_;
  std::vector<int> uses_;
  std::vector<uint32_t> sigmoid_, negated_;  // by their arguments
  std::vector<std::vector<uint32_t>> users_;
  std::set<uint32_t> spent_, spent_factors_, spent_products_;  // 0.5 ulp errors that are in use
  std::vector<bool> tolerant_, alone_, errs_;
  std::vector<Terms> terms_;
  std::vector<Powers> factors_;
  std::vector<uint32_t> positive_;
  std::map<uint32_t, Slope> slopes_;
  Lowered out_;
};

}  // namespace

Approximated approximated(const Graph& graph, std::span<const uint32_t> roots, double error,
                          const std::vector<Loaded>& loads) {
  const auto of = [](const auto& lowering) {
    return Approximated{lowering.result(), lowering.positive()};
  };
  if (error == 0) return of(Lowering<Exact>(graph, roots, error, loads));
  return error >= kRoughError ? of(Lowering<HardwareOf<true>>(graph, roots, error, loads))
                              : of(Lowering<HardwareOf<false>>(graph, roots, error, loads));
}

}  // namespace tenon
