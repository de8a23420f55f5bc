// Places workspace buffers: buffers with disjoint lifetimes share memory.
#include "lower/workspace.h"

#include <algorithm>

namespace tenon {

namespace {

// The first and the last step of a pass that uses each buffer. -1: none.
struct Lifetimes {
  std::vector<int> first, last;

  Lifetimes(const PlanData& d, Pass pass) : first(d.buffers.size(), -1), last(first) {
    const std::vector<PlanStep>& steps = d.steps(pass);
    for (size_t at = 0; at < steps.size(); ++at)
      for (const auto* list : {&steps[at].in, &steps[at].out})
        for (const BufferView& v : *list) {
          if (v.buffer == kNoBuffer) continue;
          const auto b = static_cast<size_t>(v.buffer);
          if (first[b] < 0) first[b] = static_cast<int>(at);
          last[b] = static_cast<int>(at);
        }
  }
  [[nodiscard]] bool uses(size_t b) const { return first[b] >= 0; }
};

// The size of a buffer at many rows, to compare buffers. It cannot overflow.
double typical_bytes(const Buffer& b) {
  constexpr double kRows = 4096;
  const double rows = kRows * static_cast<double>(b.rows.mul) / static_cast<double>(b.rows.div);
  return (rows + static_cast<double>(b.rows.add)) * static_cast<double>(b.cols) *
         static_cast<double>(info(b.dtype).bytes);
}

std::vector<size_t> workspace_of(const PlanData& d, const Lifetimes& life) {
  std::vector<size_t> order;
  for (size_t b = 0; b < d.buffers.size(); ++b)
    if (d.buffers[b].role == Role::workspace && life.uses(b)) order.push_back(b);
  std::ranges::stable_sort(order, {}, [&](size_t b) { return life.first[b]; });
  return order;
}

// Gives each buffer of a pass the free slot that fits best: the smallest of those that are large
// enough, else the largest.
void assign_slots(PlanData& d, const Lifetimes& life) {
  struct Slot {
    int number, last;
    double bytes;
  };
  std::vector<Slot> slots;
  for (const size_t b : workspace_of(d, life)) {
    const double bytes = typical_bytes(d.buffers[b]);
    Slot* best = nullptr;
    for (Slot& s : slots) {
      if (s.last >= life.first[b]) continue;
      const bool fits = s.bytes >= bytes;
      const bool best_fits = best && best->bytes >= bytes;
      if (!best ||
          (fits ? !best_fits || s.bytes < best->bytes : !best_fits && s.bytes > best->bytes))
        best = &s;
    }
    if (!best) best = &slots.emplace_back(Slot{d.slots++, 0, 0});
    best->last = life.last[b];
    best->bytes = std::max(best->bytes, bytes);
    d.slot_of[b] = best->number;
  }
}

bool never_larger(const Buffer& a, const Buffer& b) {
  return a.rows == b.rows && a.cols * info(a.dtype).bytes <= b.cols * info(b.dtype).bytes;
}

// Whether a step reads each element of `from` only where it writes the same element of `to`.
bool in_place(const PlanStep& s, size_t from, size_t to) {
  std::vector<ColumnMap> read, written;
  const auto is = [](const std::vector<BufferView>& views, uint32_t arg, size_t buffer) {
    return arg < views.size() && views[arg].buffer == static_cast<int>(buffer);
  };
  DType dtype = DType::f32;
  for (const Load& l : s.step.loads) {
    if (!reads_view(l) || !is(s.in, l.arg, from)) continue;
    if (l.from != Load::From::tile || l.transposed) return false;
    dtype = l.dtype;
    read.push_back(l.columns);
  }
  for (const Store& store : s.step.stores) {
    if (store.to == Store::To::encoded || !is(s.out, store.arg, to)) continue;
    if (store.to != Store::To::tile || store.dtype != dtype) return false;
    written.push_back(store.columns);
  }
  for (const Encoder& e : s.step.encoders)
    for (uint32_t i = 0; i < Encoder::outputs; ++i)
      if (is(s.out, e.out + i, to)) return false;
  if (const Gemm* const g = s.step.gemm())
    for (const Matrix* m : {&g->a, &g->b})
      if (is(s.in, m->arg, from)) return false;
  const auto among = [](const std::vector<ColumnMap>& all) {
    return [&all](const ColumnMap& m) { return std::ranges::find(all, m) != all.end(); };
  };
  return !read.empty() && !written.empty() && !s.opaque &&
         std::ranges::all_of(read, among(written)) && std::ranges::all_of(written, among(read));
}

// Finds saved buffers whose last reader has run when a workspace buffer of the backward pass
// begins.
void assign_saved(PlanData& d, const Lifetimes& life) {
  d.saved_for.assign(d.buffers.size(), kNoBuffer);
  d.in_place.assign(d.buffers.size(), kNoBuffer);
  std::vector<int> free_from(d.buffers.size(), -1);  // the step from which on it can be used
  for (size_t b = 0; b < d.buffers.size(); ++b)
    if (d.buffers[b].role == Role::saved && !d.buffers[b].random && life.uses(b))
      free_from[b] = life.last[b] + 1;
  for (const size_t b : workspace_of(d, life)) {
    const Buffer& buffer = d.buffers[b];
    const int begin = life.first[b];
    const auto suits = [&](size_t s) {
      if (free_from[s] < 0 || !never_larger(buffer, d.buffers[s])) return false;
      if (free_from[s] <= begin) return true;
      return free_from[s] == begin + 1 && life.last[s] == begin &&
             buffer.cols == d.buffers[s].cols && buffer.dtype == d.buffers[s].dtype &&
             in_place(d.backward[static_cast<size_t>(begin)], s, b);
    };
    size_t best = d.buffers.size();
    for (size_t s = 0; s < d.buffers.size(); ++s)
      if (suits(s) && (best == d.buffers.size() ||
                       typical_bytes(d.buffers[s]) < typical_bytes(d.buffers[best])))
        best = s;
    if (best == d.buffers.size()) continue;
    d.saved_for[b] = static_cast<int>(best);
    if (life.last[best] == begin) d.in_place[b] = static_cast<int>(best);
    free_from[best] = life.last[b] + 1;
  }
}

}  // namespace

void place_workspace(PlanData& d) {
  const Lifetimes forward(d, Pass::forward), backward(d, Pass::backward);
  // A forward buffer that the backward pass reads must be saved between the passes.
  for (size_t b = 0; b < d.buffers.size(); ++b)
    if (d.buffers[b].role == Role::workspace && forward.uses(b) && backward.uses(b))
      d.buffers[b].role = Role::saved;
  d.slot_of.assign(d.buffers.size(), kNoBuffer);
  assign_slots(d, forward);
  d.forward_slots = d.slots;
  assign_slots(d, backward);
  assign_saved(d, backward);
}

}  // namespace tenon
