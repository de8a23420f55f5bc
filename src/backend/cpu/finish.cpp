// Joins partial sums tree by tree, in the order of the items.
#include "backend/cpu/finish.h"

#include <cstring>

#include "backend/cpu/item.h"
#include "backend/cpu/pool.h"
#include "core/scaling.h"

namespace tenon::cpu {

namespace {

// Size of the partial sums of one store, in floats. Whole cache lines, to avoid false sharing.
size_t partial_floats(const Grid& g, const Store& s) {
  if (s.to == Store::To::column_sum) return static_cast<size_t>(rup(g.blocks() * g.cols, 16));
  if (s.to == Store::To::row_sum) return static_cast<size_t>(rup(g.rows * g.chunks(), 16));
  return 0;
}

// Keeps the maximum of the slot and the new value. Several threads may share a slot, so the update
// is atomic. A slot at a misaligned address is updated without an atomic.
void join_amax(void* slot, uint32_t found) {
  if (reinterpret_cast<uintptr_t>(slot) % alignof(uint32_t) != 0) {
    uint32_t held = 0;
    std::memcpy(&held, slot, sizeof held);
    held = std::max(held & kMagnitude, found);
    std::memcpy(slot, &held, sizeof held);
    return;
  }
  const std::atomic_ref<uint32_t> amax(*static_cast<uint32_t*>(slot));
  uint32_t held = amax.load();
  while (!amax.compare_exchange_weak(held, std::max(held & kMagnitude, found))) {
  }
}

class Finisher {
 public:
  Finisher(const Step& step, const Loops& loops) : step_(step), loops_(loops) {}

  // Joins the partial results of one store and writes the output.
  void store(size_t k, const RunArgs& args, const Grid& g, const Leftovers& left) const {
    const Store& s = step_.stores[k];
    const View& out = args.out[s.arg];
    switch (s.to) {
      case Store::To::tile:
      case Store::To::encoded:
      case Store::To::column:
        break;
      case Store::To::column_sum:
        parallel_for(cdiv(g.cols, kTileCols), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i)
            finish_columns(s, out, g, left.partials[k], i * kTileCols);
        });
        break;
      case Store::To::row_sum:
        finish_rows(s, out, g, left.partials[k]);
        break;
      case Store::To::sum: {
        Forest all;
        for (const Forest& f : left.forests[k]) all.append(f);
        store_one(s, out.data, all.total());
        break;
      }
      case Store::To::amax: {
        const uint32_t most = left.amax[k].load();
        if (s.join)
          join_amax(out.data, most);
        else
          store_one(s, out.data, __builtin_bit_cast(float, most));
        break;
      }
    }
  }

 private:
  void finish_columns(const Store& s, const View& out, const Grid& g, const float* parts,
                      int64_t c) const {
    const int64_t n = std::min(kTileCols, g.cols - c);
    const auto width = static_cast<size_t>(n);
    const auto blocks = static_cast<uint64_t>(g.blocks());
    const Scratch scratch((TreeStack::levels(blocks) + 2) * kTile * sizeof(float));
    float* const sum = scratch.floats();
    float* const part = sum + kTile;
    TreeStack stack(part + kTile, width);
    std::fill_n(sum, kTile, 0.0F);  // the empty sum
    for (uint64_t b = 0; b < blocks; ++b) {
      std::memcpy(part, parts + static_cast<int64_t>(b) * g.cols + c, width * sizeof(float));
      stack.push(loops_, b, 0, part, width);
    }
    if (blocks > 0) stack.collapse(loops_, blocks, sum, width);
    store_columns(loops_.store[index(s.dtype)], s, out, 0, c, n, sum);
  }

  void finish_rows(const Store& s, const View& out, const Grid& g, const float* parts) const {
    const auto chunks = static_cast<size_t>(g.chunks());
    const Scratch scratch((2 * chunks + 64) * sizeof(float));
    for (int64_t r = 0; r < g.rows; ++r) {
      const float* row = parts + r * g.chunks();
      const float sum = chunks == 0 ? 0.0F : tree_sum(loops_, row, scratch.floats(), chunks);
      store_one(s, element(out, r, 0), sum);
    }
  }

  void store_one(const Store& s, void* to, float value) const {
    loops_.store[index(s.dtype)](to, 1, &value, 1);
  }

  const Step& step_;
  const Loops& loops_;
};

}  // namespace

size_t leftover_floats(const Step& step, const Grid& grid) {
  size_t floats = 0;
  for (const Store& s : step.stores) floats += partial_floats(grid, s);
  return floats;
}

Leftovers no_leftovers(const Step& step, const Grid& grid, float* memory) {
  Leftovers left;
  // A small call takes as long as a few allocations.
  const auto any = [&](Store::To to) {
    return std::ranges::count(step.stores, to, &Store::to) > 0;
  };
  if (any(Store::To::amax)) left.amax = std::vector<std::atomic<uint32_t>>(step.stores.size());
  if (any(Store::To::sum)) left.forests.resize(step.stores.size());
  left.health = std::vector<std::array<std::atomic<uint64_t>, 3>>(step.encoders.size());
  for (size_t k = 0; k < step.stores.size(); ++k) {
    left.partials.push_back(memory);
    memory += partial_floats(grid, step.stores[k]);
    if (step.stores[k].to == Store::To::sum)
      left.forests[k].resize(static_cast<size_t>(grid.items()));
  }
  return left;
}

void finish(const Step& step, const Loops& loops, const RunArgs& args, const Grid& grid,
            const Leftovers& left) {
  const Finisher finisher(step, loops);
  for (size_t k = 0; k < step.stores.size(); ++k) finisher.store(k, args, grid, left);
  for (size_t i = 0; i < step.encoders.size(); ++i)
    finish_encoder(step.encoders[i], args,
                   {left.health[i][0], left.health[i][1], left.health[i][2]});
}

}  // namespace tenon::cpu
