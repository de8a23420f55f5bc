// Native precision on the GPU: functions by hardware approximations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "expr/approximated.h"
#include "expr/lower.h"
#include "tenon/expr.h"

namespace tenon::cuda {

// The statements of print() for formulas whose functions may err by `error`, relative to their
// results, or by as much as strict ones if it is 0. Without such functions the result has the
// strict bits, except for subnormal quotients: contracted sums made the LayerNorm kernel slower.
// native_eight() has other bits: it contracts all sums and replaces some quotients by products.
std::string native_lines(const Graph& graph, std::span<const uint32_t> roots, double error);

// Values that are the same for all elements. The host computes them from the single loads.
struct Singles {
  std::shared_ptr<const Lowered> formulas = nullptr;
  std::vector<uint32_t> positive = {};  // loads that must be positive

  [[nodiscard]] size_t count() const { return formulas ? formulas->roots.size() : 0; }
  [[nodiscard]] std::vector<float> values(std::span<const float> loads) const;
  // Whether the lines are valid for these values. If a value overflows, another text must run.
  [[nodiscard]] bool fit(std::span<const float> loads) const;
};

// The same for in[load][0 … 7]. `ready` prepares all eight elements; `lines` follow for each
// element. `singles` come after the loads; there are at most `most_singles`.
struct EightLines {
  std::string ready, lines;
  Singles singles = {};

  [[nodiscard]] int64_t length() const { return std::ranges::count(lines, '\n'); }
};
EightLines native_eight(const Graph& graph, std::span<const uint32_t> roots, double error,
                        const std::vector<Loaded>& loads, size_t most_singles);

}  // namespace tenon::cuda
