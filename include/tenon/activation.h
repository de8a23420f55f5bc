// Activations as data: a name, inputs, parameters and a formula. One registry serves everyone.
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

// A kernel argument with a name; any value in [least, most] is accepted, never NaN.
struct Parameter {
  std::string name;
  float value = 0;
  float least = -std::numeric_limits<float>::infinity();
  float most = std::numeric_limits<float>::infinity();
};

// What a body is called with: x for one input, a (activated half) and b (linear half) for two.
struct Args {
  Expr x, a, b;
  std::span<const Parameter> parameters;
  std::span<const Expr> values;

  Expr operator[](std::string_view parameter) const;
};

// The formula as a function of expressions. Copies are known to be equal, so that calls with the
// same activation build its kernels once.
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
  bool scaled = false;  // the result is multiplied by a column vector s, one number a row
};

// `text` is a registered name or alias, with parameters as in `elu(alpha=0.5)`, or `gated(…)`,
// `scaled(…)`, or a formula. Parameters keep their defaults unless given.
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

// A new name, from a formula text or a function of expressions. A name of one's own may be defined
// again; built-in names and words may not.
void define(const std::string& name, std::string_view formula);
void define(Activation activation);

// The text with the contents of each name that was defined, as `soft_step@0f1e…`: it means the same
// after the name is defined again, and nothing else in another process.
std::string pinned(std::string_view text);

// All registered activations, built-in ones first.
std::vector<std::string> activation_names();

// The formula applied to expressions of one graph: the inputs, then the parameters' values.
Expr call(const Activation& f, std::span<const Expr> inputs, std::span<const Expr> parameters);

}  // namespace tenon

#pragma GCC visibility pop

#endif
