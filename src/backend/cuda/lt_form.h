// Steps with a product head as products of cuBLASLt.
#pragma once

#include <optional>
#include <string>

#include "backend/cuda/cublaslt.h"
#include "step/backend.h"
#include "step/split.h"

namespace tenon::cuda {

class LtForm {
 public:
  // Why cuBLASLt does not multiply the operands of the step. Empty if it does.
  static std::string refusal(const Step& step, const Target& target);
  explicit LtForm(const Step& step);

  [[nodiscard]] int64_t rows(int64_t given) const { return step_.body_rows(given); }
  [[nodiscard]] int64_t inner(int64_t given) const { return gemm().inner_for(given); }

  // Whether one cuBLASLt call does the whole step: the body scales by a parameter and adds at most
  // what cuBLASLt can add.
  [[nodiscard]] bool is_whole() const { return whole_.has_value(); }
  // The same for a bare product: no factor and nothing to add.
  [[nodiscard]] bool is_product() const { return whole_ && is_bare_product(step_); }
  // The product for a call. Empty if an address is not aligned as cuBLASLt needs it.
  [[nodiscard]] std::optional<LtProduct> whole(const RunArgs& args) const;
  // The dimension that depends on the rows of a call: 'm' (result) or 'k' (sum).
  [[nodiscard]] char varies() const;
  // The step with the roundings of cuBLASLt: a product with a 16-bit result is rounded before the
  // addition.
  [[nodiscard]] const Step& computed() const { return computed_; }

 private:
  // result = product·factor + bias + held. All but the product are optional.
  struct Whole {
    std::optional<Load> factor, bias, held;
  };
  [[nodiscard]] const Gemm& gemm() const { return *step_.gemm(); }
  [[nodiscard]] std::optional<Whole> find_whole() const;
  [[nodiscard]] bool add_term(const Node& node, const Store& to, Whole& whole, bool& product) const;
  [[nodiscard]] LtProduct operands(const RunArgs& args) const;

  Step step_, computed_;
  std::optional<Whole> whole_;
};

// Whether cuBLASLt multiplies the operands of a step on a target.
bool multiplies(const Step& step, const Target& target);

// Accepts steps that one call of cuBLASLt computes.
Attempt make_cublaslt(const Step& step, const Target& target);
// Splits other steps: a product by cuBLASLt, then the body as a map.
Attempt make_cublaslt_split(const Step& step, const Target& target);

}  // namespace tenon::cuda
