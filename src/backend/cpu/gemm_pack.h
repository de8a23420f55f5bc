// Packs an operand of a product: decodes its format into the panels that the kernels read.
#pragma once

#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/loops.h"
#include "step/backend.h"

namespace tenon::cpu {

// Whether every value is exact in bf16. The scale of a whole tensor does not count: the product
// applies it.
bool exact_in_bf16(const Format& f);

// Lanes are the rows of a or the columns of b.
class Packer {
 public:
  enum class Side : uint8_t { a, b };

  Packer(const GemmKernel& kernel, const Loops& loops, const Matrix& m, Side side,
         const RunArgs& args, int64_t inner);

  // Writes the words [k, k + words) of lanes [lane, lane + lanes) as a panel of `width` lanes.
  // Applies block scales. The scale of a whole tensor is not applied; see scale().
  void panel(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
             int64_t words) const;
  [[nodiscard]] float scale() const { return scale_; }
  // Whether neighbours in k are adjacent in memory. Otherwise neighbouring lanes are.
  [[nodiscard]] bool k_inside() const { return k_inside_; }
  // Whether values are converted. Otherwise they are copied.
  [[nodiscard]] bool decodes() const {
    return format_.dtype != (kernel_.pairs ? DType::bf16 : DType::f32) || blocks_;
  }

 private:
  [[nodiscard]] const char* at(int64_t lane, int64_t k) const;
  void numbers(float* out, int64_t lane, int64_t k, int64_t n) const;
  void halves(uint16_t* out, int64_t lane, int64_t k, int64_t n) const;
  void fill_scales(float* out, int64_t lane, int64_t k, int64_t n) const;
  void panel_of_numbers(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
                        int64_t count) const;
  void panel_of_pairs(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
                      int64_t words) const;
  void panel_of_tiles(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
                      int64_t words) const;

  const GemmKernel& kernel_;
  const Loops& loops_;
  Format format_;
  Orientation orientation_;
  View data_, scales_;
  int64_t inner_;
  Side side_;
  bool k_first_;  // k is the row index of the tensor
  bool k_inside_;
  bool blocks_;  // the format has block scales
  float scale_ = 1;
};

}  // namespace tenon::cpu
