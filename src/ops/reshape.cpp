// reshape(cols): the same elements in rows of another length.
#include "ops/op.h"

namespace tenon {

namespace {

void shape(Run64& r, int64_t cols) {
  r.value.rows = r.value.rows * r.value.cols / cols;
  r.value.cols = cols;
}

}  // namespace

OpSchema reshape_op() {
  return {
      .name = "reshape",
      .summary = "the same numbers in rows of `cols`",
      .arguments = {count("cols", "it has no width; write reshape(128)")},
      .same_columns = false,
      .output = [](const OpCall& call) -> OutputShape {
        const int64_t cols = call.arguments.count("cols");
        return {cols, call.cols, cols};
      },
      .forward = [](const OpCall&) { return std::vector<Extension>{Reshaped{}}; },
      .float64 = {.forward = [](const OpCall& call,
                                Run64& r) { shape(r, call.arguments.count("cols")); },
                  .backward = [](const OpCall& call, Run64& r) { shape(r, call.cols); }},
  };
}

}  // namespace tenon
