// bias, dropout and add as one call.
#include "lower/single_dropout.h"

#include "lower/call.h"
#include "ops/formulas.h"

namespace tenon {

namespace {

class DropoutCall {
 public:
  DropoutCall(const DropoutForm& form, bool backward)
      : form_(form),
        call_({.name = std::string(form.training ? "bias_dropout_add" : "bias_add") +
                       (backward ? ".bwd" : ""),
               .dtype = form.chain,
               .precision = form.precision,
               .rounding = form.rounding}) {
    const int64_t n = form.cols;
    if (form.bias) {
      OpState& bias = call_.op(n, n);
      const StoredTensor& b = backward ? call_.out(*form.bias, 1, n) : call_.in(*form.bias, 1, n);
      Call::parameter(bias, backward ? nullptr : &b, backward ? &b : nullptr);
      stages_.push_back(&call_.extend(bias, Elementwise{bias_formula()}));
    }
    if (form.training) {
      const DropoutRule numbers{Call::numbered(0), Call::numbered(1)};
      stages_.push_back(&call_.extend(call_.op(n, n), Elementwise{dropout_formula(numbers)}));
    }
    if (form.residual) {
      OpState& add = call_.op(n, n);
      add.extras = {{.name = "residual"}};
      add.give_extra_grad.resize(1);
      if (backward) {
        const StoredTensor& to = call_.out(*form.residual, 2, n);
        add.give_extra_grad[0] = [&to](Flow& flow, const Value& v) {
          flow.side([&flow, &to, v](Assembly& a) { a.store(to, flow.pieces(a, v)); });
        };
      } else {
        add.extra_in = {in_memory(call_.in(*form.residual, 2, n))};
      }
      stages_.push_back(&call_.extend(add, Elementwise{add_formula()}));
    }
  }

  Step forward() {
    Flow flow(call_, Pass::forward);
    flow.begin(call_.in(form_.x, 0, form_.cols));
    for (Stage* s : stages_) s->forward(flow);
    flow.close(call_.out(*form_.y, 0, form_.cols));
    return call_.step();
  }

  Step backward() {
    Flow flow(call_, Pass::backward);
    flow.begin(call_.in(form_.x, 0, form_.cols));
    // In evaluation, dropout passes the gradient through. `eager` still rounds it.
    if (!form_.training && form_.rounding == Rounding::eager) rounds_ = true;
    for (size_t i = stages_.size(); i-- > 0;) {
      if (i == 0 && form_.bias) round(flow);
      stages_[i]->backward(flow, form_.y || form_.bias);
    }
    if (!form_.bias) round(flow);
    if (form_.y)
      flow.close(call_.out(*form_.y, 0, form_.cols));
    else
      flow.finish();
    return call_.step();
  }

 private:
  void round(Flow& flow) const {
    if (!rounds_) return;
    flow.apply([dtype = form_.chain](Assembly&, Expr e, const ColumnMap&) {
      return tenon::round(e, dtype);
    });
  }

  const DropoutForm& form_;
  Call call_;
  std::vector<Stage*> stages_;
  bool rounds_ = false;
};

}  // namespace

Step dropout_step(const DropoutForm& form) { return DropoutCall(form, false).forward(); }
Step dropout_backward_step(const DropoutForm& form) { return DropoutCall(form, true).backward(); }

Key key(const DropoutForm& form, bool backward) {
  Key key('d');
  key.add(backward).add(form.training).add(form.cols).add(form.precision).add(form.rounding);
  key.add(form.chain).add(form.x).add(form.bias).add(form.residual).add(form.y);
  return key;
}

}  // namespace tenon
