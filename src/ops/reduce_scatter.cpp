// reduce_scatter: this rank's rows of the sum over the ranks of a group.
#include "ops/op.h"

namespace tenon {

OpSchema reduce_scatter_op() {
  return {
      .name = "reduce_scatter",
      .summary = "this rank's rows of the sum over the ranks",
      .output = [](const OpCall& call) -> OutputShape {
        return {call.cols, 1, call.ranks};
      },
      .forward = [](const OpCall& call) -> std::vector<Extension> {
        if (call.ranks == 1) return {};
        return {Exchanged{Exchanged::Kind::reduce_scatter, Exchanged::Kind::all_gather}};
      },
  };
}

}  // namespace tenon
