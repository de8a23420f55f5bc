// Connects extra inputs and outputs before any op is lowered.
#include "lower/extras.h"

#include "tenon/error.h"

namespace tenon {

// A value with several readers. The step that makes it reads it lazily. Later steps read it from
// memory.
class Extras::Tap {
 public:
  Tap(Planner& planner, Flow& flow, Value value, std::string name, int readers)
      : planner_(planner),
        value_(std::move(value)),
        serial_(flow.serial()),
        rows_(flow.rows()),
        readers_(readers) {
    if (value_->stored) return;
    flow.side([this, &flow, name = std::move(name)](Assembly& a) {
      if (readers_ <= 0) return;
      const Operand plain(planner_.request().dtype);
      // The step may store the value already, e.g. as the saved input of the next op.
      stored_ = flow.stored(value_, plain.format.dtype);
      if (stored_) return;
      stored_ = &planner_.tensor(name, Role::workspace, plain, value_->cols, rows_);
      a.store(*stored_, flow.pieces(a, value_));
    });
  }
  Value take(const Flow& flow) {
    --readers_;
    return value_->stored || flow.serial() == serial_ ? value_ : in_memory(*stored_);
  }

 private:
  Planner& planner_;
  Value value_;
  int64_t serial_;
  Factor rows_;
  const StoredTensor* stored_ = nullptr;
  int readers_;
};

namespace {

std::string text_of(const Factor& f) {
  if (f.fixed) return str(f.fixed, " rows");
  if (f.mul == f.div) return "the input's rows";
  return str(f.mul, f.div == 1 ? "" : str("/", f.div), " times the input's rows");
}

// The sum of the values, in list order.
Value sum_of(std::vector<Value> all) {
  auto sum = std::make_shared<Lazy>();
  sum->cols = all[0]->cols;
  sum->make = [all = std::move(all)](Assembly& a, const ColumnMap& m) {
    Expr e = a.at(all[0], m);
    for (size_t i = 1; i < all.size(); ++i) e = e + a.at(all[i], m);
    return e;
  };
  return sum;
}

}  // namespace

void Extras::add(OpState& state, const Op& op, size_t outputs, bool needs_input) {
  const size_t inputs = state.extras.size();
  require(op.reads.size() <= inputs, state.name, ": it reads ", op.reads.size(),
          " channels, but has ", inputs, " extra inputs; take '<' away");
  require(op.writes.size() <= outputs, state.name, ": it writes ", op.writes.size(),
          " channels, but has ", outputs, " extra outputs; take '>' away");
  for (size_t k = 0; k < inputs; ++k) {
    const bool column = state.extras[k].kind == ExtraSchema::Kind::column;
    if (k < op.reads.size())
      read_channel(state, op.reads[k], column);
    else
      read_input(state, column);
  }
  for (size_t k = 0; k < outputs; ++k) {
    if (k < op.writes.size())
      write_channel(state, op.writes[k], needs_input);
    else
      write_output(state, needs_input);
  }
}

void Extras::read_channel(OpState& state, const std::string& channel, bool column) {
  const auto it = channels_.find(channel);
  require(it != channels_.end(), state.name, ": nothing before it writes the channel '", channel,
          "'; add make_extra_output>", channel);
  require(!column, state.name,
          ": its extra input is one number a row; channels carry whole tensors");
  Channel& c = it->second;
  require(c.writer->cols == state.cols && c.writer->rows == state.rows, state.name,
          ": the channel '", channel, "' has ", c.writer->cols, " columns and ",
          text_of(c.writer->rows), ", its input ", state.cols, " and ", text_of(state.rows),
          "; they must be equal");
  ++c.readers;
  sources_[state.index].emplace_back([&c](Flow& flow) { return c.value->take(flow); });
  if (!c.needs_grad) {
    state.give_extra_grad.emplace_back();
    return;
  }
  state.give_extra_grad.emplace_back(
      [this, &c, name = str("d", channel, ".", state.name)](Flow& flow, const Value& v) {
        c.grads.push_back(std::make_shared<Tap>(planner_, flow, v, name, 1));
      });
}

void Extras::read_input(OpState& state, bool column) {
  const PlanRequest& r = planner_.request();
  GradRequest grad;
  if (inputs_ < r.extra_grads.size()) grad = r.extra_grads[inputs_];
  DType dtype = r.dtype;
  if (inputs_ < r.extra_dtypes.size()) dtype = r.extra_dtypes[inputs_].value_or(dtype);
  const std::string name = str("extra", inputs_++);
  const int64_t width = column ? 1 : state.cols;
  const StoredTensor& p = planner_.tensor(name, Role::extra_in, Operand(dtype), width, state.rows);
  sources_[state.index].emplace_back([&p](Flow&) { return in_memory(p); });
  if (!r.backward || !grad.wanted) {
    state.give_extra_grad.emplace_back();
    return;
  }
  require(!grad.accumulate || !column, state.name, ": the gradient of ", name,
          " is a sum over a row, which is not added to what is there; give it memory of its own");
  const StoredTensor& to = planner_.tensor("d" + name, Role::grad,
                                           Operand(grad.dtype.value_or(dtype)), width, state.rows);
  state.give_extra_grad.push_back(gradient_into(to, grad.accumulate, column));
}

Extras::Gradient Extras::gradient_into(const StoredTensor& to, bool accumulate, bool column) const {
  if (column)
    return [&to](Flow& flow, const Value& v) {
      flow.side([&to, v](Assembly& a) { a.store_row_sum(to, a.at(v, {})); });
    };
  return [&planner = planner_, &to, accumulate](Flow& flow, const Value& v) {
    if (!accumulate && v->stored && planner.shares(to, *v->stored)) return;
    flow.store(accumulate ? sum_of({in_memory(to), v}) : v, to);
  };
}

void Extras::write_channel(OpState& state, const std::string& channel, bool needs_input) {
  require(!channels_.contains(channel), state.name, ": the channel '", channel,
          "' is written already; give it another name");
  Channel& c = channels_[channel];
  c.writer = &state;
  c.needs_grad = needs_input;
  state.give_extra.emplace_back([this, &c, channel](Flow& flow, const Value& v) {
    c.value = std::make_shared<Tap>(planner_, flow, v, channel, c.readers);
  });
  // The backward pass visits the readers in reverse order: the last reader comes first.
  state.take_extra_grad.emplace_back([&c](Flow& flow) -> Value {
    if (c.grads.empty()) return nullptr;
    std::vector<Value> all;
    for (const auto& tap : c.grads) all.push_back(tap->take(flow));
    return sum_of(std::move(all));
  });
}

void Extras::write_output(OpState& state, bool needs_input) {
  const Operand plain(planner_.request().dtype);
  const std::string name = str("extra_out", outputs_++);
  const StoredTensor& out = planner_.tensor(name, Role::extra_out, plain, state.cols, state.rows);
  state.give_extra.emplace_back([this, &out](Flow& flow, const Value& v) {
    if (!v->stored || !planner_.shares(out, *v->stored)) flow.store(v, out);
  });
  if (!needs_input) {
    state.take_extra_grad.emplace_back([](Flow&) -> Value { return nullptr; });
    return;
  }
  const StoredTensor& g = planner_.tensor("d" + name, Role::input, plain, state.cols, state.rows);
  state.take_extra_grad.emplace_back([&g](Flow&) { return in_memory(g); });
}

void Extras::take(OpState& state, Flow& flow) const {
  if (const auto it = sources_.find(state.index); it != sources_.end())
    for (const auto& source : it->second) state.extra_in.push_back(source(flow));
}

void Extras::check_channels(const std::function<void(size_t op)>& at) const {
  for (const auto& [name, c] : channels_) {
    at(c.writer->index);
    require(c.readers > 0, c.writer->name, ": nothing after it reads the channel '", name,
            "'; read it with '<', or take '>' away to give it to the caller");
  }
}

}  // namespace tenon
