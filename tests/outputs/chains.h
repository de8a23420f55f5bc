// A chain to plan and run, and the seeded list of random ones.
#pragma once

#include <string>
#include <vector>

#include "tenon/plan.h"

namespace tenon::test {

struct ChainCase {
  std::string name;
  std::string chain;
  PlanRequest request;
  std::vector<int64_t> rows;
  bool specials = false;  // infinities, NaN, -0 and subnormal numbers among the inputs
};

// Made without the library, so that every tree has the same; recipe, keep and rounding are left to
// the caller.
std::vector<ChainCase> random_chains(size_t count, uint64_t seed);

}  // namespace tenon::test
