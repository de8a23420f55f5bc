// Compiles nodes to instructions. A slot is reused as soon as its value is dead.
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

// The range over which a value is constant.
enum Extent : uint8_t { call, row, tile };

Extent extent(const Load& l) {
  switch (l.from) {
    case Load::From::scalar:
    case Load::From::parameter:
      return call;
    case Load::From::column:
    case Load::From::total:
      return row;
    default:
      return tile;
  }
}

constexpr uint32_t kNone = UINT32_MAX;

class Compiler {
 public:
  Compiler(const Step& step, const Loops& loops)
      : step_(step),
        graph_(*step.graph),
        loops_(loops),
        extent_(graph_.size(), call),
        slot_(graph_.size(), kNone),
        spread_(graph_.size(), kNone) {
    for (const uint32_t id : order(graph_, step.roots())) {
      const Node& n = graph_[id];
      if (n.word == Word::load) extent_[id] = extent(step.loads[n.slot]);
      for (int i = 0; i < n.arity(); ++i) extent_[id] = std::max(extent_[id], extent_[n.in[i]]);
    }
    program_.slots = static_cast<uint32_t>(step.loads.size());
  }

  LoopProgram run() {
    for (const uint32_t total : step_.totals()) {
      phase({total});
      program_.phases.back().result = wide(total);
    }
    std::vector<uint32_t> values;
    for (const Store& s : step_.stores) values.push_back(s.value);
    phase(values);
    for (const Store& s : step_.stores)
      program_.results.push_back(s.to == Store::To::column ? slot_[s.value] : wide(s.value));
    return std::move(program_);
  }

 private:
  uint32_t new_slot() { return program_.slots++; }

  // The slot that holds one value per element of a tile.
  uint32_t wide(uint32_t id) {
    if (extent_[id] != row) return slot_[id];
    if (spread_[id] == kNone) {
      spread_[id] = new_slot();
      program_.phases.back().spread.emplace_back(slot_[id], spread_[id]);
    }
    return spread_[id];
  }

  void phase(const std::vector<uint32_t>& roots) {
    program_.phases.emplace_back();
    const std::vector<uint32_t> nodes = order(graph_, roots);
    constexpr size_t kForever = SIZE_MAX;
    std::vector<size_t> last(graph_.size(), 0);
    for (size_t at = 0; at < nodes.size(); ++at)
      for (int i = 0; i < graph_[nodes[at]].arity(); ++i) last[graph_[nodes[at]].in[i]] = at;
    for (const uint32_t root : roots) last[root] = kForever;
    free_ = temporaries_;
    for (size_t at = 0; at < nodes.size(); ++at) {
      const uint32_t id = nodes[at];
      if (extent_[id] == tile)
        in_tiles(id, at, last);
      else if (slot_[id] == kNone)
        kept(id);
    }
  }

  // A value that is kept from tile to tile never frees its slot.
  void kept(uint32_t id) {
    const Node& n = graph_[id];
    if (n.word == Word::load) {
      slot_[id] = n.slot;
      return;
    }
    slot_[id] = new_slot();
    if (n.word == Word::constant) {
      program_.constants.emplace_back(slot_[id], n.value);
      return;
    }
    Instruction in{loop_of(n, loops_, step_.effective_precision()), slot_[id], {}, n.arity()};
    for (int i = 0; i < n.arity(); ++i) in.in[i] = slot_[n.in[i]];
    (extent_[id] == call ? program_.once : program_.phases.back().row).push_back(in);
  }

  void in_tiles(uint32_t id, size_t at, const std::vector<size_t>& last) {
    const Node& n = graph_[id];
    if (n.word == Word::load) {
      slot_[id] = n.slot;
      program_.phases.back().loads.push_back(n.slot);
      return;
    }
    if (free_.empty()) {
      temporaries_.push_back(new_slot());
      free_.push_back(temporaries_.back());
    }
    slot_[id] = free_.back();
    free_.pop_back();
    Instruction in{loop_of(n, loops_, step_.effective_precision()), slot_[id], {}, n.arity()};
    for (int i = 0; i < n.arity(); ++i) in.in[i] = wide(n.in[i]);
    program_.phases.back().tile.push_back(in);
    for (int i = 0; i < n.arity(); ++i) {
      const uint32_t child = n.in[i];
      const bool temporary = graph_[child].arity() > 0 && extent_[child] == tile;
      const bool repeated = std::find(n.in.begin(), n.in.begin() + i, child) != n.in.begin() + i;
      if (temporary && last[child] == at && !repeated) free_.push_back(slot_[child]);
    }
  }

  const Step& step_;
  const Graph& graph_;
  const Loops& loops_;
  std::vector<Extent> extent_;
  std::vector<uint32_t> slot_, spread_;       // by node
  std::vector<uint32_t> temporaries_, free_;  // all temporary slots; the unused ones
  LoopProgram program_;
};

}  // namespace

LoopProgram compile(const Step& step, const Loops& loops) { return Compiler(step, loops).run(); }

}  // namespace tenon::cpu
