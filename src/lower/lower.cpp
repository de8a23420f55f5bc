// Lowers a chain to a plan: the forward pass in op order, then the backward pass in reverse order.
#include <algorithm>
#include <deque>
#include <set>

#include "core/fp_mode.h"
#include "lower/extras.h"
#include "lower/stage.h"
#include "lower/workspace.h"
#include "tenon/error.h"

namespace tenon {

namespace {

void check_recipe(const Recipe& q) {
  for (const Format* f : {&q.input, &q.weight, &q.gradient}) {
    if (f->scaling == Scaling::none) continue;
    const DTypeInfo& d = info(f->dtype);
    require(f->dtype == DType::e4m3 || f->dtype == DType::e5m2, "plan: the recipe '", q.name,
            "' has the scaling mode ", info(f->scaling).name, " for ", d.name,
            "; it must be for e4m3 or e5m2");
    require(!f->swizzled, "plan: the recipe '", q.name,
            "' has swizzled scales; a plan chooses their order itself");
  }
}

// `what` names the tensor that comes encoded.
void check_encoding(const std::string& what, const std::optional<GivenEncoding>& e) {
  if (!e) return;
  const Format& f = e->format;
  require(f.scaling != Scaling::none, "plan: ", what, " has the scaling mode none; give one, or ",
          "leave the encoding away");
  require(f.dtype == DType::e4m3 || f.dtype == DType::e5m2, "plan: ", what, " is ",
          info(f.dtype).name, "; it must be e4m3 or e5m2");
  require(e->rowwise || e->columnwise, "plan: ", what,
          " has neither a rowwise nor a columnwise encoding; give one of them");
  require(!f.swizzled || info(f.scaling).scale == DType::e8m0, "plan: ", what, " is ",
          info(f.scaling).name, " with swizzled scales; only mxfp8 has them");
}

void check_request(const PlanRequest& r) {
  const auto plain_only = [](const std::string& what, std::optional<DType> d) {
    const DTypeInfo& i = info(d.value_or(DType::f32));
    require(i.plain, "plan: ", what, " is ", i.name, "; it must be f32, f16 or bf16");
  };
  plain_only("the input", r.dtype);
  plain_only("parameter_dtype", r.parameter_dtype);
  plain_only("input_dtype", r.input_dtype);
  for (size_t i = 0; i < r.parameter_dtypes.size(); ++i)
    plain_only(str("parameter_dtypes[", i, "]"), r.parameter_dtypes[i]);
  for (size_t i = 0; i < r.extra_dtypes.size(); ++i)
    plain_only(str("extra_dtypes[", i, "]"), r.extra_dtypes[i]);
  const auto check_grads = [&](const char* what, const std::vector<GradRequest>& list) {
    for (size_t i = 0; i < list.size(); ++i)
      plain_only(str("the dtype of ", what, "[", i, "]"), list[i].dtype);
  };
  check_recipe(r.recipe);
  check_encoding("input_encoding", r.input_encoding);
  for (size_t i = 0; i < r.op_requests.size(); ++i) {
    if (r.op_requests[i].recipe) check_recipe(*r.op_requests[i].recipe);
    check_encoding(str("the weight of op_requests[", i, "]"), r.op_requests[i].weight);
  }
  check_grads("parameter_grads", r.parameter_grads);
  check_grads("extra_grads", r.extra_grads);
}

Keep keep_of(const OpUse& use, Keep otherwise) {
  const std::optional<std::string> text = use.arguments.text("keep");
  if (!text) return otherwise;
  const auto* const found = std::ranges::find(kKeeps, *text);
  require(found != kKeeps.end(), use.arguments.who(), ": keep is '", *text,
          "'; it must be input, fp8 or recompute");
  return static_cast<Keep>(found - kKeeps.begin());
}

class Lowering {
 public:
  explicit Lowering(Planner& planner) : planner_(planner), extras_(planner) {}

  void run() {
    const PlanRequest& r = planner_.request();
    require(!chain().empty(), "plan: the chain is empty; give it at least one op");
    check_request(r);
    find_columns();
    const Operand input = r.input_encoding ? operand(*r.input_encoding) : Operand(input_dtype());
    const StoredTensor& x = planner_.tensor("x", Role::input, input, r.cols, {});
    make_stages();
    forward(x);
    planner_.data().has_backward = r.backward && needs_;
    if (r.backward && needs_) backward();
    at_.reset();
    check_lists();
    place_workspace(planner_.data());
  }

  // Rethrows an error of the current op with the op's position in the chain text.
  [[noreturn]] void fail_at_op(const Error& e) const {
    const Position p = at_ ? chain()[*at_].position : Position{};
    if (p.line == 0) throw e;
    fail(e.code(), "chain: line ", p.line, ", column ", p.column, ": ", e.what());
  }

 private:
  [[nodiscard]] const Chain& chain() const { return planner_.data().chain; }

  // Infers the chain's input width from the first op that states its input width. Stops at an op
  // that changes the number of columns.
  void find_columns() {
    PlanRequest& r = planner_.data().request;
    for (size_t i = 0; r.cols == 0 && i < chain().size(); ++i) {
      at_ = i;
      if (r.opaque.contains(chain()[i].name)) break;
      const OpUse use = OpUse::of(chain()[i], planner_.op_name(i));
      r.cols = use.arguments.columns().value_or(0);
      if (!use.schema->same_columns) break;
    }
    at_.reset();
    require(r.cols > 0, "plan: the chain does not say how wide its input is; give the columns, ",
            "`--cols` on the command line and `cols` in a request");
    require(r.cols <= kMostCols, "plan: the input has ", r.cols, " columns; it may have at most ",
            kMostCols);
    cols_ = r.cols;
  }

  void make_stages() {
    const PlanRequest& r = planner_.request();
    needs_ = r.backward && r.input_grad;
    for (size_t i = 0; i < chain().size(); ++i) {
      at_ = i;
      OpState& op = ops_.emplace_back();
      op.index = i;
      op.name = planner_.op_name(i);
      op.cols = cols_;
      op.rows = rows_;
      const size_t first = stages_.size();
      const auto opaque = r.opaque.find(chain()[i].name);
      if (opaque != r.opaque.end())
        add_opaque(op, opaque->second);
      else
        add_op(op);
      for (size_t s = first; s < stages_.size(); ++s) {
        stages_[s]->first = s == first;
        stages_[s]->last = s + 1 == stages_.size();
        needs_input_.push_back(needs_);
        needs_ = needs_ || (r.backward && stages_[s]->trains());
      }
      cols_ = op.out_cols;
      rows_ = op.out_rows;
    }
    extras_.check_channels([this](size_t op) { at_ = op; });
    for (size_t i = 0; i < stages_.size(); ++i)
      stages_[i]->prepare(r.backward && needs_input_[i], i > 0 ? stages_[i - 1].get() : nullptr);
  }

  void add_op(OpState& op) {
    const PlanRequest& r = planner_.request();
    const OpUse use = OpUse::of(chain()[op.index], op.name);
    use.check_columns(op.cols);
    const OpCall call{.arguments = use.arguments,
                      .cols = op.cols,
                      .training = r.training,
                      .ranks = ranks(op.name)};
    const OutputShape out = use.schema->output(call);
    op.out_cols = out.cols;
    op.out_rows = op.rows.times(out.rows_mul, out.rows_div, op.name);
    op.keep = keep_of(use, r.keep);
    op.extras = use.schema->extra_inputs;
    const std::vector<Extension> extensions = use.schema->forward(call);
    std::optional<GivenEncoding> weight;
    if (std::ranges::any_of(extensions, quantises)) {
      const OpRequest asked = next_request();
      op.recipe = recipe_of(use, asked);
      weight = asked.weight;
      const bool leaves = op.index + 1 == chain().size() && r.output_encoded &&
                          op.recipe.input.scaling != Scaling::none &&
                          !std::ranges::any_of(extensions, multiplies);
      require(asked.rowwise || asked.columnwise, op.name,
              ": its op_request asks for neither a rowwise nor a columnwise encoding; ask for one");
      op.leaves_rowwise = leaves && asked.rowwise;
      op.leaves_columnwise = leaves && asked.columnwise;
      require(!weight || std::ranges::any_of(extensions, multiplies), op.name,
              ": its op_request has an encoded weight; it has no weight");
    }
    for (const ParameterSchema& p : use.schema->parameters)
      op.parameters.push_back(ParameterTensor::make(
          planner_, str(op.name, ".", p.name), p.rows.empty() ? 1 : use.arguments.count(p.rows),
          op.cols, p.initial(call), weight));
    extras_.add(op, chain()[op.index], use.schema->extra_outputs.size(), needs_);
    const auto has_formula = [](const Extension& e) {
      return std::holds_alternative<Elementwise>(e);
    };
    require(!use.arguments.text("keep") || extensions.empty() ||
                std::ranges::any_of(extensions, has_formula),
            op.name, ": keep is for ops with a formula; take it away");
    for (const Extension& e : extensions)
      stages_.push_back(std::visit([&](const auto& x) { return make_stage(planner_, op, x); }, e));
  }

  static bool multiplies(const Extension& e) { return std::holds_alternative<Multiplied>(e); }
  static bool quantises(const Extension& e) {
    return multiplies(e) || std::holds_alternative<Quantised>(e);
  }

  // The request for the next op that quantises.
  OpRequest next_request() {
    const std::vector<OpRequest>& all = planner_.request().op_requests;
    const size_t number = planner_.data().quantising++;
    return number < all.size() ? all[number] : OpRequest{};
  }
  [[nodiscard]] Recipe recipe_of(const OpUse& use, const OpRequest& asked) const {
    if (asked.recipe) return *asked.recipe;
    const std::optional<std::string> name = use.arguments.text("recipe");
    return name ? recipe(*name) : planner_.request().recipe;
  }

  void add_opaque(OpState& op, const OpaqueOp& own) {
    const Op& text = chain()[op.index];
    require(std::ranges::find(op_schemas(), text.name, &OpSchema::name) == op_schemas().end(),
            op.name, ": the opaque op '", text.name,
            "' is called as one of the library's; give it another name");
    const Arguments none(text, {}, op.name);
    require(own.rows_mul > 0 && own.rows_div > 0, op.name, ": the row factor is ", own.rows_mul,
            "/", own.rows_div, "; both must be positive");
    require(own.cols >= 0 && own.cols <= kMostCols, op.name, ": cols is ", own.cols,
            "; it must be from 0, which keeps those of its input, to ", kMostCols);
    op.out_cols = own.cols ? own.cols : op.cols;
    op.out_rows = op.rows.times(own.rows_mul, own.rows_div, op.name);
    extras_.add(op, text, 0, needs_);
    stages_.push_back(make_opaque(planner_, op, own));
  }

  [[nodiscard]] int64_t ranks(const std::string& who) const {
    const auto& group = planner_.request().collectives;
    if (!group) return 1;
    const int64_t n = group->ranks();
    require(n > 0, who, ": its group has ", n, " ranks; it needs one");
    return n;
  }

  // Ends the open step before this op if an earlier attempt cut it here: no maker accepted the
  // longer step.
  void cut_here(Flow& flow, Pass pass, const Stage& stage) {
    const bool enters = pass == Pass::forward ? stage.first : stage.last;
    const Cut* const c = enters ? planner_.cut(pass, stage.op().index) : nullptr;
    if (!c) return;
    flow.why(c->why);
    flow.materialise(str(pass == Pass::forward ? "c" : "dc", c->op), Role::workspace,
                     Operand(planner_.request().dtype));
  }

  void forward(const StoredTensor& x) {
    Flow flow(planner_, Pass::forward);
    flow.begin(x);
    if (x.plain() && input_dtype() != planner_.request().dtype)
      flow.apply([this](Assembly&, Expr e, const ColumnMap&) { return planner_.between(e); });
    for (const auto& stage : stages_) {
      const size_t index = stage->op().index;
      cut_here(flow, Pass::forward, *stage);
      flow.op(index);
      at_ = index;
      if (stage->first) extras_.take(ops_[index], flow);
      stage->forward(flow);
    }
    if (!flow.adopt("y", Role::output, ops_.back().leaves()))
      flow.close(
          planner_.tensor("y", Role::output, Operand(planner_.request().dtype), cols_, rows_));
  }

  void backward() {
    const PlanRequest& r = planner_.request();
    const Operand plain(r.dtype);
    Flow flow(planner_, Pass::backward);
    flow.begin(planner_.tensor("dy", Role::input, plain, cols_, rows_));
    for (size_t i = stages_.size(); i-- > 0;) {
      Stage& stage = *stages_[i];
      if (!needs_input_[i] && !stage.trains()) break;
      cut_here(flow, Pass::backward, stage);
      flow.op(stage.op().index);
      at_ = stage.op().index;
      stage.backward(flow, needs_input_[i]);
    }
    if (!r.input_grad)
      flow.finish();
    else if (!flow.adopt("dx", Role::grad, false))
      input_gradient(flow, planner_.tensor("dx", Role::grad, Operand(input_dtype()), r.cols, {}));
    flow.later_now();
  }

  // Stores the value as the gradient of the input, unless it is in memory.
  void input_gradient(Flow& flow, const StoredTensor& dx) {
    const Value& v = flow.value();
    const StoredTensor* const there =
        v->stored ? v->stored : flow.stored(v, dx.operand.format.dtype);
    if (there && planner_.shares(dx, *there))
      flow.finish();
    else
      flow.close(dx);
  }
  [[nodiscard]] DType input_dtype() const {
    const PlanRequest& r = planner_.request();
    return r.input_dtype.value_or(r.dtype);
  }

  void check_lists() const {
    const PlanData& d = planner_.data();
    const auto no_more = [&](const char* what, size_t asked, const char* of, size_t there) {
      require(asked <= there, "plan: ", what, " has ", asked, " entries; the chain has ", there,
              " ", of);
    };
    const auto extras =
        static_cast<size_t>(std::ranges::count(d.buffers, Role::extra_in, &Buffer::role));
    no_more("parameter_grads", d.request.parameter_grads.size(), "parameters", d.parameters);
    no_more("parameter_dtypes", d.request.parameter_dtypes.size(), "parameters", d.parameters);
    no_more("extra_dtypes", d.request.extra_dtypes.size(), "extra inputs", extras);
    no_more("extra_grads", d.request.extra_grads.size(), "extra inputs", extras);
    no_more("op_requests", d.request.op_requests.size(), "linears and quantizes", d.quantising);
    std::set<std::string_view> names;
    for (const Buffer& b : d.buffers)
      require(names.insert(b.name).second, "plan: two tensors are called '", b.name,
              "'; give an op another label, or a channel another name");
  }

  Planner& planner_;
  Extras extras_;
  std::deque<OpState> ops_;  // a deque, because stages keep references to its elements
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<bool> needs_input_;  // by stage: the gradient of its input is needed
  bool needs_ = false;             // the same for the value after the last stage
  int64_t cols_ = 0;               // of the value after the last op
  Factor rows_;
  std::optional<size_t> at_;  // the op that is being lowered
};

}  // namespace

Plan Plan::build(std::span<const Op> chain, const PlanRequest& request) {
  const FpMode ieee;  // constants are rounded and folded during lowering
  std::vector<Cut> cuts;
  const size_t most = 2 * chain.size() + 1;
  while (true) {
    Planner planner(Chain(chain.begin(), chain.end()), request, cuts);
    Lowering lowering(planner);
    try {
      lowering.run();
      return Plan(planner.result());
    } catch (const Error& e) {
      lowering.fail_at_op(e);
    } catch (const StepRefused& refused) {
      cuts.push_back(refused.cut);
      if (cuts.size() > most) fail(Code::unsupported, "plan: ", refused.cut.why);
    }
  }
}

}  // namespace tenon
