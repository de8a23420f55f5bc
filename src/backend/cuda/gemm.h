// Products on Hopper tensor cores: tensor maps copy the operands, the body runs on the
// accumulators.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

// The data of a tensor map: up to five dimensions, the contiguous one first, and the box of one
// copy. Strides are in bytes.
struct TensorBox {
  void* data = nullptr;
  DType dtype = DType::bf16;
  unsigned rank = 0;
  std::array<uint64_t, 5> sizes{};
  std::array<uint64_t, 4> strides{};
  std::array<unsigned, 5> box{};
};

// A tile of the result. Groups of 128 threads compute whole tiles, or `promoted` 64 rows each.
struct GemmTile {
  int64_t rows, cols;
  bool promoted = false;  // FP8 sums are promoted to fp32 every 128 terms
  friend bool operator==(const GemmTile&, const GemmTile&) = default;
};

class GemmProgram final : public Program {
 public:
  static constexpr GemmTile kWide{128, 192}, kNarrow{128, 128}, kPromoted{192, 128, true};
  // With longer sums, cuBLASLt with its best tile and a map after it is faster.
  static constexpr int64_t kLong = 8192;

  // Why it refuses a step with such tiles. Empty if it accepts the step.
  static std::string refusal(const Step& step, const GemmTile& tile);
  // `library`: cuBLASLt is available for calls that do not fit.
  GemmProgram(const Step& step, const GemmTile& tile, int64_t multiprocessors, bool library = true);

  // Whether it can compute the call: sizes, and the alignment that tensor copies and vector
  // accesses of the body need.
  [[nodiscard]] bool suits(const RunArgs& args) const;
  // Whether it can compute the call and is the fastest program for it.
  [[nodiscard]] bool fits(const RunArgs& args) const override;
  [[nodiscard]] int64_t least_rows() const override;
  // Partial column sums.
  [[nodiscard]] size_t workspace(int64_t rows) const override;
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args) const override;

  // The same with other contents of the tensor maps, for an emulator that gives the products.
  [[nodiscard]] std::vector<Launch> launches(const RunArgs& args,
                                             std::span<const TenonTensorMap> maps) const;

  // a, b, and b of the second half of a gated body.
  [[nodiscard]] std::vector<TensorBox> boxes(const RunArgs& args) const;

  // The number of result rows from which it is faster than cuBLASLt.
  [[nodiscard]] int64_t least_body_rows() const;

 private:
  // The call with the row count of the result.
  [[nodiscard]] RunArgs of_body(const RunArgs& args) const;
  [[nodiscard]] int64_t inner(const RunArgs& args) const;
  // The work of the busiest multiprocessor, in columns of tiles.
  [[nodiscard]] int64_t cost(int64_t rows, const GemmTile& tile) const;

  Step step_;
  Singles singles_;
  GemmTile tile_;
  int64_t multiprocessors_;
  bool library_;
};

// Wide tiles, for calls for which they are faster; narrow tiles; tiles of promoted FP8 sums.
Attempt make_wide_gemm(const Step& step, const Target& target);
Attempt make_gemm(const Step& step, const Target& target);
Attempt make_promoted_gemm(const Step& step, const Target& target);

}  // namespace tenon::cuda
