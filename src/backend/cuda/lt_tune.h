// Finds the fastest cuBLASLt algorithm for a class of products: timed once, kept on disk.
#pragma once

#include "backend/cuda/cublaslt.h"
#include "step/backend.h"

namespace tenon::cuda {

// Whether TENON_TUNE allows timing.
bool tunes();

// The best choice for a product. A class is everything that the choice depends on, with the varying
// dimension ('m' or 'k') rounded up to a power of two. The first call of a class times eight
// heuristics, on the operands of the call and a separate result. In a captured stream and with
// TENON_TUNE=0 nothing is timed, and the first heuristic is used. So it is, from then on, if there
// is no memory for the result. `first` is the choice without timing.
LtChoice tuned(const Lt& lt, LtHandle handle, const CurrentContext& context, const LtChoice& first,
               const LtProduct& product, char varies, void* workspace, const RunArgs& call);

}  // namespace tenon::cuda
