// A chain to plan and run, and the seeded list of random chains.
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
  bool specials = false;  // inputs include infinities, NaN, -0 and subnormals
};

// Independent of the library, so that every version has the same list. The caller sets recipe, keep
// and rounding.
std::vector<ChainCase> random_chains(size_t count, uint64_t seed);

}  // namespace tenon::test
