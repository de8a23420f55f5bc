// cuBLASLt, opened on first use: products of plain numbers, and the steps that they head.
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

// Its handles; what they point to is its own affair.
using LtHandle = struct LtHandleOpaque*;
using LtDescriptor = struct LtDescriptorOpaque*;
using LtLayout = struct LtLayoutOpaque*;
using LtPreference = struct LtPreferenceOpaque*;

struct LtAlgorithm {
  uint64_t data[8];
};
// As cublasLtMatmulHeuristicResult_t.
struct LtHeuristic {
  LtAlgorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(LtHeuristic) == 96);

// The functions in use. A result of 0 is success.
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
  std::string why;            // empty if it works
};
LoadedLt load_lt(const Library& library);
// That of this machine.
const LoadedLt& cublaslt();

// A matrix as cuBLASLt counts: columns lie `ld` apart.
struct LtMatrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0, ld = 0;
};
// d = a·b + c + bias: each where it is given, summed in fp32 and rounded once.
struct LtProduct {
  LtMatrix a, b, c, d;
  bool turn_a = false, turn_b = false;  // the transpose takes part
  const void* bias = nullptr;           // a number of d's type for each of its rows
};

struct LtChoice {
  bool found = false;  // cuBLASLt does not take every address and shape
  LtAlgorithm algorithm{};
  size_t workspace = 0;
};
inline constexpr size_t kLtWorkspace = size_t{32} << 20;  // what NVIDIA advises for Hopper
inline constexpr size_t kLtAlignment = 256;               // the best that it distinguishes

// What it proposes for a product, its best guess first.
std::vector<LtChoice> heuristics(const Lt& lt, LtHandle handle, const LtProduct& product, int most);
// Its first heuristic for a product, asked once for each shape and alignment. A matrix without
// data stands for a well aligned one.
LtChoice choose(const Lt& lt, LtHandle handle, uint64_t context, const LtProduct& product);
// Whether it was done.
bool multiply(const Lt& lt, LtHandle handle, const LtChoice& choice, const LtProduct& product,
              void* workspace, Stream stream);

// A step as a product.
class LtForm {
 public:
  static std::string refusal(const Step& step);
  explicit LtForm(const Step& step);

  [[nodiscard]] int64_t rows(int64_t given) const { return step_.body_rows(given); }
  [[nodiscard]] int64_t inner(int64_t given) const { return gemm().inner ? gemm().inner : given; }

  // The whole step in one product, where the body adds no more than cuBLASLt does by itself.
  [[nodiscard]] bool is_whole() const { return whole_.has_value(); }
  // And nothing is added.
  [[nodiscard]] bool is_product() const { return whole_ && !whole_->bias && !whole_->held; }
  // Nothing where it is not, or where an address does not suit.
  [[nodiscard]] std::optional<LtProduct> whole(const RunArgs& args) const;

 private:
  // What is added to the product: one of them, or nothing.
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
