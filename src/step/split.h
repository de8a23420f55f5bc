// Splits a step in two at its head, for makers that need two kernels.
#pragma once

#include <optional>
#include <utility>

#include "step/backend.h"

namespace tenon {

// The first step stores the product, plus the vector `added` if it is given. The second step is the
// body as a map. The product is stored in the chain's dtype in native precision if `holds` returns
// true for that dtype, else in f32.
Split split_after_product(const Step& step, bool (*holds)(const Step& step, DType dtype),
                          const Load* added = nullptr);

// The row vector, e.g. a bias, that the body adds to the product wherever it reads it, if the body
// stores that sum, e.g. as the saved input of an activation. Null: there is none.
const Load* stored_sum(const Step& step);

// Whether the step only stores its product, rounded once to the dtype of the store.
bool is_bare_product(const Step& step);

// The shape of the tensor that is an operand of the product. 0: the rows of the call.
Shape operand_shape(const Step& step, Matrix Gemm::*operand);

// The first step decodes or casts an operand of the product to `dtype`. The second step multiplies
// the result.
Split split_before_product(const Step& step, Matrix Gemm::*operand, DType dtype);

// The step with its product rounded to `dtype` before the body reads it.
Step with_rounded_product(const Step& step, DType dtype);

// A map as two maps with the same inputs, and no memory between them. The second one writes the
// last encoded result and its amax, the first one all other results. Empty if one would write
// nothing.
std::optional<std::pair<Step, Step>> split_results(const Step& step);

// The first step stores the row totals. The second step is a map that reads them and does the rest.
Split split_after_totals(const Step& step);

}  // namespace tenon
