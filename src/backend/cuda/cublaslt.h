// cuBLASLt, opened on first use: its functions, and products with their algorithms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/cuda/driver.h"
#include "backend/cuda/library.h"
#include "step/backend.h"

namespace tenon::cuda {

// Opaque handles of cuBLASLt.
using LtHandle = struct LtHandleOpaque*;
using LtDescriptor = struct LtDescriptorOpaque*;
using LtLayout = struct LtLayoutOpaque*;
using LtPreference = struct LtPreferenceOpaque*;

struct LtAlgorithm {
  uint64_t data[8];
};
// Same layout as cublasLtMatmulHeuristicResult_t.
struct LtHeuristic {
  LtAlgorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(LtHeuristic) == 96);

// The functions that Tenon calls. A result of 0 is success.
struct Lt {
  size_t (*get_version)();
  const char* (*get_status_string)(int status);
  int (*create)(LtHandle* handle);
  int (*destroy)(LtHandle handle);
  int (*descriptor_create)(LtDescriptor* descriptor, int compute, int scale);
  int (*descriptor_destroy)(LtDescriptor descriptor);
  int (*descriptor_set)(LtDescriptor descriptor, int attribute, const void* value, size_t bytes);
  int (*layout_create)(LtLayout* layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*layout_destroy)(LtLayout layout);
  int (*preference_create)(LtPreference* preference);
  int (*preference_destroy)(LtPreference preference);
  int (*preference_set)(LtPreference preference, int attribute, const void* value, size_t bytes);
  int (*get_heuristic)(LtHandle handle, LtDescriptor descriptor, LtLayout a, LtLayout b, LtLayout c,
                       LtLayout d, LtPreference preference, int most, LtHeuristic* results,
                       int* found);
  int (*matmul)(LtHandle handle, LtDescriptor descriptor, const void* alpha, const void* a,
                LtLayout a_layout, const void* b, LtLayout b_layout, const void* beta,
                const void* c, LtLayout c_layout, void* d, LtLayout d_layout,
                const LtAlgorithm* algorithm, void* workspace, size_t workspace_bytes,
                Stream stream);
  int (*check)(LtHandle handle, LtDescriptor descriptor, LtLayout a, LtLayout b, LtLayout c,
               LtLayout d, const LtAlgorithm* algorithm, LtHeuristic* result);
};

struct LoadedLt {
  Lt lt{};
  std::string path, version;  // "13.0.0"
  std::string why;            // empty if cuBLASLt works
};
LoadedLt load_lt(const Library& library);
// The library of this machine.
const LoadedLt& cublaslt();

// cublasLtMatmulMatrixScale_t: one scale, or one for 1x32, 1x128 or 128x128 elements.
enum class LtScales : int32_t { one = 0, of_1x32 = 2, of_1x128 = 4, of_128x128 = 5 };

// A column-major matrix. Columns are `ld` elements apart.
struct LtMatrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0, ld = 0;
  const void* scale = nullptr;  // of FP8 codes
  LtScales scales = LtScales::one;
};
// d = factor·a·b + c + bias, summed in fp32. c and bias are optional. With either of them a 16-bit
// d is rounded twice.
struct LtProduct {
  LtMatrix a, b, c, d;
  bool turn_a = false, turn_b = false;  // use the transpose
  const void* bias = nullptr;           // one value of the dtype of d per row of d
  float factor = 1;
  bool fast = false;  // FP8: sums in the registers of the tensor cores, with fewer bits than fp32
};

struct LtChoice {
  bool found = false;  // false: cuBLASLt does not support the address or the shape
  LtAlgorithm algorithm{};
  size_t workspace = 0;
  bool tuned = false;  // timed: the fastest of several, or the only one
};
inline constexpr size_t kLtWorkspace = size_t{32} << 20;  // NVIDIA's recommendation for Hopper
inline constexpr size_t kLtAlignment = 256;               // the largest that it distinguishes

// The alignment of an address in bytes, up to the largest that cuBLASLt distinguishes.
uint32_t alignment(const void* data);

// The library handle of a context.
LtHandle handle_in(const Lt& lt, uint64_t context);

// The algorithms that cuBLASLt proposes for a product, best first.
std::vector<LtChoice> heuristics(const Lt& lt, LtHandle handle, const LtProduct& product, int most);
// The choice of an algorithm that is known from another product of the class. Not found if the
// algorithm does not support this product.
LtChoice checked(const Lt& lt, LtHandle handle, const LtProduct& product,
                 const LtAlgorithm& algorithm);
// The remembered choice for a product, else the first heuristic. Cached by shape and alignment. A
// matrix without data counts as well aligned.
LtChoice choose(const Lt& lt, LtHandle handle, uint64_t context, const LtProduct& product);
void remember(uint64_t context, const LtProduct& product, const LtChoice& choice);
// Returns whether the product ran.
bool multiply(const Lt& lt, LtHandle handle, const LtChoice& choice, const LtProduct& product,
              void* workspace, Stream stream);

}  // namespace tenon::cuda
