// The requests for the ops of a chain as plans of their own.
#pragma once

#include "lower/data.h"

namespace tenon {

// Gives each op its entries of the lists of the chain's request. Values between the ops are plain
// tensors in the dtype of the chain. Channels become extra inputs and outputs of the caller.
class OpsAlone {
 public:
  OpsAlone(Chain chain, PlanRequest request)
      : chain_(std::move(chain)), request_(std::move(request)) {}

  struct Alone {
    Op op;
    PlanRequest request;
  };
  // The next op of the chain. `cols`: the columns of its input.
  Alone next(int64_t cols);

 private:
  Chain chain_;
  PlanRequest request_;
  size_t ops_ = 0, parameters_ = 0, extras_ = 0, quantising_ = 0;
};

}  // namespace tenon
