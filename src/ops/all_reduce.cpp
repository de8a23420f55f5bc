// all_reduce: the sum over the ranks of a group.
#include "ops/op.h"

namespace tenon {

OpSchema all_reduce_op() {
  return {
      .name = "all_reduce",
      .summary = "the sum over the ranks of the request's Collectives",
      .forward = [](const OpCall& call) -> std::vector<Extension> {
        if (call.ranks == 1) return {};
        // What follows a sum over ranks is the same on all of them, and so is its gradient: that of
        // one rank's summand is the sum's own.
        return {Exchanged{Exchanged::Kind::all_reduce, Exchanged::Kind::none}};
      },
  };
}

}  // namespace tenon
