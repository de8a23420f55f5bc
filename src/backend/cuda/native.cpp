// Rewrites approximated formulas for eight elements per thread, and prints them.
#include "backend/cuda/native.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "expr/hardware.h"
#include "expr/native.h"
#include "expr/order.h"
#include "expr/print.h"
#include "expr/word.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

using namespace hardware;

// 2^(c·(p·x) + k) becomes 2^((c·p)·x + k), because c·p is the same for all elements.
Lowered joined(const Lowered& from, const std::vector<Loaded>& loads) {
  const Graph& graph = from.graph;
  std::vector<int> uses(graph.size(), 0);
  for (const uint32_t id : order(graph, from.roots))
    for (int i = 0; i < graph[id].arity(); ++i) ++uses[graph[id].in[i]];
  const auto single = [&](uint32_t id) {
    return graph[id].word == Word::load && loads[graph[id].slot] == Loaded::single;
  };
  return rewritten(from, [&](const Node& n, const Images& image) -> std::optional<Expr> {
    if (n.word != kEx2) return std::nullopt;
    const Node& top = graph[n.in[0]];
    const bool sum = top.word == Word::add && graph[top.in[1]].word == Word::constant;
    const Node& scaled = sum ? graph[top.in[0]] : top;
    if (scaled.word != Word::mul || graph[scaled.in[1]].word != Word::constant ||
        graph[scaled.in[0]].word != Word::mul || uses[scaled.in[0]] > 1)
      return std::nullopt;
    const Node& product = graph[scaled.in[0]];
    const int i = single(product.in[0]) ? 0 : 1;
    if (!single(product.in[i])) return std::nullopt;
    const Expr power = image[product.in[1 - i]] * (image[product.in[i]] * image[scaled.in[1]]);
    return ex2(sum ? power + image[top.in[1]] : power);
  });
}

// The strict values of all nodes for given values of the loads, children first.
std::vector<Expr> values(const Graph& graph, std::span<const float> loads) {
  std::vector<Expr> image(graph.size());
  for (uint32_t id = 0; id < graph.size(); ++id) {
    const Node& n = graph[id];
    std::array<Expr, 4> in;
    for (int i = 0; i < n.arity(); ++i) in[i] = image[n.in[i]];
    if (n.arity() == 0)
      image[id] = n.word == Word::constant ? n.value : loads[n.slot];
    else
      image[id] = apply_word(n.word, std::span(in).first(n.arity()), n.detail);
  }
  return image;
}

// Values that are the same for all elements become extra loads. The host computes them, so no
// thread holds them in registers. The sign of a load is free.
struct Parted {
  Lowered rest;
  std::shared_ptr<const Lowered> singles;  // null if there are none
};
Parted parted(const Lowered& from, const std::vector<Loaded>& loads, size_t most) {
  const Graph& graph = from.graph;
  constexpr std::array kWords{Word::add, Word::sub, Word::mul, Word::div,
                              Word::min, Word::max, Word::neg, Word::abs};
  const auto leaf = [&](uint32_t id) { return graph[id].arity() == 0; };
  std::vector<bool> single(graph.size(), false), wanted(graph.size(), false);
  const std::vector<uint32_t> nodes = order(graph, from.roots);
  for (const uint32_t id : nodes) {
    const Node& n = graph[id];
    const auto inputs = std::span(n.in).first(static_cast<size_t>(n.arity()));
    single[id] = leaf(id) ? n.word == Word::constant || loads[n.slot] == Loaded::single
                          : std::ranges::find(kWords, n.word) != kWords.end() &&
                                std::ranges::all_of(inputs, [&](uint32_t i) { return single[i]; });
    for (const uint32_t i : inputs) wanted[i] = wanted[i] || !single[id];
  }
  for (const uint32_t root : from.roots) wanted[root] = true;
  std::vector<uint32_t> found;
  for (const uint32_t id : nodes)
    if (single[id] && wanted[id] && !leaf(id) && (graph[id].arity() > 1 || !leaf(graph[id].in[0])))
      found.push_back(id);
  found.resize(std::min(found.size(), most));
  if (found.empty()) return {from, nullptr};
  const auto place = [&](const Node& n) {
    return std::ranges::find(found, static_cast<uint32_t>(&n - &graph[0])) - found.begin();
  };
  const auto whole = [](const Node&, const Images&) { return std::optional<Expr>(); };
  return {rewritten(from,
                    [&](const Node& n, const Images& image) -> std::optional<Expr> {
                      const auto i = static_cast<size_t>(place(n));
                      if (i == found.size()) return std::nullopt;
                      const bool first = image[n.in[0]].graph() != nullptr;
                      Graph* const g = image[n.in[first ? 0 : 1]].graph();
                      return g->load(static_cast<uint32_t>(loads.size() + i));
                    }),
          std::make_shared<const Lowered>(rewritten({graph, found}, whole))};
}

// Whether a node is a load of bf16 pairs, and whether a constant is exact in bf16.
bool paired(const Node& n, const std::vector<Loaded>& loads) {
  return n.word == Word::load && loads[n.slot] == Loaded::pairs;
}
bool short_number(const Node& n) {
  return n.word == Word::constant && __builtin_bit_cast(uint32_t, n.value) % 0x10000 == 0;
}

// If all results are select(x < c, 0, ·) with c <= 0, and · of zeros is 0, sets the loads to 0
// instead. x is set last.
std::string zeros_first(const Graph& formula, std::span<const uint32_t> roots, Lowered& from,
                        const std::vector<Loaded>& loads) {
  const Graph& graph = from.graph;
  const Node& n = graph[from.roots[0]];
  if (std::ranges::any_of(from.roots, [&](uint32_t r) { return r != from.roots[0]; }) ||
      n.word != Word::select || n.rel() != Rel::lt || !paired(graph[n.in[0]], loads) ||
      !short_number(graph[n.in[1]]) || graph[n.in[2]].word != Word::constant ||
      graph[n.in[2]].value != 0 || !(graph[n.in[1]].value <= 0) ||
      values(formula, std::vector<float>(loads.size(), 0))[roots[0]].constant() != 0)
    return "";
  const uint32_t x = graph[n.in[0]].slot;
  const auto line = [&](uint32_t slot) {
    return str("tenon_zero8(in[", slot, "], in[", x, "], ", literal(graph[n.in[1]].value), ");\n");
  };
  std::string lines;
  for (const uint32_t id : order(graph, from.roots)) {
    const Node& l = graph[id];
    if (l.word != Word::load || l.slot == x) continue;
    if (!paired(l, loads)) return "";
    lines += line(l.slot);
  }
  for (uint32_t& root : from.roots) root = n.in[3];
  return lines + line(x);
}

// Clamps loads in pairs first, if the load has no other use.
EightLines clamps_first(const Lowered& from, const std::vector<Loaded>& loads, std::string ready) {
  const Graph& graph = from.graph;
  const std::vector<uint32_t> nodes = order(graph, from.roots);
  std::vector<int> uses(graph.size(), 0);
  for (const uint32_t root : from.roots) ++uses[root];
  for (const uint32_t id : nodes)
    for (int i = 0; i < graph[id].arity(); ++i) ++uses[graph[id].in[i]];
  const auto clamps = [&](uint32_t id) {
    const Node& n = graph[id];
    return (n.word == Word::min || n.word == Word::max) && paired(graph[n.in[0]], loads) &&
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
  return clamps_first(rewritten(from, without), loads, std::move(ready));
}

}  // namespace

std::string native_lines(const Graph& graph, std::span<const uint32_t> roots, double error) {
  const Lowered out = native(graph, roots, error);
  return print(out.graph, out.roots, name_of);
}

EightLines native_eight(const Graph& graph, std::span<const uint32_t> roots, double error,
                        const std::vector<Loaded>& loads, size_t most_singles) {
  const Approximated first = approximated(graph, roots, error, loads);
  const Parted parts = parted(joined(unclamped(first.formula), loads), loads, most_singles);
  Lowered out = contracted(parts.rest);
  std::vector<Loaded> all = loads;
  all.resize(loads.size() + (parts.singles ? parts.singles->roots.size() : 0), Loaded::single);
  std::string ready = zeros_first(graph, roots, out, all);
  EightLines lines = clamps_first(out, all, std::move(ready));
  lines.singles = {parts.singles, first.positive};
  return lines;
}

std::vector<float> Singles::values(std::span<const float> loads) const {
  std::vector<float> all;
  if (!formulas) return all;
  const std::vector<Expr> of = cuda::values(formulas->graph, loads);
  for (const uint32_t root : formulas->roots) all.push_back(of[root].constant());
  return all;
}

bool Singles::fit(std::span<const float> loads) const {
  return std::ranges::all_of(positive, [&](uint32_t slot) { return loads[slot] > 0; }) &&
         std::ranges::all_of(values(loads), [](float v) { return std::isfinite(v); });
}

}  // namespace tenon::cuda
