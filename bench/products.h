// Products with bodies: one list of bodies and shapes for the CPU and for CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "step/step.h"

namespace tenon::bench {

// Arguments that a body may read.
enum ProductIn : uint32_t {
  in_a,
  in_scale_a,
  in_b,
  in_scale_b,
  in_bias,
  in_tile,
  in_scalar,
  product_inputs
};

// FP8 operands: e4m3 codes with their scales.
struct ProductCodes {
  const char* name;
  Scaling a, b;
  bool fast = false;
};
inline constexpr ProductCodes kPrecise{"precise", Scaling::delayed, Scaling::delayed},
    kFast{"fast", Scaling::delayed, Scaling::delayed, true},
    kBlocks{"1x128 128x128", Scaling::block1x128, Scaling::block128x128},
    kLines{"1x128 1x128", Scaling::block1x128, Scaling::block1x128};

struct ProductCase {
  const char* body;
  int64_t m, n, k;          // n: columns of the product; a gated body stores half of them
  const char* form = "nt";  // transposition of a and b: b is a weight [n, k] in "nt"
  DType dtype = DType::bf16;
  const ProductCodes* codes = nullptr;  // instead of operands of `dtype`

  [[nodiscard]] bool transposed(int side) const { return form[side] == 't'; }
  [[nodiscard]] double flops() const {
    return 2 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  }
  [[nodiscard]] Format format(ProductIn operand) const {
    if (!codes) return {.dtype = dtype};
    return {.dtype = DType::e4m3, .scaling = operand == in_a ? codes->a : codes->b};
  }
  // "bias+gelu 8192x16384x4096 nt"
  [[nodiscard]] std::string name() const;
};
std::vector<ProductCase> cpu_products();
std::vector<ProductCase> cuda_products();

// A tensor that a product stores. rows = 0: the argument is not used.
struct ProductOutput {
  DType dtype = DType::bf16;
  int64_t rows = 0, cols = 0;
};
struct Product {
  Step step;
  std::vector<ProductOutput> outputs;
};
Product make_product(const ProductCase& c);
// The dtype of in_tile.
DType tile_dtype(const ProductCase& c);

}  // namespace tenon::bench
