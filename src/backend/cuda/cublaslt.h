// cuBLASLt, opened on first use: products of unscaled values, and steps with a product head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
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
};

struct LoadedLt {
  Lt lt{};
  std::string path, version;  // "13.0.0"
  std::string why;            // empty if cuBLASLt works
};
LoadedLt load_lt(const Library& library);
// The library of this machine.
const LoadedLt& cublaslt();

// A column-major matrix. Columns are `ld` elements apart.
struct LtMatrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0, ld = 0;
};
// d = a·b + c + bias, summed in fp32 and rounded once. c and bias are optional.
struct LtProduct {
  LtMatrix a, b, c, d;
  bool turn_a = false, turn_b = false;  // use the transpose
  const void* bias = nullptr;           // one value of the dtype of d per row of d
};

struct LtChoice {
  bool found = false;  // false: cuBLASLt does not support the address or the shape
  LtAlgorithm algorithm{};
  size_t workspace = 0;
};
inline constexpr size_t kLtWorkspace = size_t{32} << 20;  // NVIDIA's recommendation for Hopper
inline constexpr size_t kLtAlignment = 256;               // the largest that it distinguishes

// The algorithms that cuBLASLt proposes for a product, best first.
std::vector<LtChoice> heuristics(const Lt& lt, LtHandle handle, const LtProduct& product, int most);
// The first heuristic for a product. Cached by shape and alignment. A matrix without data counts as
// well aligned.
LtChoice choose(const Lt& lt, LtHandle handle, uint64_t context, const LtProduct& product);
// Returns whether the product ran.
bool multiply(const Lt& lt, LtHandle handle, const LtChoice& choice, const LtProduct& product,
              void* workspace, Stream stream);

// A step as a product.
class LtForm {
 public:
  static std::string refusal(const Step& step);
  explicit LtForm(const Step& step);

  [[nodiscard]] int64_t rows(int64_t given) const { return step_.body_rows(given); }
  [[nodiscard]] int64_t inner(int64_t given) const { return gemm().inner_for(given); }

  // Whether one cuBLASLt call does the whole step: the body adds at most what cuBLASLt can add.
  [[nodiscard]] bool is_whole() const { return whole_.has_value(); }
  // And nothing is added.
  [[nodiscard]] bool is_product() const { return whole_ && !whole_->bias && !whole_->held; }
  // Nothing where it is not, or where an address does not suit.
  [[nodiscard]] std::optional<LtProduct> whole(const RunArgs& args) const;

 private:
  // The addend of the product: bias, held, or neither.
  struct Whole {
    std::optional<Load> bias, held;
  };
  [[nodiscard]] const Gemm& gemm() const { return *step_.gemm(); }
  [[nodiscard]] std::optional<Whole> find_whole() const;
  [[nodiscard]] LtProduct operands(const RunArgs& args) const;

  Step step_;
  std::optional<Whole> whole_;
};

// Whether cuBLASLt does the product of a step on a target.
bool multiplies(const Step& step, const Target& target);

// Steps that it does whole.
Attempt make_cublaslt(const Step& step, const Target& target);
// Its product, then the body as a map.
Attempt make_cublaslt_split(const Step& step, const Target& target);

}  // namespace tenon::cuda
