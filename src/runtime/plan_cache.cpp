// Caches plans by their chain and request.
#include <optional>

#include "core/fp_mode.h"
#include "core/memo.h"
#include "expr/registry.h"
#include "lower/append.h"
#include "lower/parameters.h"
#include "step/key.h"
#include "tenon/plan.h"

namespace tenon {

namespace {

constexpr size_t kMaxPlans = 1024;  // a plan holds some tens of kilobytes

Memo<Plan>& plans() {
  static auto& all = *new Memo<Plan>(kMaxPlans);
  return all;
}

std::string key_of(std::string_view chain, const PlanRequest& r) {
  Key key('p');
  const auto add = [&](const Format& f) {
    Operand o;
    o.format = f;
    key.add(o);
  };
  const auto add_all = [&](const std::vector<GradRequest>& list) {
    key.add(list.size());
    for (const GradRequest& g : list) key.add(g.wanted).add(g.dtype).add(g.accumulate);
  };
  const bool lists = !r.parameter_dtypes.empty() || !r.extra_dtypes.empty() ||
                     !r.op_requests.empty() || !r.parameter_grads.empty() || !r.extra_grads.empty();
  size_t bits = 0;
  for (const bool bit : {r.training, r.backward, r.input_grad, r.output_encoded,
                         r.input_encoding.has_value(), lists})
    bits = 2 * bits + bit;
  key.add(r.cols).add(r.dtype).add(r.input_dtype).add(r.parameter_dtype).add(bits).add(r.keep);
  if (r.input_encoding) key.add(operand(*r.input_encoding));
  key.add(r.options.precision).add(r.options.rounding);
  key.add(r.target).add(reinterpret_cast<uintptr_t>(&target_of(r)));
  const auto add_recipe = [&](const Recipe& q) {
    key.add(q.name);
    for (const Format* f : {&q.input, &q.weight, &q.gradient}) add(*f);
  };
  add_recipe(r.recipe);
  if (!lists) return std::string(key.text()).append(chain);
  for (const auto* list : {&r.parameter_dtypes, &r.extra_dtypes}) {
    key.add(list->size());
    for (const std::optional<DType>& t : *list) key.add(t);
  }
  key.add(r.op_requests.size());
  for (const OpRequest& o : r.op_requests) {
    key.add(o.recipe.has_value());
    if (o.recipe) add_recipe(*o.recipe);
    key.add(o.weight.has_value());
    if (o.weight) key.add(operand(*o.weight));
    key.add(o.rowwise).add(o.columnwise);
  }
  add_all(r.parameter_grads);
  add_all(r.extra_grads);
  return std::string(key.text()).append(chain);
}

}  // namespace

// The cache key is the canonical text. A text that was used before finds its plan without parsing.
Plan Plan::build(std::string_view chain, const PlanRequest& request) {
  const FpMode ieee;
  if (!request.opaque.empty() || request.collectives) return build(parse_chain(chain), request);
  const std::string given = key_of(chain, request);
  const uint64_t meaning = definitions();
  if (const std::optional<Plan> found = plans().find(given, meaning)) return *found;
  const Chain ops = parse_chain(chain);
  const std::string canonical = key_of(print_chain(ops), request);
  std::optional<Plan> plan = canonical == given ? std::nullopt : plans().find(canonical, meaning);
  if (!plan) plan = plans().keep(canonical, build(ops, request), meaning);
  return plans().keep(given, *plan, meaning);
}

}  // namespace tenon
