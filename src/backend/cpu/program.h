// A step compiled for the executor: word loops over tiles that stay in the first-level cache.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cpu/loops.h"
#include "step/step.h"

namespace tenon::cpu {

// Elements of a tile; a slot is 2 KB, so a dozen live values fit beside the streams.
inline constexpr size_t kTile = 512;

struct Instruction {
  WordLoop loop;
  uint32_t out;
  std::array<uint32_t, 4> in;
  int arity;
};

// A pass over a row's tiles, up to a row total or to the stores. Values of a tile are made again in
// every phase that needs them: reading them back from a second copy would cost as much.
struct Phase {
  std::vector<Instruction> row;  // one number a row, on as many elements as a tile has rows
  std::vector<std::pair<uint32_t, uint32_t>> spread;  // such numbers, to all columns of a tile
  std::vector<uint32_t> loads;                        // of tiles
  std::vector<Instruction> tile;
  uint32_t result = 0;  // slot of the total's node
};

// Slots [0, loads) belong to the loads, then come constants, then temporaries. The slot of a column
// or of a total holds one number a row; what depends on nothing else does too.
struct Program {
  std::vector<Instruction> once;  // depend on constants, parameters and scalars only
  std::vector<Phase> phases;      // one a total, the last one for the stores
  std::vector<std::pair<uint32_t, float>> constants;
  std::vector<uint32_t> results;  // slot of each store's value
  uint32_t slots = 0;
};

Program compile(const Step& step, const Loops& loops);

}  // namespace tenon::cpu
