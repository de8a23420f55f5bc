// Lowers a chain: stages in order, then in reverse; buffers; workspace that is shared over time.
#include <algorithm>
#include <set>
#include <unordered_map>

#include "core/fp_mode.h"
#include "core/memo.h"
#include "expr/registry.h"
#include "lower/flow.h"
#include "lower/stage.h"
#include "step/key.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// A value that others read: lazily in the step that makes it, from memory later.
class Tap {
 public:
  Tap(Planner& planner, Flow& flow, Value value, std::string name)
      : planner_(planner), value_(std::move(value)), serial_(flow.serial()), rows_(flow.rows()) {
    if (value_->place) return;
    flow.side([this, &flow, name = std::move(name)](Assembly& a) {
      if (readers <= 0) return;
      const Operand plain(planner_.request().dtype);
      place_ = &planner_.place(name, Role::workspace, plain, value_->cols, rows_);
      a.store(*place_, flow.parts(a, value_));
    });
  }
  Value take(const Flow& flow) {
    --readers;
    if (value_->place || flow.serial() == serial_) return value_;
    auto lazy = std::make_shared<Lazy>();
    lazy->cols = value_->cols;
    lazy->place = place_;
    lazy->make = [p = place_](Assembly& a, const ColumnMap& m) { return a.load(*p, m); };
    return lazy;
  }
  int readers = 1;

 private:
  Planner& planner_;
  Value value_;
  int64_t serial_;
  Factor rows_;
  const Place* place_ = nullptr;
};

struct Channel {
  size_t writer = 0;
  int64_t cols = 0;
  Factor rows;
  int readers = 0;
  std::unique_ptr<Tap> value;
  std::vector<std::unique_ptr<Tap>> grads;
};

Value in_memory(const Place& place) {
  auto lazy = std::make_shared<Lazy>();
  lazy->cols = place.cols;
  lazy->place = &place;
  lazy->make = [&place](Assembly& a, const ColumnMap& m) { return a.load(place, m); };
  return lazy;
}

std::string text_of(const Factor& f) {
  if (f.fixed) return str(f.fixed, " rows");
  if (f.mul == f.div) return "the input's rows";
  return str(f.mul, f.div == 1 ? "" : str("/", f.div), " times the input's rows");
}

GradRequest nth(const std::vector<GradRequest>& list, size_t i) {
  return i < list.size() ? list[i] : GradRequest{};
}

// The dimension of a scale tensor that depends on the rows, as a formula.
RowCount scale_rows(const Format& f, Orientation o, const Factor& rows) {
  const Blocks b = f.blocks(o);
  if (b.single()) return {0, 1, 1, 1};
  const bool inside = b.transposed;
  const Shape one = f.scale_shape(1, 1, o);
  return {rows.mul, rows.div * b.rows, inside ? one.cols : one.rows, 0};
}

void assign_slots(PlanData& d) {
  const size_t n = d.buffers.size();
  std::vector<int> first(n, -1), last(n, -1);
  int at = 0;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : d.steps(pass)) {
      for (const auto* list : {&s.in, &s.out})
        for (const Slot& slot : *list) {
          if (slot.buffer == kNoBuffer) continue;
          const auto b = static_cast<size_t>(slot.buffer);
          if (first[b] < 0) first[b] = at;
          last[b] = at;
        }
      ++at;
    }
  const int turn = static_cast<int>(d.forward.size());
  d.slot_of.assign(n, kNoBuffer);
  std::vector<int> busy;  // until when, by slot
  for (size_t b = 0; b < n; ++b) {
    Buffer& buffer = d.buffers[b];
    if (buffer.role != Role::workspace || first[b] < 0) continue;
    // What backward reads of forward's must outlive it.
    if (first[b] < turn && last[b] >= turn) buffer.role = Role::saved;
  }
  std::vector<size_t> order;
  for (size_t b = 0; b < n; ++b)
    if (d.buffers[b].role == Role::workspace && first[b] >= 0) order.push_back(b);
  std::ranges::stable_sort(order, {}, [&](size_t b) { return first[b]; });
  for (const size_t b : order) {
    size_t slot = 0;
    while (slot < busy.size() && busy[slot] >= first[b]) ++slot;
    if (slot == busy.size()) busy.push_back(0);
    busy[slot] = last[b];
    d.slot_of[b] = static_cast<int>(slot);
  }
  d.slots = static_cast<int>(busy.size());
}

}  // namespace

Planner::Planner(Chain chain, const PlanRequest& request, std::vector<Cut> cuts)
    : data_(std::make_shared<PlanData>()), cuts_(std::move(cuts)) {
  data_->chain = std::move(chain);
  data_->request = request;
}

const Cut* Planner::cut(Pass pass, size_t op) const {
  for (const Cut& c : cuts_)
    if (c.pass == pass && c.op == op) return &c;
  return nullptr;
}

// Two ops of one name are told apart by their position, or by a label of the user's.
std::string Planner::op_name(size_t op) const {
  const Op& o = data_->chain[op];
  if (!o.label.empty()) return o.label;
  return str(o.name, op);
}

void Planner::fail_at_op(const Error& e) const {
  const Position p = at_ ? data_->chain[*at_].position : Position{};
  if (p.line == 0) throw e;
  fail(e.code(), "chain: line ", p.line, ", column ", p.column, ": ", e.what());
}

int Planner::buffer(Buffer b) {
  static_cast<void>(b.bytes(0));  // refuses a parameter that is too large
  data_->buffers.push_back(std::move(b));
  return static_cast<int>(data_->buffers.size() - 1);
}

const Place& Planner::place(const std::string& name, Role role, const Operand& as, int64_t cols,
                            Factor rows, const Place* first) {
  Place p{.name = name, .operand = as, .cols = cols, .rows = rows};
  const Format& f = as.format;
  const RowCount count = rows.fixed ? RowCount{0, 1, 1, rows.fixed} : RowCount{rows.mul, rows.div};
  const auto add = [&](Orientation o, bool has, int& data, int& scale) {
    if (!has) return;
    const bool turned = o == Orientation::columnwise && info(f.scaling).transposes;
    const std::string side = o == Orientation::columnwise ? ".t" : "";
    Buffer b{.name = name + side,
             .role = role,
             .dtype = f.dtype,
             .rows = count,
             .cols = cols,
             .rows_inside = turned};
    if (turned && !rows.fixed) b.rows.round = 16;
    data = buffer(b);
    if (f.scaling == Scaling::none) return;
    b.name += ".scale_inv";
    b.dtype = info(f.scaling).scale;
    b.rows_inside = f.blocks(o).transposed;
    const Shape one = f.scale_shape(rows.fixed ? rows.fixed : 1, cols, o);
    b.rows = rows.fixed ? RowCount{0, 1, 1, b.rows_inside ? one.cols : one.rows}
                        : scale_rows(f, o, rows);
    b.cols = b.rows_inside ? one.rows : one.cols;
    scale = buffer(b);
  };
  add(Orientation::rowwise, as.rowwise, p.row_data, p.row_scale);
  add(Orientation::columnwise, as.columnwise, p.col_data, p.col_scale);
  const Buffer number{.name = name, .dtype = DType::f32, .rows = {0, 1, 1, 1}, .cols = 1};
  if (first) {
    p.scale = first->scale;
  } else if (f.scaling == Scaling::delayed) {
    Buffer b = number;
    b.role = Role::state;
    b.name = name + ".scale";
    p.scale = buffer(b);
    b.name = name + ".amax";
    p.amax = buffer(b);
  } else if (f.scaling == Scaling::current) {
    Buffer b = number;
    b.role = role == Role::state ? Role::state : Role::workspace;
    b.name = name + ".amax";
    p.scale = buffer(b);
  }
  return places_.emplace_back(std::move(p));
}

const Place& Planner::alias(const Place& of, int64_t cols, Factor rows) {
  Place p = of;
  p.cols = cols;
  p.rows = rows;
  return places_.emplace_back(std::move(p));
}

std::shared_ptr<PlanData> Planner::plan() {
  PlanData& d = *data_;
  const PlanRequest& r = d.request;
  require(!d.chain.empty(), "plan: the chain is empty; give it at least one op");
  const auto plain_only = [](const std::string& what, std::optional<DType> d) {
    const DTypeInfo& i = info(d.value_or(DType::f32));
    require(i.plain, "plan: ", what, " is ", i.name, "; it must be f32, f16 or bf16");
  };
  plain_only("the input", r.dtype);
  plain_only("parameter_dtype", r.parameter_dtype);
  const auto check_grads = [&](const char* what, const std::vector<GradRequest>& list) {
    for (size_t i = 0; i < list.size(); ++i)
      plain_only(str("the dtype of ", what, "[", i, "]"), list[i].dtype);
  };
  check_grads("parameter_grads", r.parameter_grads);
  check_grads("extra_grads", r.extra_grads);
  for (size_t i = 0; d.request.cols == 0 && i < d.chain.size(); ++i) {
    at_ = i;
    const std::optional<int64_t> read =
        r.opaque.contains(d.chain[i].name) ? 0 : width_read(d.chain[i], op_name(i));
    if (read == 0) break;
    d.request.cols = read.value_or(0);
  }
  at_.reset();
  require(r.cols > 0, "plan: the chain does not say how wide its input is; give the columns, ",
          "`--cols` on the command line and `cols` in a request");
  require(r.cols <= kMostCols, "plan: the input has ", r.cols, " columns; it may have at most ",
          kMostCols);

  const Operand plain(r.dtype);
  const Place& x = place("x", Role::input, plain, r.cols, {});
  std::vector<std::unique_ptr<Stage>> stages;
  std::vector<bool> needs_input;
  std::map<std::string, Channel> channels;
  bool needs = r.backward && r.input_grad;
  int64_t cols = r.cols;
  Factor rows;
  size_t extras = 0, extra_outs = 0;
  // Extra inputs are resolved when their op is lowered: a channel may still be lazy then.
  std::vector<std::vector<std::function<Value(Flow&)>>> resolve(d.chain.size());
  for (size_t i = 0; i < d.chain.size(); ++i) {
    const Op& op = d.chain[i];
    at_ = i;
    stages.push_back(make_stage({*this, i, cols, rows}, op));
    Stage& s = *stages.back();
    const std::string who = op_name(i);
    require(op.reads.size() <= s.extra_inputs(), who, ": it reads ", op.reads.size(),
            " channels, but has ", s.extra_inputs(), " extra inputs; take '<' away");
    require(op.writes.size() <= s.extra_outputs(), who, ": it writes ", op.writes.size(),
            " channels, but has ", s.extra_outputs(), " extra outputs; take '>' away");
    for (size_t k = 0; k < s.extra_inputs(); ++k) {
      if (k < op.reads.size()) {
        const auto it = channels.find(op.reads[k]);
        require(it != channels.end(), who, ": nothing before it writes the channel '", op.reads[k],
                "'; add make_extra_output>", op.reads[k]);
        require(!s.extra_is_column(), who,
                ": its extra input is one number a row; channels carry "
                "whole tensors");
        Channel& c = it->second;
        require(c.cols == cols && c.rows == rows, who, ": the channel '", op.reads[k], "' has ",
                c.cols, " columns and ", text_of(c.rows), ", its input ", cols, " and ",
                text_of(rows), "; they must be equal");
        ++c.readers;
        resolve[i].push_back([&c](Flow& flow) { return c.value->take(flow); });
        if (needs_input[c.writer])
          s.give_extra_grad.push_back(
              [this, &c, name = str("d", op.reads[k], ".", who)](Flow& f, const Value& v) {
                c.grads.push_back(std::make_unique<Tap>(*this, f, v, name));
              });
        else
          s.give_extra_grad.emplace_back();
        continue;
      }
      const GradRequest request = nth(r.extra_grads, extras);
      const std::string name = str("extra", extras++);
      const int64_t width = s.extra_is_column() ? 1 : cols;
      const Place& p = place(name, Role::extra_in, plain, width, rows);
      resolve[i].push_back([&p](Flow&) { return in_memory(p); });
      if (!r.backward || !request.wanted) {
        s.give_extra_grad.emplace_back();
        continue;
      }
      const Place& g =
          place("d" + name, Role::grad, Operand(request.dtype.value_or(r.dtype)), width, rows);
      require(
          !request.accumulate || !s.extra_is_column(), who, ": the gradient of ", name,
          " is a sum over a row, which is not added to what is there; give it memory of its own");
      if (request.accumulate)
        s.give_extra_grad.push_back([&g](Flow& f, const Value& v) {
          auto sum = std::make_shared<Lazy>();
          sum->cols = v->cols;
          sum->make = [&g, v](Assembly& a, const ColumnMap& m) {
            return a.load(g, m) + a.at(v, m);
          };
          f.side([&f, &g, sum](Assembly& a) { a.store(g, f.parts(a, sum)); });
        });
      else if (s.extra_is_column())
        s.give_extra_grad.push_back([&g](Flow& f, const Value& v) {
          f.side([&g, v](Assembly& a) { a.store_row_sum(g, a.at(v, {})); });
        });
      else
        s.give_extra_grad.push_back([&g](Flow& f, const Value& v) {
          f.side([&f, &g, v](Assembly& a) { a.store(g, f.parts(a, v)); });
        });
    }
    for (size_t k = 0; k < s.extra_outputs(); ++k) {
      if (k < op.writes.size()) {
        const std::string& name = op.writes[k];
        require(!channels.contains(name), who, ": the channel '", name,
                "' is written already; give it another name");
        Channel& c = channels[name];
        c.writer = i;
        c.cols = cols;
        c.rows = rows;
        s.give_extra.push_back([this, &c, name](Flow& f, const Value& v) {
          c.value = std::make_unique<Tap>(*this, f, v, name);
          c.value->readers = c.readers;
        });
        s.take_extra_grad.push_back([&c](Flow& f) -> Value {
          if (c.grads.empty()) return nullptr;
          std::vector<Value> all;
          for (const auto& tap : c.grads) all.push_back(tap->take(f));
          auto sum = std::make_shared<Lazy>();
          sum->cols = all[0]->cols;
          sum->make = [all](Assembly& a, const ColumnMap& m) {
            Expr e = a.at(all[0], m);
            for (size_t j = 1; j < all.size(); ++j) e = e + a.at(all[j], m);
            return e;
          };
          return sum;
        });
        continue;
      }
      const std::string name = str("extra_out", extra_outs++);
      const Place& out = place(name, Role::extra_out, plain, cols, rows);
      s.give_extra.push_back([&out](Flow& f, const Value& v) {
        f.side([&f, &out, v](Assembly& a) { a.store(out, f.parts(a, v)); });
      });
      if (r.backward && needs) {
        const Place& g = place("d" + name, Role::input, plain, cols, rows);
        s.take_extra_grad.push_back([&g](Flow&) { return in_memory(g); });
      } else {
        s.take_extra_grad.push_back([](Flow&) -> Value { return nullptr; });
      }
    }
    needs_input.push_back(needs);
    needs = needs || (r.backward && s.trains());
    cols = s.out_cols();
    rows = s.out_rows();
  }
  for (const auto& [name, c] : channels) {
    at_ = c.writer;
    require(c.readers > 0, op_name(c.writer), ": nothing behind it reads the channel '", name,
            "'; read it with '<', or take '>' away to give it to the caller");
  }
  for (size_t i = 0; i < stages.size(); ++i)
    stages[i]->prepare(r.backward && (needs_input[i] || stages[i]->trains()),
                       r.backward && needs_input[i], i > 0 ? stages[i - 1].get() : nullptr);

  const auto cut_here = [&](Flow& flow, Pass pass, size_t op) {
    const Cut* c = cut(pass, op);
    if (!c) return;
    flow.why(c->why);
    flow.materialise(str(pass == Pass::forward ? "c" : "dc", op), Role::workspace, plain);
  };
  Flow forward(*this, Pass::forward);
  forward.begin(x);
  for (size_t i = 0; i < stages.size(); ++i) {
    cut_here(forward, Pass::forward, i);
    forward.op(i);
    at_ = i;
    for (const auto& take : resolve[i]) stages[i]->extra_in.push_back(take(forward));
    stages[i]->forward(forward);
  }
  if (!forward.adopt("y", Role::output)) forward.close(place("y", Role::output, plain, cols, rows));

  if (r.backward && needs) {
    Flow backward(*this, Pass::backward);
    backward.begin(place("dy", Role::input, plain, cols, rows));
    for (size_t i = stages.size(); i-- > 0;) {
      if (!needs_input[i] && !stages[i]->trains()) break;
      cut_here(backward, Pass::backward, i);
      backward.op(i);
      at_ = i;
      stages[i]->backward(backward, needs_input[i]);
    }
    if (!r.input_grad)
      backward.finish();
    else if (!backward.adopt("dx", Role::grad))
      backward.close(place("dx", Role::grad, plain, r.cols, {}));
    backward.later_now();
  }
  at_.reset();
  const auto no_more = [](const char* what, size_t asked, const char* of, int64_t there) {
    require(static_cast<int64_t>(asked) <= there, "plan: ", what, " has ", asked,
            " entries; the chain has ", there, " ", of);
  };
  const auto of_role = [&](Role role) {
    return std::ranges::count(d.buffers, role, &Buffer::role);
  };
  no_more("parameter_grads", r.parameter_grads.size(), "parameters", of_role(Role::param));
  no_more("extra_grads", r.extra_grads.size(), "extra inputs", of_role(Role::extra_in));
  std::set<std::string_view> names;
  for (const Buffer& b : d.buffers)
    require(names.insert(b.name).second, "plan: two tensors are called '", b.name,
            "'; give an op another label, or a channel another name");
  assign_slots(d);
  return data_;
}

Recipe recipe(std::string_view name, bool e4m3) {
  const DType gradient = e4m3 ? DType::e4m3 : DType::e5m2;
  const auto one = [&](Scaling s, DType d) { return Format{.dtype = d, .scaling = s}; };
  if (name == "none") return {};
  if (name == "delayed" || name == "current") {
    const Scaling s = name == "delayed" ? Scaling::delayed : Scaling::current;
    return {std::string(name), one(s, DType::e4m3), one(s, DType::e4m3), one(s, gradient)};
  }
  if (name == "mxfp8") {
    const Format f = one(Scaling::mxfp8, DType::e4m3);
    return {"mxfp8", f, f, f};
  }
  if (name == "block") {
    const Format f = one(Scaling::block1x128, DType::e4m3);
    return {"block", f, one(Scaling::block128x128, DType::e4m3), f};
  }
  fail(Code::invalid_argument, "recipe: '", name,
       "' is none; use none, delayed, current, mxfp8 or block");
}

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
  key.add(r.cols).add(r.dtype).add(r.parameter_dtype);
  key.add(r.training).add(r.backward).add(r.input_grad).add(r.keep);
  key.add(r.options.precision).add(r.options.rounding).add(r.options.device);
  key.add(r.recipe.name);
  add(r.recipe.input);
  add(r.recipe.weight);
  add(r.recipe.gradient);
  add_all(r.parameter_grads);
  add_all(r.extra_grads);
  return std::string(key.text()).append(chain);
}

}  // namespace

// The canonical text is the key; a text that was given before leads to its plan without parsing.
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

Plan Plan::build(std::span<const Op> chain, const PlanRequest& request) {
  const FpMode ieee;  // constants are rounded and folded here
  std::vector<Cut> cuts;
  const size_t most = 2 * chain.size() + 1;
  while (true) {
    Planner planner(Chain(chain.begin(), chain.end()), request, cuts);
    try {
      return Plan(planner.plan());
    } catch (const Error& e) {
      planner.fail_at_op(e);
    } catch (const Refused& refused) {
      cuts.push_back(refused.cut);
      if (cuts.size() > most) fail(Code::unsupported, "plan: ", refused.cut.why);
    }
  }
}

}  // namespace tenon
