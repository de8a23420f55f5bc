// Formulas of ops that are also available as single calls.
#pragma once

#include <vector>

#include "lazy/dropout.h"
#include "lazy/extension.h"
#include "tenon/activation.h"

namespace tenon {

Formula bias_formula();
Formula add_formula();
Formula dropout_formula(const DropoutRule& rule);
// `values` are the values of the activation's parameters. A scaled activation reads its scale as
// extra input 0.
Formula activation_formula(const Activation& f, std::vector<float> values);

}  // namespace tenon
