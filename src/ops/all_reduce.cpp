// all_reduce: the sum over the ranks of a group.
#include "ops/op.h"

namespace tenon {

OpSchema all_reduce_op() {
  return {
      .name = "all_reduce",
      .summary = "the sum over the ranks of the request's Collectives",
      .forward = [](const OpCall& call) -> std::vector<Extension> {
        if (call.ranks == 1) return {};
        // After the sum, all ranks have the same value and the same gradient. The gradient of one
        // rank's summand is the gradient of the sum, so the backward pass needs no collective.
        return {Exchanged{Exchanged::Kind::all_reduce, Exchanged::Kind::none}};
      },
  };
}

}  // namespace tenon
