// Every activation, one row each: name, inputs, parameters, formula. All other code is derived.
#include "expr/registry.h"

namespace tenon {

namespace {

constexpr float kAboveZero = std::numeric_limits<float>::denorm_min();
constexpr float kFinite = std::numeric_limits<float>::max();

// v·f(u) with v = max(x, −c) and u = min(v, c). Beyond c the factor is 0 or 1 in fp32. The clamp
// avoids the product of an infinity and 0.
template <class F>
Expr bounded(Expr x, float c, F f) {
  const Expr v = max(x, -c);
  const Expr u = min(v, c);
  return v * f(u);
}

Expr gelu(Expr x) {
  return bounded(x, 12, [](Expr u) { return sigmoid(1.5957691F * (u + 0.044715F * (u * u * u))); });
}
Expr gelu_erf(Expr x) {
  const Expr v = max(x, -15.0F);
  return 0.5F * v * erfc(-0.70710678F * min(v, 15.0F));
}
Expr silu(Expr x) {
  return bounded(x, 128, [](Expr u) { return sigmoid(u); });
}
Expr qgelu(Expr x) {
  return bounded(x, 128, [](Expr u) { return sigmoid(1.702F * u); });
}
Expr relu(Expr x) { return max(0.0F, x); }
Expr srelu(Expr x) { return relu(x) * relu(x); }
Expr softplus(Expr x) { return select(x > 20.0F, x, log1p(exp(min(x, 20.0F)))); }
Expr mish(Expr x) {
  return bounded(x, 128, [](Expr u) { return tanh(softplus(u)); });
}
Expr hardswish(Expr x) { return max(x, -3.0F) * ((clamp(x, -3.0F, 3.0F) + 3.0F) / 6.0F); }
Expr elu(Expr x, Expr alpha) { return select(x > 0.0F, x, alpha * expm1(min(x, 0.0F))); }
Expr clamped_swiglu(Expr a, Expr b, Expr limit, Expr alpha, Expr offset) {
  const Expr w = max(min(a, limit), -128.0F / alpha);
  return w * sigmoid(alpha * w) * (clamp(b, -limit, limit) + offset);
}
Expr situglu(Expr a, Expr b, Expr beta1, Expr beta2) {
  return beta1 * tanh(a / beta1) * sigmoid(a) * (beta2 * tanh(b / beta2));
}

}  // namespace

std::span<const Activation> built_in_activations() {
  // clang-format off
  // Never destroyed: hosts may call from their static destructors.
  static const auto& kRows = *new std::vector<Activation>{
      {"gelu", 1, {}, [](const Args& in) { return gelu(in.x); }},
      {"gelu_erf", 1, {}, [](const Args& in) { return gelu_erf(in.x); }},
      {"silu", 1, {}, [](const Args& in) { return silu(in.x); }},
      {"qgelu", 1, {}, [](const Args& in) { return qgelu(in.x); }, {"quick_gelu"}},
      {"relu", 1, {}, [](const Args& in) { return relu(in.x); }},
      {"srelu", 1, {}, [](const Args& in) { return srelu(in.x); }, {"squared_relu"}},
      {"sigmoid", 1, {}, [](const Args& in) { return sigmoid(in.x); }},
      {"tanh", 1, {}, [](const Args& in) { return tanh(in.x); }},
      {"softplus", 1, {}, [](const Args& in) { return softplus(in.x); }},
      {"mish", 1, {}, [](const Args& in) { return mish(in.x); }},
      {"hardswish", 1, {}, [](const Args& in) { return hardswish(in.x); }},
      {"leaky_relu", 1, {{"slope", 0.01F}}, [](const Args& in) { return select(in.x > 0.0F, in.x, in["slope"] * in.x); }},
      {"elu", 1, {{"alpha", 1}}, [](const Args& in) { return elu(in.x, in["alpha"]); }},
      {"glu", 2, {}, [](const Args& in) { return sigmoid(in.a) * in.b; }},
      {"geglu", 2, {}, [](const Args& in) { return gelu(in.a) * in.b; }},
      {"geglu_erf", 2, {}, [](const Args& in) { return gelu_erf(in.a) * in.b; }},
      {"swiglu", 2, {}, [](const Args& in) { return silu(in.a) * in.b; }},
      {"reglu", 2, {}, [](const Args& in) { return relu(in.a) * in.b; }},
      {"qgeglu", 2, {}, [](const Args& in) { return qgelu(in.a) * in.b; }},
      {"sreglu", 2, {}, [](const Args& in) { return srelu(in.a) * in.b; }},
      {"clamped_swiglu", 2, {{"limit", 7, kAboveZero}, {"alpha", 1.702F, 0x1p-100F, kFinite}, {"offset", 1}},
       [](const Args& in) { return clamped_swiglu(in.a, in.b, in["limit"], in["alpha"], in["offset"]); }},
      {"situglu", 2, {{"beta1", 4, kAboveZero, kFinite}, {"beta2", 25, kAboveZero, kFinite}},
       [](const Args& in) { return situglu(in.a, in.b, in["beta1"], in["beta2"]); }},
  };
  // clang-format on
  return kRows;
}

}  // namespace tenon
