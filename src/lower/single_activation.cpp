// An activation with its bias and scale as one call.
#include "lower/single_activation.h"

#include "lazy/halves.h"
#include "lower/call.h"
#include "ops/formulas.h"

namespace tenon {

namespace {

using A = ActivationArgs;

// The ops are an optional bias and the activation. The value is x, or the halves a and b.
class ActivationCall {
 public:
  ActivationCall(const Activation& f, const ActivationForm& form)
      : f_(f),
        form_(form),
        wide_(f.inputs == 2 ? 2 * form.cols : form.cols),
        layout_(form.separate ? Layout{} : form.layout),
        call_({.name = f.name + (form.backward ? ".bwd" : "") + (form.amax_only ? ".amax" : ""),
               .dtype = form.x.chain(),
               .precision = form.precision,
               .rounding = form.rounding}) {
    OpState& bias = call_.op(wide_, wide_);
    const bool sums = form.dbias && !form.amax_only;
    Call::parameter(bias, form.bias ? &call_.in(*form.bias, A::bias, wide_) : nullptr,
                    sums ? &call_.out(*form.dbias, A::dbias, wide_) : nullptr);
    bias_ = &bias;
    if (form.bias) stages_.push_back(&call_.extend(bias, Elementwise{bias_formula()}));
    OpState& act = call_.op(wide_, form.cols);
    if (f.scaled) add_scale(act);
    std::vector<float> numbers;
    for (size_t i = 0; i < f.parameters.size(); ++i) numbers.push_back(Call::numbered(i));
    Elementwise e{activation_formula(f, numbers)};
    if (f.inputs == 2) e.halves = layout_;
    stages_.push_back(&call_.extend(act, e));
  }

  Step run() {
    Flow forward(call_, Pass::forward);
    forward.begin(input());
    for (Stage* s : stages_) s->forward(forward);
    if (form_.backward) {
      Flow backward(call_, Pass::backward);
      backward.begin(call_.in(*form_.grad, A::grad, form_.cols));
      run_backward(backward);
    } else {
      const Value y = forward.value();
      if (form_.y) store(forward, *form_.y, false, y, {});
      if (form_.amax && !form_.amax_only) store_whole_amax(forward, y);
      forward.finish();
    }
    return call_.step();
  }

 private:
  void add_scale(OpState& act) {
    act.extras = {{.name = "scale", .kind = ExtraSchema::Kind::column}};
    act.extra_in = {in_memory(call_.in(*form_.scale, A::scale, 1))};
    act.give_extra_grad.resize(1);
    if (!form_.dscale || form_.amax_only) return;
    const StoredTensor& to = call_.out(*form_.dscale, A::dscale, 1);
    act.give_extra_grad[0] = [&to](Flow& flow, const Value& v) {
      flow.side([&to, v](Assembly& a) { a.store_row_sum(to, a.at(v, {})); });
    };
  }

  // Two tensors are treated as the halves of one tensor that does not exist in memory.
  Value input() {
    const StoredTensor& x = call_.in(form_.x, A::x, form_.separate ? form_.cols : wide_);
    if (!form_.separate) return in_memory(x);
    const StoredTensor& b = call_.in(*form_.b, A::b, form_.cols);
    auto both = std::make_shared<Lazy>();
    both->cols = wide_;
    both->make = [&x, &b, first = halves(layout_, form_.cols)[0]](Assembly& a, const ColumnMap& m) {
      return a.load(m == first ? x : b, {});
    };
    return both;
  }

  void run_backward(Flow& flow) {
    stages_.back()->backward(flow, true);
    if (bias_->parameters[0].grad)
      sum_into(call_, flow, bias_->index, bias_->parameters[0], flow.value(), false);
    const Value d = flow.value();
    if (form_.separate) {
      const std::array<ColumnMap, 2> half = halves(layout_, form_.cols);
      if (form_.y) store(flow, *form_.y, false, d, half[0]);
      if (form_.db) store(flow, *form_.db, true, d, half[1]);
    } else if (form_.y) {
      store(flow, *form_.y, false, d, {});
    }
    if (form_.amax && !form_.amax_only) store_whole_amax(flow, d);
    flow.finish();
  }

  // Stores a tensor, its amax if it has one scale, or only the amax. `half`: which half of a value
  // with two halves the tensor holds.
  void store(Flow& flow, const Operand& o, bool second, const Value& v,
             const std::optional<ColumnMap>& half) {
    const StoredTensor& to = call_.out(o, second ? A::db : A::y, half ? form_.cols : v->cols,
                                       second ? A::db_scale : A::y_scale);
    const bool amax = second ? form_.db_amax : form_.y_amax;
    flow.side([this, &flow, &to, v, half, amax, second](Assembly& a) {
      const Pieces pieces = half ? Pieces{{a.at(v, *half), {}}} : flow.pieces(a, v);
      if (!form_.amax_only) a.store(to, pieces);
      if (amax)
        store_amax(a, second ? A::db_amax : A::y_amax, pieces,
                   info(to.operand.format.scaling).scale_given);
    });
  }
  void store_whole_amax(Flow& flow, const Value& v) {
    flow.side([&flow, v](Assembly& a) { store_amax(a, A::amax, flow.pieces(a, v), false); });
  }

  const Activation& f_;
  const ActivationForm& form_;
  int64_t wide_;  // columns of the activation's input
  Layout layout_;
  Call call_;
  OpState* bias_ = nullptr;
  std::vector<Stage*> stages_;
};

}  // namespace

Step activation_step(const Activation& f, const ActivationForm& form) {
  return ActivationCall(f, form).run();
}

Key key(const Activation& f, const ActivationForm& form) {
  Key key('a');
  for (const Parameter& p : f.parameters) key.add(p.name);
  key.add(f.inputs).add(form.cols).add(form.layout.kind).add(form.layout.k);
  key.flags(f.scaled, form.backward, form.separate, form.y_amax, form.db_amax, form.amax_only);
  key.add(form.precision).add(form.rounding).add(form.x);
  key.add(form.b).add(form.grad).add(form.y).add(form.db);
  key.add(form.bias).add(form.scale).add(form.dbias).add(form.dscale).add(form.amax);
  return key;
}

}  // namespace tenon
