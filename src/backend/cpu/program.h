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

// Slots [0, loads) belong to the loads, then come constants, then temporaries.
struct Program {
  std::vector<Instruction> once;  // depend on constants, parameters and scalars only
  std::vector<Instruction> tile;  // run for every tile
  std::vector<std::pair<uint32_t, float>> constants;
  std::vector<uint32_t> results;  // slot of each store's value
  uint32_t slots = 0;
};

Program compile(const Step& step, const Loops& loops);

}  // namespace tenon::cpu
