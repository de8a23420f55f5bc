// Lists which pass reads and writes each buffer of a plan, and which buffers share memory.
#include <algorithm>

#include "lower/data.h"

namespace tenon {

size_t Plan::owner(size_t buffer) const {
  const int of = data_->same_as[buffer];
  return of == kNoBuffer ? buffer : owner(static_cast<size_t>(of));
}

std::vector<BufferUse> Plan::uses() const {
  const PlanData& d = *data_;
  std::vector<BufferUse> list(d.buffers.size());
  int step = 0;
  const auto mark = [&](int buffer, std::array<bool, 2> BufferUse::*how, Pass pass) {
    if (buffer == kNoBuffer) return;
    BufferUse& use = list[static_cast<size_t>(buffer)];
    const auto p = static_cast<size_t>(pass);
    (use.*how)[p] = true;
    use.first[p] = use.first[p] < 0 ? step : std::min(use.first[p], step);
    use.last[p] = std::max(use.last[p], step);
  };
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    step = 0;
    for (const PlanStep& s : d.steps(pass)) {
      for (const BufferView& v : s.in) mark(v.buffer, &BufferUse::reads, pass);
      for (const BufferView& v : s.out) mark(v.buffer, &BufferUse::writes, pass);
      mark(s.random, &BufferUse::reads, pass);
      ++step;
    }
  }
  // The first step of a forward run copies the random state for its dropouts and advances it.
  step = 0;
  mark(d.rng, &BufferUse::reads, Pass::forward);
  mark(d.rng, &BufferUse::writes, Pass::forward);
  mark(d.saved_rng, &BufferUse::writes, Pass::forward);

  for (size_t b = 0; b < list.size(); ++b) {
    if (const size_t of = owner(b); of != b) list[b].same_as = static_cast<int>(of);
    list[b].in_place = d.in_place[b];
  }
  std::vector<int> first(static_cast<size_t>(d.slots), -1);
  for (size_t b = 0; b < list.size(); ++b) {
    if (d.slot_of[b] == kNoBuffer) continue;
    int& owner = first[static_cast<size_t>(d.slot_of[b])];
    list[b].same_as = owner;
    if (owner < 0) owner = static_cast<int>(b);
  }
  return list;
}

}  // namespace tenon
