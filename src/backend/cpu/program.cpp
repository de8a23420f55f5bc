// Nodes to instructions, with slots reused as soon as a value is dead.
#include "backend/cpu/program.h"

#include <algorithm>

#include "expr/order.h"

namespace tenon::cpu {

namespace {

WordLoop loop_of(const Node& n, const Loops& loops, Precision precision) {
  if (n.word == Word::select) return loops.select[n.detail];
  if (n.word == Word::round) return loops.round[n.detail];
  return (precision == Precision::strict ? loops.strict : loops.native)[index(n.word)];
}

bool is_uniform(const Load& l) {
  return l.from == Load::From::scalar || l.from == Load::From::parameter;
}

}  // namespace

Program compile(const Step& step, const Loops& loops) {
  const Graph& graph = *step.graph;
  const Precision precision = step.effective_precision();
  const std::vector<uint32_t> roots = step.roots();
  const std::vector<uint32_t> nodes = order(graph, roots);

  constexpr size_t kForever = SIZE_MAX;
  std::vector<size_t> last(graph.size(), 0);
  std::vector<bool> uniform(graph.size(), false);
  for (size_t at = 0; at < nodes.size(); ++at) {
    const Node& n = graph[nodes[at]];
    bool all = n.word != Word::load || is_uniform(step.loads[n.slot]);
    for (int i = 0; i < n.arity(); ++i) {
      last[n.in[i]] = at;
      all = all && uniform[n.in[i]];
    }
    uniform[nodes[at]] = all;
  }
  for (const uint32_t root : roots) last[root] = kForever;

  Program p;
  p.slots = static_cast<uint32_t>(step.loads.size());
  std::vector<uint32_t> slot(graph.size(), 0), free;
  for (size_t at = 0; at < nodes.size(); ++at) {
    const uint32_t id = nodes[at];
    const Node& n = graph[id];
    if (n.word == Word::load) {
      slot[id] = n.slot;
      continue;
    }
    if (n.word == Word::constant) {
      slot[id] = p.slots++;
      p.constants.emplace_back(slot[id], n.value);
      continue;
    }
    // A uniform value lives on from tile to tile and never gives its slot back.
    if (uniform[id] || free.empty()) {
      slot[id] = p.slots++;
    } else {
      slot[id] = free.back();
      free.pop_back();
    }
    Instruction in{loop_of(n, loops, precision), slot[id], {}, n.arity()};
    for (int i = 0; i < n.arity(); ++i) in.in[i] = slot[n.in[i]];
    (uniform[id] ? p.once : p.tile).push_back(in);
    for (int i = 0; i < n.arity(); ++i) {
      const uint32_t child = n.in[i];
      const bool temporary = graph[child].arity() > 0 && !uniform[child];
      const bool repeated = std::find(n.in.begin(), n.in.begin() + i, child) != n.in.begin() + i;
      if (temporary && last[child] == at && !repeated) free.push_back(slot[child]);
    }
  }
  for (const uint32_t root : roots) p.results.push_back(slot[root]);
  return p;
}

}  // namespace tenon::cpu
