// The hash-consed graph, and simplifications that never change a bit.
#include <algorithm>
#include <cstring>

#include "core/fp_mode.h"
#include "expr/lane.h"
#include "expr/order.h"
#include "expr/word.h"
#include "tenon/error.h"
#include "tenon/expr.h"

namespace tenon {

namespace {

using Scalar = Lane<0>;

bool same_bits(float a, float b) {
  return __builtin_bit_cast(uint32_t, a) == __builtin_bit_cast(uint32_t, b);
}

bool is(Expr e, float value) { return e.is_constant() && same_bits(e.constant(), value); }

bool holds(Rel rel, float a, float b) {
  using Compare = bool (*)(Scalar, Scalar);
  constexpr std::array<Compare, kRels.size()> kCompare{compare<Rel::lt, 0>, compare<Rel::le, 0>,
                                                       compare<Rel::gt, 0>, compare<Rel::ge, 0>,
                                                       compare<Rel::eq, 0>, compare<Rel::ne, 0>};
  const FpMode ieee;  // hosts may have unmasked traps
  return kCompare[static_cast<size_t>(rel)](Scalar(a), Scalar(b));
}

// Evaluates a word of constants with the bits of the strict sequence.
float fold(Word w, std::span<const Expr> in, uint8_t detail) {
  const FpMode ieee;
  const auto arg = [&](size_t i) { return Scalar(i < in.size() ? in[i].constant() : 0.0F); };
  if (w == Word::round)
    return visit(static_cast<DType>(detail),
                 [&](auto tag) { return rounded_to<tag()>(in[0].constant()); });
  return kWordTable<words::Strict, Scalar>[index(w)](arg(0), arg(1), arg(2)).v;
}

const Node* node_of(Expr e) { return e.graph() ? &(*e.graph())[e.id()] : nullptr; }

}  // namespace

bool Expr::is_constant() const { return !graph_ || (*graph_)[id_].word == Word::constant; }
float Expr::constant() const { return graph_ ? (*graph_)[id_].value : constant_; }

namespace {

constexpr uint32_t kFree = UINT32_MAX;

size_t hash(const Node& n) {
  uint64_t h = (static_cast<uint64_t>(n.word) << 8) | n.detail;
  const auto mix = [&](uint64_t v) { h = (h ^ v) * 0x9E3779B97F4A7C15ULL ^ (h >> 29); };
  mix(__builtin_bit_cast(uint32_t, n.value));
  mix(n.slot);
  for (const uint32_t i : n.in) mix(i);
  return h ^ (h >> 32);
}

bool equal(const Node& a, const Node& b) {
  return a.word == b.word && a.detail == b.detail && same_bits(a.value, b.value) &&
         a.slot == b.slot && a.in == b.in;
}

}  // namespace

size_t Graph::place_of(const Node& node) const {
  const size_t mask = table_.size() - 1;
  size_t at = hash(node) & mask;
  while (table_[at] != kFree && !equal(nodes_[table_[at]], node)) at = (at + 1) & mask;
  return at;
}

void Graph::grow() {
  constexpr size_t kFirst = 64;  // a power of two
  table_.assign(std::max(kFirst, 2 * table_.size()), kFree);
  for (uint32_t id = 0; id < size(); ++id) table_[place_of(nodes_[id])] = id;
}

Expr Graph::intern(const Node& node) {
  if (2 * nodes_.size() >= table_.size()) grow();
  uint32_t& id = table_[place_of(node)];
  if (id == kFree) {
    require(size() < kMaxNodes, "formula: more than ", kMaxNodes,
            " nodes; split it into several functions");
    nodes_.push_back(node);
    id = size() - 1;
  }
  return {this, id};
}

Expr Graph::load(uint32_t slot) { return intern({.word = Word::load, .slot = slot}); }
Expr Graph::constant(float value) { return intern({.word = Word::constant, .value = value}); }

uint32_t Graph::id(Expr e) {
  if (!e.graph()) return constant(e.constant()).id();
  require(e.graph() == this, "formula: an expression was built from the inputs of another formula;",
          " use only the inputs that the function was called with");
  return e.id();
}

Expr apply_word(Word w, std::span<const Expr> in, uint8_t detail) {
  bool all_constant = true;
  Graph* graph = nullptr;
  for (const Expr& e : in) {
    all_constant = all_constant && e.is_constant();
    if (!graph) graph = e.graph();
  }
  if (w == Word::select && in[0].is_constant() && in[1].is_constant())
    return holds(static_cast<Rel>(detail), in[0].constant(), in[1].constant()) ? in[2] : in[3];
  if (all_constant && w != Word::select) return {fold(w, in, detail)};

  if (w == Word::mul && is(in[1], 1)) return in[0];
  if (w == Word::mul && is(in[0], 1)) return in[1];
  if (w == Word::div && is(in[1], 1)) return in[0];
  if (w == Word::add && is(in[1], -0.0F)) return in[0];
  if (w == Word::add && is(in[0], -0.0F)) return in[1];
  const Node* inner = w == Word::neg || w == Word::abs ? node_of(in[0]) : nullptr;
  if (w == Word::neg && inner->word == Word::neg) return {graph, inner->in[0]};
  Node node{.word = w, .detail = detail};
  for (size_t i = 0; i < in.size(); ++i) node.in[i] = graph->id(in[i]);
  if (w == Word::abs && inner->word == Word::neg && graph->lowered()) node.in[0] = inner->in[0];
  return graph->intern(node);
}

std::vector<uint32_t> order(const Graph& graph, std::span<const uint32_t> roots) {
  enum : uint8_t { fresh, open, done };
  std::vector<uint8_t> state(graph.size(), fresh);
  std::vector<uint32_t> result, stack;
  result.reserve(graph.size());
  stack.reserve(graph.size());
  for (auto root = roots.rbegin(); root != roots.rend(); ++root) stack.push_back(*root);
  while (!stack.empty()) {
    const uint32_t id = stack.back();
    const Node& n = graph[id];
    if (state[id] == fresh) {
      state[id] = open;
      for (int i = n.arity() - 1; i >= 0; --i)
        if (state[n.in[i]] == fresh) stack.push_back(n.in[i]);
    } else {
      stack.pop_back();
      if (state[id] == open) result.push_back(id);
      state[id] = done;
    }
  }
  return result;
}

}  // namespace tenon
