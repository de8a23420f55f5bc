// Assigns workspace slots: buffers with disjoint lifetimes share a slot.
#include "lower/workspace.h"

#include <algorithm>

namespace tenon {

void assign_slots(PlanData& d) {
  const size_t n = d.buffers.size();
  std::vector<int> first(n, -1), last(n, -1);
  int at = 0;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : d.steps(pass)) {
      for (const auto* list : {&s.in, &s.out})
        for (const BufferView& v : *list) {
          if (v.buffer == kNoBuffer) continue;
          const auto b = static_cast<size_t>(v.buffer);
          if (first[b] < 0) first[b] = at;
          last[b] = at;
        }
      ++at;
    }
  const int turn = static_cast<int>(d.forward.size());
  d.slot_of.assign(n, kNoBuffer);
  std::vector<int> busy;  // by slot: the last step that uses it
  for (size_t b = 0; b < n; ++b) {
    Buffer& buffer = d.buffers[b];
    if (buffer.role != Role::workspace || first[b] < 0) continue;
    // A forward buffer that the backward pass reads must be saved between the passes.
    if (first[b] < turn && last[b] >= turn) buffer.role = Role::saved;
  }
  std::vector<size_t> order;
  for (size_t b = 0; b < n; ++b)
    if (d.buffers[b].role == Role::workspace && first[b] >= 0) order.push_back(b);
  std::ranges::stable_sort(order, {}, [&](size_t b) { return first[b]; });
  for (const size_t b : order) {
    size_t slot = 0;
    while (slot < busy.size() && busy[slot] >= first[b]) ++slot;
    if (slot == busy.size()) busy.push_back(0);
    busy[slot] = last[b];
    d.slot_of[b] = static_cast<int>(slot);
  }
  d.slots = static_cast<int>(busy.size());
}

}  // namespace tenon
