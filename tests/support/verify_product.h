// The exact product of a step, with the bound that any order of fp32 additions keeps.
#pragma once

#include <vector>

#include "support/verify_encoded.h"

namespace tenon {

// rows x gemm.cols elements, row by row; the values are fp32 numbers, and what that rounds away is
// part of their bounds.
std::vector<Bounded> products(const Step& step, const RunArgs& args);

}  // namespace tenon
