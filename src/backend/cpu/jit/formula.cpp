// Native formulas use 2^x and 1/x of the instruction set, as roughly as their results allow.
#include "backend/cpu/jit/formula.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "backend/cpu/jit/exp2.h"
#include "expr/hardware.h"
#include "expr/native.h"
#include "expr/words.h"

namespace tenon::cpu::jit {

namespace {

using hardware::kEx2, hardware::kLg2, hardware::kRcp;

// 2^x for x in [-126, 128], by fp32 operations. Results below 2^-125.5 are 0. n = 128 needs a power
// less than 2^n.
Expr portable_ex2(Expr x) {
  constexpr float kLess = words::kPower - 1;
  const Expr limited = clamp(x, -126.0F, 128.0F);
  const Expr shifted = limited + kLess;
  const Expr n = shifted - kLess;
  return words::polynomial(limited - n, kExp2Twice) * pow2(shifted);
}

// Replaces functions that the instruction set lacks.
Lowered available(const Lowered& from, bool wide) {
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    if (n.word == kLg2) return words::Strict::log(image[n.in[0]]) * words::kLog2e;
    if (n.word == kEx2 && !wide) return portable_ex2(image[n.in[0]]);
    if (n.word == kRcp && !wide) return inverse(image[n.in[0]]);
    return std::nullopt;
  });
}

// The parts of 1/(2^t + k), of which σ is a multiple.
struct Sigmoid {
  uint32_t ex2;  // the node 2^t
  float k;
};
std::optional<Sigmoid> sigmoid(const Graph& g, uint32_t rcp) {
  if (g[rcp].word != kRcp) return std::nullopt;
  const Node& sum = g[g[rcp].in[0]];
  if (sum.word != Word::add || g[sum.in[0]].word != kEx2) return std::nullopt;
  const Node& k = g[sum.in[1]];
  if (k.word != Word::constant || !(k.value > 0)) return std::nullopt;
  return Sigmoid{sum.in[0], k.value};
}

// The node r of b·(1 − k·r) with r = 1/(2^t + k): a difference that a rough r makes useless. It is
// a sum of constants and r, or b − b·(k·r).
std::optional<uint32_t> complement(const Graph& g, const Node& n) {
  if (n.word != Word::fma) return std::nullopt;
  const Node &left = g[n.in[0]], &product = g[n.in[1]];
  if (left.word == Word::neg && left.in[0] == n.in[2] && product.word == Word::mul) {
    const std::optional<Sigmoid> s = sigmoid(g, product.in[0]);
    const Node& k = g[product.in[1]];
    return s && k.word == Word::constant && k.value == s->k ? std::optional(product.in[0])
                                                            : std::nullopt;
  }
  if (product.word != Word::constant || g[n.in[2]].word != Word::constant) return std::nullopt;
  const std::optional<Sigmoid> s = sigmoid(g, n.in[0]);
  if (!s || g[n.in[1]].value != -g[n.in[2]].value * s->k) return std::nullopt;
  return n.in[0];
}

// The nodes all of whose uses are multiplied by r in the end. They have no effect where r is 0.
std::vector<bool> hidden_by(const Lowered& from, uint32_t r) {
  const Graph& g = from.graph;
  const std::vector<uint32_t> nodes = order(g, from.roots);  // inputs first
  std::vector<bool> multiple(g.size()), hidden(g.size(), true);
  for (const uint32_t id : nodes) {
    const Node& n = g[id];
    multiple[id] = id == r || (n.word == Word::mul && (multiple[n.in[0]] || multiple[n.in[1]]));
  }
  for (const uint32_t root : from.roots) hidden[root] = false;
  for (size_t k = nodes.size(); k-- > 0;) {
    const Node& n = g[nodes[k]];
    for (int i = 0; i < n.arity(); ++i) {
      const bool factor = i < 2 && (n.word == Word::mul || n.word == Word::fma);
      const bool linear = factor || n.word == Word::fma || n.word == Word::add;
      if ((factor && multiple[n.in[1 - i]]) || (linear && hidden[nodes[k]])) continue;
      hidden[n.in[i]] = false;
    }
  }
  return hidden;
}

// b·(1 − k·r) becomes b·(2^t·r), if it is hidden where r is 0: there 2^t is infinite, and the limit
// keeps the product a number.
Lowered without_complements(const Lowered& from) {
  constexpr float kMost = 0x1p126F;
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    const std::optional<uint32_t> r = complement(from.graph, n);
    if (!r || !hidden_by(from, *r)[static_cast<size_t>(&n - &from.graph[0])]) return std::nullopt;
    return min(image[sigmoid(from.graph, *r)->ex2], kMost) * image[*r] * image[n.in[2]];
  });
}

// 2·x, if that changes a constant of x only.
std::optional<Expr> twice(Expr x) {
  if (hardware::is(x, Word::neg) || hardware::is(x, Word::abs)) {
    const std::optional<Expr> in = twice(hardware::input(x, 0));
    if (!in) return std::nullopt;
    return hardware::is(x, Word::neg) ? -*in : abs(*in);
  }
  const auto m = hardware::multiple(x);
  return m ? std::optional(m->of * (2 * m->factor)) : std::nullopt;
}
// The square of 2^x becomes 2^(2x): subnormal results are exact here.
Lowered without_squares(const Lowered& from) {
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    const Node& root = from.graph[n.in[0]];
    const bool squares = n.word == Word::mul || n.word == Word::fma;
    if (!squares || n.in[0] != n.in[1] || root.word != kEx2) return std::nullopt;
    const std::optional<Expr> x = twice(image[root.in[0]]);
    if (!x) return std::nullopt;
    const Expr power = hardware::ex2(*x, hardware::is_rough(root));
    return n.word == Word::mul ? power : power + image[n.in[2]];
  });
}

// The error that σ may have is enough for rough functions, if nothing is subtracted from it.
Lowered roughened(const Lowered& from, double allowed) {
  const Graph& g = from.graph;
  if (allowed < hardware::kRoughError) return from;
  const std::vector<uint32_t> nodes = order(g, from.roots);
  std::vector<bool> rough(g.size(), true);
  for (const uint32_t id : nodes) {
    const Node& n = g[id];
    const auto constant = [&](int i) { return g[n.in[i]].word == Word::constant; };
    if (const std::optional<uint32_t> r = complement(g, n)) rough[*r] = false;
    for (int i = 0; i < n.arity(); ++i) {
      const Node& in = g[n.in[i]];
      const bool sum = n.word == Word::add || n.word == Word::sub;
      if (in.word == kRcp) {
        const bool difference = (sum && constant(1 - i)) ||
                                (n.word == Word::fma && i < 2 && constant(1 - i) && constant(2));
        if (difference || !sigmoid(g, n.in[i])) rough[n.in[i]] = false;
      } else if (in.word == kEx2) {
        const bool limited = n.word == Word::min && constant(1 - i);
        const bool denominator =
            n.word == Word::add && i == 0 && constant(1) && g[n.in[1]].value > 0;
        if (!limited && !denominator) rough[n.in[i]] = false;
      }
    }
  }
  // Both functions of a σ are rough, or none. A sum 2^t + k may have other readers.
  for (const uint32_t id : nodes) {
    const Node& n = g[id];
    for (int i = 0; i < n.arity(); ++i) {
      const Node& in = g[n.in[i]];
      if (in.word == Word::add && g[in.in[0]].word == kEx2 && n.word != kRcp)
        rough[in.in[0]] = false;
    }
  }
  for (int pass = 0; pass < 2; ++pass)
    for (const uint32_t id : nodes)
      if (const auto s = sigmoid(g, id)) {
        if (!rough[id]) rough[s->ex2] = false;
        if (!rough[s->ex2]) rough[id] = false;
      }
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    if ((n.word != kEx2 && n.word != kRcp) || !rough[static_cast<size_t>(&n - &g[0])])
      return std::nullopt;
    const Expr x = image[n.in[0]];
    return x.graph()->intern({.word = n.word, .detail = 1, .in = {x.id()}});
  });
}

// p·2^h·2^(n − h), as words::scale() computes p·2^n, is one instruction. It rounds once too.
Lowered with_powers(const Lowered& from) {
  const Graph& g = from.graph;
  // The x of 2^x, an operand of the product.
  const auto power = [&](const Node& product) -> std::optional<uint32_t> {
    const Node& p = g[product.in[1]];
    if (product.word != Word::mul || p.word != Word::pow2) return std::nullopt;
    const Node& sum = g[p.in[0]];
    const bool whole = sum.word == Word::add && g[sum.in[1]].word == Word::constant &&
                       g[sum.in[1]].value == words::kPower;
    return whole ? std::optional(sum.in[0]) : std::nullopt;
  };
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    const std::optional<uint32_t> rest = power(n);
    const std::optional<uint32_t> half = rest ? power(g[n.in[0]]) : std::nullopt;
    if (!half || g[*rest].word != Word::sub || g[*rest].in[1] != *half) return std::nullopt;
    const Expr p = image[g[n.in[0]].in[0]], whole = image[g[*rest].in[0]];
    return whole.graph()->intern(
        {.word = Word::mul, .detail = kPower, .in = {whole.graph()->id(p), whole.id()}});
  });
}

// −a·b + c, a·b − c and −|a| are one instruction.
Lowered with_negated(const Lowered& from) {
  const Graph& g = from.graph;
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    const auto minus = [&](int i) { return g[n.in[i]].word == Word::neg; };
    const auto inner = [&](int i) { return image[minus(i) ? g[n.in[i]].in[0] : n.in[i]]; };
    const auto made = [&](Word w, int negated, std::initializer_list<Expr> in) {
      Node node{.word = w, .detail = static_cast<uint8_t>(negated)};
      Graph& to = *std::ranges::find_if(in, [](Expr e) { return e.graph(); })->graph();
      std::ranges::transform(in, node.in.begin(), [&](Expr e) { return to.id(e); });
      return to.intern(node);
    };
    if (n.word == Word::neg && g[n.in[0]].word == Word::abs)
      return made(Word::abs, kResult, {image[g[n.in[0]].in[0]]});
    if (n.word != Word::fma || !(minus(0) || minus(1) || minus(2))) return std::nullopt;
    const int negated = (minus(0) != minus(1) ? kProduct : 0) | (minus(2) ? kSummand : 0);
    return made(Word::fma, negated, {inner(0), inner(1), inner(2)});
  });
}

}  // namespace

Rounding rounding_of(const Step& step, const Store& store) {
  const Graph& g = *step.graph;
  const Node& value = g[store.value];
  if (value.word == Word::round)
    return value.dtype() == DType::bf16 ? Rounding::exact : Rounding::even;
  if (step.native_error() == 0) return Rounding::even;
  const std::vector<uint32_t> nodes = order(g, std::span(&store.value, 1));
  const bool approximated = std::ranges::any_of(
      nodes, [&](uint32_t id) { return info(g[id].word).kind == WordKind::transcendental; });
  return approximated ? Rounding::half_up : Rounding::even;
}

Approximated formula(const Step& step, bool wide, bool ordinary) {
  const std::vector<uint32_t> roots = step.roots();
  const double error = step.native_error();
  if (error == 0) {
    const Lowered own = step.strict_bits() ? lower(*step.graph, roots, Precision::strict)
                                           : native(*step.graph, roots, 0);
    return {with_negated(wide ? with_powers(own) : own), {}};
  }
  std::vector<Loaded> loads(ordinary ? step.loads.size() : 0);
  for (size_t i = 0; i < loads.size(); ++i)
    if (step.loads[i].from == Load::From::parameter) loads[i] = Loaded::single;
  const Approximated own = native(*step.graph, roots, error, loads);
  const Lowered rough =
      wide ? roughened(without_complements(without_squares(own.formula)), error) : own.formula;
  return {with_negated(available(rough, wide)), own.positive};
}

}  // namespace tenon::cpu::jit
