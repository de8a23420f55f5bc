// all_gather: concatenates the rows of all ranks of a group, in rank order.
#include "ops/op.h"

namespace tenon {

OpSchema all_gather_op() {
  return {
      .name = "all_gather",
      .summary = "the rows of all ranks, in the order of the ranks",
      .output = [](const OpCall& call) -> OutputShape {
        return {call.cols, call.ranks, 1};
      },
      .forward = [](const OpCall& call) -> std::vector<Extension> {
        if (call.ranks == 1) return {};
        return {Exchanged{Exchanged::Kind::all_gather, Exchanged::Kind::reduce_scatter}};
      },
  };
}

}  // namespace tenon
