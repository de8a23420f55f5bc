// The exact product of a step, with an error bound for any order of fp32 additions.
#pragma once

#include <vector>

#include "support/verify_encoded.h"

namespace tenon {

// rows x gemm.cols elements, row by row. Values are fp32. Their rounding error is in the bounds.
std::vector<Bounded> products(const Step& step, const RunArgs& args, double lost = 0);

}  // namespace tenon
