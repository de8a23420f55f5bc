// Counts the tensors of each op, and cuts the lists of the request at these counts.
#include "lower/alone.h"

#include <algorithm>
#include <span>

namespace tenon {

namespace {

// `skipped` entries of their own, then the entries [from, from + count) of the list.
template <class T>
std::vector<T> slice(const std::vector<T>& all, size_t from, size_t count, size_t skipped = 0) {
  std::vector<T> part(skipped);
  for (size_t i = from; i < std::min(all.size(), from + count); ++i) part.push_back(all[i]);
  return part;
}

}  // namespace

OpsAlone::Alone OpsAlone::next(int64_t cols) {
  Alone a{chain_[ops_], request_};
  const size_t channels = a.op.reads.size();
  a.op.reads.clear();
  a.op.writes.clear();
  PlanRequest& r = a.request;
  r.cols = cols;
  if (ops_++ > 0) {
    r.input_dtype.reset();
    r.input_encoding.reset();
  }
  r.output_encoded = ops_ == chain_.size() && request_.output_encoded;
  r.parameter_grads.clear();
  r.parameter_dtypes.clear();
  r.extra_grads.clear();
  r.extra_dtypes.clear();
  r.op_requests.clear();
  PlanRequest forward = r;
  forward.backward = false;
  const Plan plan = Plan::build(std::span(&a.op, 1), forward);
  const PlanData& d = data_of(plan);
  const size_t extras = plan.with(Role::extra_in).size() - channels;
  r.parameter_grads = slice(request_.parameter_grads, parameters_, d.parameters);
  r.parameter_dtypes = slice(request_.parameter_dtypes, parameters_, d.parameters);
  r.extra_grads = slice(request_.extra_grads, extras_, extras, channels);
  r.extra_dtypes = slice(request_.extra_dtypes, extras_, extras, channels);
  r.op_requests = slice(request_.op_requests, quantising_, d.quantising);
  parameters_ += d.parameters;
  extras_ += extras;
  quantising_ += d.quantising;
  return a;
}

}  // namespace tenon
