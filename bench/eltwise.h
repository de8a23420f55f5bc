// The element-wise functions of oneDNN, to time next to ours.
#pragma once

#include <cstdint>
#include <memory>

namespace tenon::bench {

// y = f(x), or dx = grad*f'(x) in `result`, of contiguous f32 or bf16 tensors.
struct EltwiseCall {
  const char* op;
  bool backward, bf16;
  int64_t elements;
  void *x, *grad, *result;
};

class Eltwise {
 public:
  virtual ~Eltwise() = default;
  virtual void run() = 0;
};

// The entry points of the module. A module, because the command must run where oneDNN is missing,
// and because OpenMP reads its settings when it is loaded.
struct EltwiseLibrary {
  Eltwise* (*make)(const EltwiseCall&);  // null: the library does not have the function
  const char* version;
};

// With as many threads as ours. Null if the module was not built or cannot be loaded.
const EltwiseLibrary* onednn();

}  // namespace tenon::bench
