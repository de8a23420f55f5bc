// Steps with a product head as products of cuBLASLt.
#pragma once

#include <optional>
#include <string>

#include "backend/cuda/cublaslt.h"
#include "step/backend.h"

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
  // And neither scales nor adds.
  [[nodiscard]] bool is_product() const {
    return whole_ && !whole_->factor && !whole_->bias && !whole_->held;
  }
  // Empty if an address is not suitable.
  [[nodiscard]] std::optional<LtProduct> whole(const RunArgs& args) const;
  // The dimension that the rows of a call decide: 'm' of the result, or 'k' of the sum.
  [[nodiscard]] char varies() const;
  // The step as cuBLASLt computes it: its epilogue rounds the product to a 16-bit result before it
  // adds.
  [[nodiscard]] const Step& computed() const { return computed_; }

 private:
  // result = product·factor + bias + held. Each but the product is optional.
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

// Whether cuBLASLt does the product of a step on a target.
bool multiplies(const Step& step, const Target& target);

// The steps that one call of cuBLASLt does whole.
Attempt make_cublaslt(const Step& step, const Target& target);
// Its product, then the body as a map.
Attempt make_cublaslt_split(const Step& step, const Target& target);

}  // namespace tenon::cuda
