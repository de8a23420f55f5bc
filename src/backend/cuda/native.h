// Native precision on the GPU: words by the processor's own approximations.
#pragma once

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
std::string native_lines(const Graph& graph, std::span<const uint32_t> roots, double error,
                         const std::vector<Loaded>& loads);

// The same for in[load][0 … 7]: `ready` changes them first, and `lines` follow for each element.
// Behind the loads are numbers that the host finds for all elements, if there are such.
struct EightLines {
  std::string ready, lines;
  std::shared_ptr<const Lowered> singles = nullptr;

  [[nodiscard]] size_t count() const { return singles ? singles->roots.size() : 0; }
  // For values of the loads, of which only single ones matter.
  [[nodiscard]] std::vector<float> values(std::span<const float> loads) const;
};
// With `most_singles` of those at most.
EightLines native_eight(const Graph& graph, std::span<const uint32_t> roots, double error,
                        const std::vector<Loaded>& loads, size_t most_singles);

}  // namespace tenon::cuda
