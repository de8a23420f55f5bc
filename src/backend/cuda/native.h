// Native precision on the GPU: words by the processor's own approximations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "expr/lower.h"
#include "tenon/expr.h"

namespace tenon::cuda {

// How a load lies in memory: bf16 numbers, of which comparing two at a time with constants takes
// half as many instructions; one number for all elements; or otherwise.
enum class Loaded : uint8_t { otherwise, pairs, single };

// The statements of print() for formulas whose words may err by `error`, relative to their results.
// Without such a word they have the strict bits, but for subnormal quotients: contracted sums made
// LayerNorm's kernel slower. The lines below have other bits, as they contract all sums and take
// products for some quotients.
std::string native_lines(const Graph& graph, std::span<const uint32_t> roots, double error);

// Numbers that the host finds for all elements, from values of the loads, of which only single ones
// matter.
struct Singles {
  std::shared_ptr<const Lowered> formulas = nullptr;
  std::vector<uint32_t> positive = {};  // loads that the lines want positive

  [[nodiscard]] size_t count() const { return formulas ? formulas->roots.size() : 0; }
  [[nodiscard]] std::vector<float> values(std::span<const float> loads) const;
  // Whether the lines hold for them: where a number overflows, other lines do.
  [[nodiscard]] bool fit(std::span<const float> loads) const;
};

// The same for in[load][0 … 7]: `ready` changes them first, and `lines` follow for each element.
// Behind the loads are `singles`, at most so many.
struct EightLines {
  std::string ready, lines;
  Singles singles = {};

  [[nodiscard]] int64_t length() const { return std::ranges::count(lines, '\n'); }
};
EightLines native_eight(const Graph& graph, std::span<const uint32_t> roots, double error,
                        const std::vector<Loaded>& loads, size_t most_singles);

}  // namespace tenon::cuda
