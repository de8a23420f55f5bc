// A norm as one call, with an optional residual before it, its statistics, and an added gradient.
#include "lower/single_norm.h"

#include <array>
#include <string>

#include "lower/call.h"
#include "ops/formulas.h"

namespace tenon {

namespace {

using A = NormArgs;

constexpr std::array<std::string_view, 3> kNames{"layernorm", "rmsnorm", "l2norm"};

class NormCall {
 public:
  NormCall(const NormForm& form, std::string_view direction)
      : form_(form),
        call_({.name = std::string(kNames[static_cast<size_t>(form.kind)]) +
                       std::string(direction) + (form.amax_only ? ".amax" : ""),
               .dtype = form.x.chain(),
               .precision = form.precision,
               .rounding = form.rounding}),
        op_(call_.op(form.cols, form.cols)) {}

  Step forward() {
    Flow flow(call_, Pass::forward);
    flow.begin(call_.in(form_.x, A::x, form_.cols));
    if (form_.residual) add_residual(flow);
    Call::parameter(op_, form_.gamma ? &gamma() : nullptr, nullptr);
    Call::parameter(op_, form_.beta ? &call_.in(*form_.beta, A::beta, form_.cols) : nullptr,
                    nullptr);
    if (form_.mean && form_.kind == NormKind::layer && !form_.amax_only)
      op_.kept_mean = &call_.out(DType::f32, A::mean, 1);
    if (form_.rstdev && !form_.amax_only) op_.kept_rstdev = &call_.out(DType::f32, A::rstdev, 1);
    const Value x = flow.value();
    call_.extend(op_, norm()).forward(flow);
    store(flow);
    if (form_.sum && !form_.amax_only) {
      const StoredTensor& to = call_.out(*form_.sum, A::sum, form_.cols, A::sum_scale);
      flow.side([&flow, &to, x](Assembly& a) { a.store(to, flow.pieces(a, x)); });
    }
    flow.finish();
    return call_.step();
  }

  Step backward() {
    op_.kept_input = &call_.in(form_.x, A::x, form_.cols);
    op_.kept_rstdev = &call_.in(DType::f32, A::rstdev_in, 1);
    if (form_.kind == NormKind::layer) op_.kept_mean = &call_.in(DType::f32, A::mean_in, 1);
    const auto sum = [&](const std::optional<DType>& dtype, uint32_t view) {
      return dtype && !form_.amax_only ? &call_.out(*dtype, view, form_.cols) : nullptr;
    };
    Call::parameter(op_, form_.gamma ? &gamma() : nullptr, sum(form_.dgamma, A::dgamma));
    Call::parameter(op_, nullptr, sum(form_.dbeta, A::dbeta));
    Flow flow(call_, Pass::backward);
    flow.begin(call_.in(form_.grad, A::grad, form_.cols));
    call_.extend(op_, norm()).backward(flow, form_.y.has_value());
    if (form_.y && form_.added) add_gradient(flow);
    store(flow);
    flow.finish();
    return call_.step();
  }

 private:
  [[nodiscard]] Normalised norm() const {
    return {.kind = form_.kind,
            .eps = Call::numbered(0),
            .zero_centered_gamma = form_.zero_centered_gamma};
  }
  [[nodiscard]] const StoredTensor& gamma() { return call_.in(*form_.gamma, A::gamma, form_.cols); }

  void add_residual(Flow& flow) {
    OpState& add = call_.op(form_.cols, form_.cols);
    add.extras = {{.name = "residual"}};
    add.extra_in = {in_memory(call_.in(*form_.residual, A::residual, form_.cols))};
    add.give_extra_grad.resize(1);
    call_.extend(add, Elementwise{add_formula()}).forward(flow);
  }
  // The input of the norm has another reader. This adds the gradient from that reader.
  void add_gradient(Flow& flow) {
    OpState& shared = call_.op(form_.cols, form_.cols);
    const StoredTensor& other = call_.in(*form_.added, A::added, form_.cols);
    shared.take_extra_grad.emplace_back([&other](Flow&) { return in_memory(other); });
    call_.extend(shared, Shared{}).backward(flow, true);
  }

  void store(Flow& flow) {
    if (!form_.y) return;
    const StoredTensor& to = call_.out(*form_.y, A::y, form_.cols, A::y_scale);
    flow.side([this, &flow, &to, v = flow.value()](Assembly& a) {
      const Pieces pieces = flow.pieces(a, v);
      if (!form_.amax_only) a.store(to, pieces);
      if (form_.y_amax)
        store_amax(a, A::y_amax, pieces, info(to.operand.format.scaling).scale_given);
    });
  }

  const NormForm& form_;
  Call call_;
  OpState& op_;
};

}  // namespace

Step norm_step(const NormForm& form) { return NormCall(form, "").forward(); }
Step norm_backward_step(const NormForm& form) { return NormCall(form, ".bwd").backward(); }

Key key(const NormForm& form, bool backward) {
  Key key('n');
  key.add(backward).add(form.kind).add(form.cols).add(form.zero_centered_gamma);
  key.add(form.precision).add(form.rounding).add(form.x).add(form.residual);
  key.add(form.gamma).add(form.beta).add(form.y).add(form.sum).add(form.mean).add(form.rstdev);
  key.add(form.y_amax).add(form.amax_only).add(form.grad).add(form.added);
  key.add(form.dgamma).add(form.dbeta);
  return key;
}

}  // namespace tenon
