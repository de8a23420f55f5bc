// Runs bodies that are compiled for this processor.
#pragma once

#include "backend/cpu/tile_runner.h"

namespace tenon::cpu::jit {

std::unique_ptr<const TileRunner> runner(const Step& step, const Isa& isa);

}  // namespace tenon::cpu::jit
