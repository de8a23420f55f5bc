// Compiles a formula with its loads and stores to one function over rows and columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cpu/grid.h"
#include "backend/cpu/jit/binary.h"
#include "backend/cpu/jit/vectors.h"
#include "expr/lower.h"
#include "tenon/dtype.h"

namespace tenon::cpu::jit {

// How a function reaches an input. elements: one per row and column. row: one per row. single: one.
// random: numbers of a stream. The address is that of a RandomInput (draws.h), the step is in
// counters.
enum class Reach : uint8_t { elements, row, single, random };

// Quotients of such numbers are neither 0 nor infinite.
inline constexpr float kOrdinary = 0x1p60F;

struct Input {
  Reach reach = Reach::elements;
  DType dtype = DType::f32;
  // Whether a NaN may have bits other than those that arithmetic on bf16 values gives.
  bool any_nan = true;
  bool ordinary = false;  // a single number whose magnitude is in [1/kOrdinary, kOrdinary]
  bool used = false;      // by an output
};

struct Output {
  // elements: one per row and column. row: one per row, as fp32. amax: maximum bits of |v| in each
  // of 16 lanes, joined with those in memory. column: the tree sum over the rows of a group, as
  // fp32; up to kMostBeyond more elements are written. total: tree sums of the pieces of a row, as
  // fp32 (TotalPieces).
  enum class To : uint8_t { elements, row, amax, column, total };
  To to = To::elements;
  DType dtype = DType::f32;
  uint32_t value = 0;  // node of the formula
  Rounding rounding = Rounding::even;
  bool stream = false;  // may bypass the cache: nothing reads it soon
};

inline constexpr int64_t kMostBeyond = 64;
inline constexpr int kMostAtOnce = 2;

struct Function;
// The pieces of a row whose sums are stored for a total: whole blocks, then the rest in smaller
// pieces, the last one of which may be incomplete.
struct TotalPieces {
  int64_t blocks, rest;

  [[nodiscard]] int64_t count() const { return blocks + rest; }
};
[[nodiscard]] TotalPieces total_pieces(const Function& f, bool wide, int64_t cols);

// Input i is slot i of the formula.
struct Function {
  std::vector<Input> inputs = {};
  std::vector<Output> outputs = {};
  const Graph* graph = nullptr;  // lowered
  // Outputs that may bypass the cache do so: their addresses and steps are whole lines.
  bool stream = false;

  void mark_used();
  // Whether the rows are groups, whose column sums are added.
  [[nodiscard]] bool groups() const {
    return std::ranges::any_of(outputs, [](const Output& o) { return o.to == Output::To::column; });
  }
  // Rows of groups that are added in registers: random numbers are drawn for one row.
  [[nodiscard]] int rows_at_once() const;
  [[nodiscard]] int64_t group_rows() const { return 2 * rows_at_once(); }

  // Elements of each input that are prefetched ahead of their use.
  [[nodiscard]] int64_t elements_ahead() const;

  // Words of a frame before the address and step of the inputs, then of the outputs: rows, columns,
  // and from which column on the prefetches are for a later row: how many rows later, and how many
  // columns after the current one.
  enum Head : uint8_t { kRows, kCols, kTurn, kRowsAhead, kShift, kHead };
};

// `wide`: AVX-512, else AVX2.
std::unique_ptr<const Binary> compile(const Function& function, bool wide);

}  // namespace tenon::cpu::jit
