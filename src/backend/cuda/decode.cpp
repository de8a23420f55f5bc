// Chooses the dtype of decoded operands, and the operand to decode.
#include "backend/cuda/decode.h"

#include "step/split.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

bool is_code(const Matrix& m) { return info(m.format.dtype).bytes == 1; }

// Whether bf16 holds every value of the operand. A scale that is a power of two changes the
// exponent only.
bool exact_in_bf16(const Matrix& m) {
  if (!is_code(m)) return m.format.dtype == DType::bf16;
  return m.format.scaling == Scaling::none || m.format.powers();
}

// The common dtype of both operands. The range of f16 is too small for scaled codes.
DType decoded_dtype(const Step& step) {
  const Gemm& g = *step.gemm();
  if (exact_in_bf16(g.a) && exact_in_bf16(g.b)) return DType::bf16;
  if (step.effective_precision() == Precision::strict || step.dtype == DType::f32)
    return DType::f32;
  return is_code(g.a) || is_code(g.b) ? DType::bf16 : step.dtype;
}

}  // namespace

Attempt make_decode(const Step& step, const Target& target) {
  if (!step.gemm()) return Refusal{"it decodes operands of products", true};
  if (step.precision == Precision::strict) return Refusal{"strict multiplies the codes themselves"};
  const bool own = target.sm == 90 && target.sm_features;  // our gemm takes 16-bit operands
  if (target.cublaslt == 0 && !own)
    return Refusal{str("nothing on ", target.name, " multiplies decoded operands faster")};
  const DType dtype = decoded_dtype(step);
  for (Matrix Gemm::*const operand : {&Gemm::a, &Gemm::b}) {
    const Matrix& m = step.gemm()->*operand;
    if (m.format.scaling == Scaling::none && m.format.dtype == dtype) continue;
    if (operand_shape(step, operand).cols == 0)
      return Refusal{"an operand has as many columns as the call has rows"};
    return split_before_product(step, operand, dtype);
  }
  return Refusal{"both operands have one plain dtype already"};
}

}  // namespace tenon::cuda
