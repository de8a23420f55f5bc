// Chooses the kernels of a finished step, and splits the step in two if its maker needs that.
#include "lower/append.h"

#include <algorithm>
#include <cassert>
#include <optional>
#include <set>

#include "choice/backends.h"
#include "step/split.h"
#include "tenon/error.h"

namespace tenon {

namespace {

void keep(std::vector<BufferView>& views, const std::set<uint32_t>& args) {
  for (uint32_t i = 0; i < views.size(); ++i)
    if (!args.contains(i)) views[i] = {};
}

// True if one of the views holds part of the tensor: its codes or its scales.
bool holds(const PlanData& d, const std::vector<BufferView>& views, const std::string& tensor) {
  return std::ranges::any_of(views, [&](const BufferView& s) {
    if (s.buffer == kNoBuffer) return false;
    const std::string& name = d.buffers[static_cast<size_t>(s.buffer)].name;
    return name == tensor || name.starts_with(tensor + ".");
  });
}

// The step with the views and tensors of `half` alone.
PlanStep half_of(const PlanData& d, const PlanStep& whole, const Step& half,
                 std::string_view suffix) {
  PlanStep made = whole;
  made.step = half;
  made.step.name = str(whole.step.name, suffix);
  keep(made.in, input_views(half));
  keep(made.out, output_views(half));
  std::erase_if(made.writes, [&](const PlanStep::Write& w) { return !holds(d, made.out, w.name); });
  const auto draws = [](const Load& l) { return l.from == Load::From::random; };
  if (std::ranges::none_of(half.loads, draws)) made.random = kNoBuffer;
  return made;
}

// The tensor that the second half fills with the product itself, e.g. the saved input of an
// activation. The first half can store the product there. The second half then does not store it.
std::optional<BufferView> product_tensor(const PlanStep& whole, Split& split) {
  const Gemm* const g = split.first.gemm();
  if (!g || split.count != 1 || g->cols != split.stride) return std::nullopt;
  Step& body = split.second;
  // Whether a store writes the product unchanged, each column to the same column.
  const auto is_product = [&](const Store& s) {
    if (s.to != Store::To::tile || s.dtype != split.dtype) return false;
    const Node* value = &(*body.graph)[s.value];
    if (value->word == Word::round && value->dtype() == s.dtype)
      value = &(*body.graph)[value->in[0]];
    if (value->word != Word::load) return false;
    const Load& l = body.loads[value->slot];
    return l.from == Load::From::tile && l.arg == split.in && l.columns == s.columns;
  };
  for (uint32_t arg = 0; arg < whole.out.size(); ++arg) {
    const BufferView& view = whole.out[arg];
    if (view.form != BufferView::Form::data || view.cols != g->cols) continue;
    // The `arg` of an encoded store is the number of an encoder, not of a view.
    const auto of_view = [&](const Store& s) {
      return s.to != Store::To::encoded && s.to != Store::To::amax && s.arg == arg;
    };
    std::vector<ColumnMap> filled;
    bool only_product = true;
    for (const Store& s : body.stores) {
      if (!of_view(s)) continue;
      only_product = only_product && is_product(s);
      if (std::ranges::find(filled, s.columns) == filled.end()) filled.push_back(s.columns);
    }
    const auto columns = static_cast<int64_t>(filled.size()) * body.cols;
    if (filled.empty() || !only_product || columns != g->cols) continue;
    std::vector<Store> left = body.stores;
    std::erase_if(left, of_view);
    if (left.empty()) continue;
    body.stores = std::move(left);
    body.drop_unused_loads();
    return view;
  }
  return std::nullopt;
}

// Two steps that divide the results of a step whose kernel repeats the body. Empty if the kernels
// of both would repeat it too.
std::optional<std::pair<Step, Step>> better_halves(const PlanStep& step, const Target& target) {
  const Way& way = step.chosen.kernel->ways().front();
  if (!way.kernel || !way.kernel->repeats_body()) return std::nullopt;
  std::optional<std::pair<Step, Step>> halves = split_results(step.step);
  if (!halves) return std::nullopt;
  const auto repeats = [&](const Step& half) {
    const Way& first = kernel_for(half, target).kernel->ways().front();
    return first.kernel && first.kernel->repeats_body();
  };
  if (repeats(halves->first) && repeats(halves->second)) return std::nullopt;
  return halves;
}

// The result of an earlier step that decodes the same codes to the same dtype. No step of a pass
// writes codes twice.
std::optional<BufferView> decoded_before(const std::vector<PlanStep>& steps, const PlanStep& step) {
  const auto codes = [](const PlanStep& s) { return s.in[s.step.loads[0].arg]; };
  const auto result = [](const PlanStep& s) { return s.out[s.step.stores[0].arg]; };
  for (const PlanStep& s : steps)
    if (s.decodes && !s.weights && codes(s) == codes(step) &&
        s.step.stores[0].dtype == step.step.stores[0].dtype)
      return result(s);
  return std::nullopt;
}

std::string free_name(const PlanData& d, const std::string& base) {
  std::string name = base;
  for (int n = 2; std::ranges::find(d.buffers, name, &Buffer::name) != d.buffers.end(); ++n)
    name = str(base, n);
  return name;
}

}  // namespace

const Target& target_of(const PlanRequest& request) {
  const Device device = request.options.device;
  if (request.target.empty()) return backend_for(device).here();
  const Target& t = named_target(request.target);
  require(device == Device::cpu || device == t.device, "plan: the target ", t.name, " is for ",
          kDevices[static_cast<size_t>(t.device)], ", and the device is ",
          kDevices[static_cast<size_t>(device)], "; give one of them");
  return t;
}

void append(Planner& planner, Pass pass, PlanStep step) {
  step.chosen = kernel_for(step.step, *planner.data().target);
  const Way& way = step.chosen.kernel->ways().front();
  if (const auto halves = better_halves(step, *planner.data().target)) {
    PlanStep first = half_of(planner.data(), step, halves->first, "");
    PlanStep second = half_of(planner.data(), step, halves->second, ".encode");
    constexpr const char* kWhy =
        "no fast kernel writes all results, so several steps write some each";
    if (first.why.find(kWhy) == std::string::npos)
      first.why += str(first.why.empty() ? "" : "; ", kWhy);
    const auto& refused = step.chosen.kernel->refused();
    first.refused.insert(first.refused.end(), refused.begin(), refused.end());
    second.why.clear();
    append(planner, pass, std::move(first));
    append(planner, pass, std::move(second));
    return;
  }
  if (way.kernel) {
    if (const Step* const as = way.kernel->computes()) {
      std::string name = std::move(step.step.name);
      step.step = *as;
      step.step.name = std::move(name);
    }
    planner.steps(pass).push_back(std::move(step));
    return;
  }
  Split split = way.halves->split;
  const std::optional<BufferView> kept = product_tensor(step, split);
  const Factor rows = split.first.rows ? Factor{.fixed = split.first.rows} : step.rows;
  PlanStep first = half_of(planner.data(), step, split.first, split.suffix);
  PlanStep second = half_of(planner.data(), step, split.second, "");
  for (PlanStep* half : {&first, &second})
    if (half->step.is_map()) half->rows = rows;
  first.out.resize(split.out + split.count);
  second.in.resize(split.in + split.count);
  const auto& refused = step.chosen.kernel->refused();
  const auto why = [](PlanStep& s, const std::string& more) {
    s.why += str(s.why.empty() ? "" : "; ", more);
  };
  first.decodes = split.decodes;
  if (const auto there =
          split.decodes ? decoded_before(planner.steps(pass), first) : std::nullopt) {
    second.in[split.in] = *there;
    why(second, "an earlier step has decoded an operand");
    second.refused.insert(second.refused.end(), refused.begin(), refused.end());
    append(planner, pass, std::move(second));
    return;
  }
  const std::string base = str(planner.op_name(step.ops.front()),
                               pass == Pass::backward ? ".d" : ".", split.suffix.substr(1));
  if (kept) {
    first.out[split.out] = second.in[split.in] = *kept;
    const std::string& name = planner.data().buffers[static_cast<size_t>(kept->buffer)].name;
    const auto write = std::ranges::find(step.writes, name, &PlanStep::Write::name);
    assert(write != step.writes.end());
    first.writes.push_back(*write);
  }
  for (uint32_t i = 0; i < split.count && !kept; ++i) {
    const StoredTensor& p = planner.tensor(free_name(planner.data(), base), Role::workspace,
                                           Operand(split.dtype), split.stride, rows);
    first.out[split.out + i] = second.in[split.in + i] = data_view(p);
    first.writes.push_back({p.name, p.operand});
  }
  why(first, str(way.maker, " does this in two steps, with the ", split.what, " in memory"));
  second.why.clear();
  second.refused.clear();
  first.refused.insert(first.refused.end(), refused.begin(), refused.end());
  append(planner, pass, std::move(first));
  append(planner, pass, std::move(second));
}

}  // namespace tenon
