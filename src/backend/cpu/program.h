// A step compiled for the executor: word loops over tiles that stay in the first-level cache.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cpu/loops.h"
#include "step/step.h"

namespace tenon::cpu {

// Elements per tile. A slot is 2 KB, so a dozen live values fit in the cache with the streams.
inline constexpr size_t kTile = 512;

struct Instruction {
  WordLoop loop;
  uint32_t out;
  std::array<uint32_t, 4> in;
  int arity;
};

// One pass over the tiles of a row. It ends with a row total or with the stores. Each phase
// recomputes the tile values that it needs: reading them from a second copy would cost as much.
struct Phase {
  std::vector<Instruction> row;  // one value per row; runs on as many elements as a tile has rows
  std::vector<std::pair<uint32_t, uint32_t>> spread;  // row values, copied to all columns of a tile
  std::vector<uint32_t> loads;                        // loads of tiles
  std::vector<Instruction> tile;
  uint32_t result = 0;  // slot of the node of the total
};

// Slots [0, loads) are the loads. Constants follow, then temporaries. The slot of a column or of a
// total holds one value per row. So does a value that depends only on such slots.
struct LoopProgram {
  std::vector<Instruction> once;  // depend on constants, parameters and scalars only
  std::vector<Phase> phases;      // one per total; the last is for the stores
  std::vector<std::pair<uint32_t, float>> constants;
  std::vector<uint32_t> results;  // slot of each store's value
  uint32_t slots = 0;
};

LoopProgram compile(const Step& step, const Loops& loops);

}  // namespace tenon::cpu
