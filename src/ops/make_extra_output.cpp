// make_extra_output: the value is also an output, or feeds a channel.
#include "ops/op.h"

namespace tenon {

OpSchema make_extra_output_op() {
  return {
      .name = "make_extra_output",
      .summary = "the value is also an extra output, or feeds a channel",
      .extra_outputs = {"extra"},
      .forward = [](const OpCall&) { return std::vector<Extension>{Shared{}}; },
  };
}

}  // namespace tenon
