// Activations as data: a name, inputs, parameters and a formula. All front ends use one registry.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tenon/expr.h"

#pragma GCC visibility push(default)

namespace tenon {

// A kernel argument with a name. Accepts any value in [least, most], never NaN.
struct Parameter {
  std::string name;
  float value = 0;
  float least = -std::numeric_limits<float>::infinity();
  float most = std::numeric_limits<float>::infinity();
};

// The arguments of a body: x for one input; a (activated half) and b (linear half) for two.
struct Args {
  Expr x, a, b;
  std::span<const Parameter> parameters;
  std::span<const Expr> values;

  Expr operator[](std::string_view parameter) const;
};

// The formula as a function of expressions. Copies compare equal, so calls with the same activation
// build its kernels once.
class Body {
 public:
  Body() = default;
  template <class F>
  requires(std::is_invocable_r_v<Expr, const F&, const Args&> && !std::is_same_v<F, Body>)
      Body(F f)  // NOLINT: a function is a body
      : function_(std::make_shared<const std::function<Expr(const Args&)>>(std::move(f))) {}

  Expr operator()(const Args& args) const { return (*function_)(args); }
  explicit operator bool() const { return function_ && *function_; }
  [[nodiscard]] std::shared_ptr<const void> identity() const { return function_; }

 private:
  std::shared_ptr<const std::function<Expr(const Args&)>> function_;
};

struct Activation {
  std::string name = {};
  int inputs = 1;
  std::vector<Parameter> parameters = {};
  Body body = {};
  std::vector<std::string> aliases = {};
  bool scaled = false;  // the result is multiplied by a column vector s, one value per row
};

// `text` is one of: a registered name or alias, a name with parameters as in `elu(alpha=0.5)`,
// `gated(…)`, `scaled(…)`, or a formula. Parameters that are not given keep their defaults.
Activation activation(std::string_view text,
                      std::span<const std::pair<std::string, float>> parameters = {});
inline Activation activation(std::string_view text,
                             std::initializer_list<std::pair<std::string, float>> parameters) {
  return activation(text, std::span(parameters.begin(), parameters.size()));
}

// f(a)·b for a unary f.
Activation gated(const Activation& f);
// f(…)·s[row].
Activation scaled(const Activation& f);

// Defines a name by a formula text or by a function of expressions. User names may be redefined.
// Built-in names and words may not.
void define(const std::string& name, std::string_view formula);
void define(Activation activation);

// The text with each user-defined name replaced by name and contents, as in `soft_step@0f1e…`. Its
// meaning does not change if the name is redefined. A process without that definition rejects it.
std::string pinned(std::string_view text);

// All registered activations, built-in ones first.
std::vector<std::string> activation_names();

// Applies the formula to expressions of one graph: the inputs, then the values of the parameters.
Expr call(const Activation& f, std::span<const Expr> inputs, std::span<const Expr> parameters);

}  // namespace tenon

#pragma GCC visibility pop

#endif
