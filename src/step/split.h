// A step cut in two after its head, for makers that do it in two passes.
#pragma once

#include "step/backend.h"

namespace tenon {

// The product in memory, then the body as a map: in the chain's dtype in native, where `holds` says
// that the maker writes it, else in f32.
Split split_after_product(const Step& step, bool (*holds)(const Step& step, DType dtype));

// Totals of rows in memory, then everything else as a map that reads them.
Split split_after_totals(const Step& step);

}  // namespace tenon
