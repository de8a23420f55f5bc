// Any function of expressions as one call. Its arguments are row vectors and extra inputs of one
// op.
#include "lower/single_fuse.h"

#include "lower/call.h"

namespace tenon {

namespace {

ExtraSchema::Kind kind_of(Load::From from) {
  return from == Load::From::column   ? ExtraSchema::Kind::column
         : from == Load::From::scalar ? ExtraSchema::Kind::scalar
                                      : ExtraSchema::Kind::tensor;
}

void give(Flow& flow, ExtraSchema::Kind kind, const StoredTensor& to, const Value& v) {
  flow.side([&flow, kind, &to, v](Assembly& a) {
    if (kind == ExtraSchema::Kind::column)
      a.store_row_sum(to, a.at(v, {}));
    else if (kind == ExtraSchema::Kind::scalar)
      a.store_sum(to, a.at(v, {}));
    else
      a.store(to, flow.pieces(a, v));
  });
}

class FuseCall {
 public:
  explicit FuseCall(const FuseForm& form)
      : form_(form),
        call_({.name = form.name + (form.grad ? ".bwd" : ""),
               .dtype = form.arguments.empty() ? form.y : form.arguments[0].dtype,
               .precision = form.precision,
               .rounding = form.rounding}),
        op_(call_.op(form.cols, form.cols)) {
    for (uint32_t i = 0; i < form.arguments.size(); ++i) add(form.arguments[i], i);
    stage_ = &call_.extend(
        op_, Elementwise{[this](Element& e, std::span<const Expr>) {
          std::vector<Expr> in;
          size_t rows = 0, extras = 0;
          for (const FuseForm::Argument& a : form_.arguments)
            in.push_back(a.from == Load::From::row ? e.parameter(rows++) : e.extra(extras++));
          for (size_t i = 0; i < form_.parameters; ++i) in.push_back(e.constant(Call::numbered(i)));
          return form_.f(in);
        }});
  }

  Step run() {
    Flow forward(call_, Pass::forward);
    forward.begin(nothing());
    stage_->forward(forward);
    if (!form_.grad) {
      forward.close(call_.out(form_.y, 0, form_.cols));
      return call_.step();
    }
    Flow backward(call_, Pass::backward);
    const auto seed = static_cast<uint32_t>(form_.arguments.size());
    backward.begin(call_.in(*form_.grad, seed, form_.cols));
    stage_->first = false;  // gradients of arguments are not rounded before they are stored
    stage_->backward(backward, false);
    backward.finish();
    return call_.step();
  }

 private:
  void add(const FuseForm::Argument& a, uint32_t view) {
    const ExtraSchema::Kind kind = kind_of(a.from);
    const int64_t cols = kind == ExtraSchema::Kind::tensor ? form_.cols : 1;
    const StoredTensor& value = call_.in(a.dtype, view, cols);
    const StoredTensor* grad = a.gradient ? &call_.out(*a.gradient, view, cols) : nullptr;
    if (a.from == Load::From::row) return Call::parameter(op_, &value, grad);
    op_.extras.push_back({.name = "argument", .kind = kind});
    op_.extra_in.push_back(in_memory(value));
    op_.give_extra_grad.emplace_back();
    if (grad)
      op_.give_extra_grad.back() = [kind, grad](Flow& flow, const Value& v) {
        give(flow, kind, *grad, v);
      };
  }
  // The input value of the op. The function never reads it: it reads only its arguments.
  [[nodiscard]] Value nothing() const {
    auto lazy = std::make_shared<Lazy>();
    lazy->cols = form_.cols;
    lazy->make = [](Assembly& a, const ColumnMap&) { return a.hole(); };
    return lazy;
  }

  const FuseForm& form_;
  Call call_;
  OpState& op_;
  Stage* stage_ = nullptr;
};

}  // namespace

Step fuse_step(const FuseForm& form) { return FuseCall(form).run(); }

Key key(const FuseForm& form) {
  Key key('f');
  for (const FuseForm::Argument& a : form.arguments) key.add(a.from).add(a.dtype).add(a.gradient);
  key.add(form.parameters).add(form.grad).add(form.y).add(form.cols);
  key.add(form.precision).add(form.rounding);
  return key;
}

}  // namespace tenon
