// The C++ API: activations, fused functions and their gradients on matrices in memory.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/activation.h"
#include "tenon/dtype.h"
#include "tenon/error.h"
#include "tenon/expr.h"
#include "tenon/format.h"
#include "tenon/options.h"
#include "tenon/view.h"

#pragma GCC visibility push(default)

namespace tenon {

const char* version();

// y = f(x + bias)·scale. Tensors are plain matrices or encoded in any format. Optional tensors that
// are not given are ignored. Plain dtypes can be mixed.
struct Forward {
  Tensor x;         // [M, K]; for a gated f [M, 2H] in `layout`, or a alone, [M, H], with b
  Tensor b = {};    // the linear half, if it is a separate tensor
  View bias = {};   // [1, K], or [1, 2H] in the layout of x; with b given: a's H columns first
  View scale = {};  // [M, 1], for scaled(f)
  Tensor y = {};    // [M, K] or [M, H]; a plain y may be the same memory as x (or a, or b)
  View amax = {};   // [1, 1] f32: the largest |y| before rounding; may be the only output
  Layout layout = {};
};
void forward(const Activation& f, const Forward& call, const Options& options = {});

// dx = grad·f'(x + bias)·scale in the layout of x. At least one output must be given.
struct Backward {
  Tensor grad;  // [M, K] or [M, H]
  Tensor x;     // as in the forward call
  Tensor b = {};
  View bias = {}, scale = {};
  Tensor dx = {};    // like x; if plain, may be the memory of x, or of grad with equal shapes
  Tensor db = {};    // like b
  View dbias = {};   // like bias: column sums of dx
  View dscale = {};  // like scale: row sums of grad·f(x + bias)
  View amax = {};    // [1, 1] f32: the largest |dx|, db included
  Layout layout = {};
};
void backward(const Activation& f, const Backward& call, const Options& options = {});

// y = x in another encoding: quantises, dequantises, or both in one pass. If x has two encodings,
// the rowwise one is read.
struct Quantize {
  Tensor x, y = {};
  View dbias = {};  // [1, K]: column sums of x, if x is a gradient
  View amax = {};   // [1, 1] f32: the largest |x|
};
void quantize(const Quantize& call, const Options& options = {});
inline void quantize(const Tensor& x, const Tensor& y, const Options& options = {}) {
  quantize(Quantize{.x = x, .y = y}, options);
}
inline void dequantize(const Tensor& x, const View& y, const Options& options = {}) {
  quantize(Quantize{.x = x, .y = y}, options);
}

// The update of delayed scaling for n tensors: history [L, n] and scale [1, n], both f32. Row 0 of
// the history holds the amaxes since the last update. The update moves row 0 to the end and the
// older rows up by one. Then it computes the scales from the largest finite amax.
struct DelayedUpdate {
  View history, scale;
  DType dtype = DType::e4m3;
  int margin = 0;            // scales are 2^margin smaller
  bool most_recent = false;  // use row 0 alone
};
void update(const DelayedUpdate& call, const Options& options = {});

// The state of the random stream, in memory that the device can access. Element (r, c) of a call is
// element (row0 + r, col0 + c) of a tensor of `columns` columns. So a shard or a tile draws the
// same values as the whole tensor.
struct Random {
  uint64_t seed = 0, offset = 0, row0 = 0, col0 = 0, columns = 0;
};

// y = residual + dropout(x + bias). bias [1, K] and residual [M, K] are optional. An element is
// kept with probability 1 − p and then divided by 1 − p. In training a call increments
// random->offset by one. In evaluation nothing is dropped and `random` is not needed.
struct BiasDropoutAdd {
  View x, bias = {}, residual = {}, y;
  double p = 0;
  bool training = true;
  Random* random = nullptr;
};
void bias_dropout_add(const BiasDropoutAdd& call, const Options& options = {});

// Computes the gradients that are given. dx is like x. `eager` rounds to the dtype of dx, or of
// grad if dx is not given. `random` is a copy of the state from before the forward call.
struct BiasDropoutAddBackward {
  View grad, dx = {}, dbias = {}, dresidual = {};
  double p = 0;
  bool training = true;
  const Random* random = nullptr;
};
void bias_dropout_add_backward(const BiasDropoutAddBackward& call, const Options& options = {});

// bias_dropout_add with training fixed.
inline auto get_bias_dropout_add(bool training) {
  return [training](BiasDropoutAdd call, const Options& options = {}) {
    call.training = training;
    bias_dropout_add(call, options);
  };
}

// A function of expressions with a derived backward pass, compiled at the first call for its
// dtypes. An argument is a matrix [M, K], a row [1, K], a column [M, 1] or a scalar [1, 1]. The
// gradient of a broadcast argument is the sum over the broadcast dimensions.
class Fused {
 public:
  using Body = std::function<Expr(std::span<const Expr>)>;

  // The body gets the arguments, then the parameters. Parameters are kernel arguments of every
  // call.
  Fused(std::string name, size_t arguments, Body body, std::vector<float> parameters = {});

  void forward(std::span<const View> arguments, const View& y, const Options& options = {}) const;
  void forward(std::initializer_list<View> arguments, const View& y,
               const Options& options = {}) const {
    forward(std::span(arguments.begin(), arguments.size()), y, options);
  }

  // gradients[i] is like arguments[i]. An empty View is not computed.
  void backward(std::span<const View> arguments, const View& grad, std::span<const View> gradients,
                const Options& options = {}) const;
  void backward(std::initializer_list<View> arguments, const View& grad,
                std::initializer_list<View> gradients, const Options& options = {}) const {
    backward(std::span(arguments.begin(), arguments.size()), grad,
             std::span(gradients.begin(), gradients.size()), options);
  }

  // Makes the kernels for these dtypes and shapes before the first call. Data may be null.
  void warmup(std::span<const View> arguments, const View& y, const Options& options = {}) const;

  [[nodiscard]] size_t arguments() const { return arguments_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::vector<float>& parameters() const { return parameters_; }

 private:
  std::string name_;
  size_t arguments_;
  std::shared_ptr<const Body> body_;  // copies share their kernels
  std::vector<float> parameters_;
};

namespace detail {
template <class F, size_t... i>
Fused fuse_n(std::string name, F f, std::index_sequence<i...>) {
  return {std::move(name), sizeof...(i), [f](std::span<const Expr> in) { return f(in[i]...); }};
}
template <class>
struct ArityOf;
template <class C, class... A>
struct ArityOf<Expr (C::*)(A...) const> {
  static constexpr size_t kValue = sizeof...(A);
};
template <class... A>
struct ArityOf<Expr (*)(A...)> {
  static constexpr size_t kValue = sizeof...(A);
};
}  // namespace detail

// fuse([](Expr x, Expr bias) { return … ; })
template <class F>
Fused fuse(F f, std::string name = "fused") {
  if constexpr (requires { &F::operator(); })
    return detail::fuse_n(
        std::move(name), f,
        std::make_index_sequence<detail::ArityOf<decltype(&F::operator())>::kValue>{});
  else
    return detail::fuse_n(std::move(name), f,
                          std::make_index_sequence<detail::ArityOf<F>::kValue>{});
}

// Makes a function from a formula text. `arguments` names the inputs in call order.
Fused fuse_text(std::string_view formula, std::span<const std::string> arguments);

// Runs a function by name. For every unary activation `act`:
//   act(x → y)   bias_act(x, bias → y)   dact(grad, x → dx)   bgrad_dact(grad, x, bias → dbias, dx)
// and l2normalization(x → y), l2normalization_fwd(x → y, r), l2normalization_bwd(grad, x, r → dx).
void run(std::string_view name, std::span<const View> in, std::span<const View> out,
         const Options& options = {});
inline void run(std::string_view name, std::initializer_list<View> in,
                std::initializer_list<View> out, const Options& options = {}) {
  run(name, std::span(in.begin(), in.size()), std::span(out.begin(), out.size()), options);
}

// y = x·r with r = rsqrt(Σ x² + eps), one value per row. r, if given, is [M, 1] f32.
void l2_normalization(const View& x, const View& y, const View& r = {}, float eps = 1e-6F,
                      const Options& options = {});
// dx = r·(grad − x·r²·Σ x·grad).
void l2_normalization_backward(const View& grad, const View& x, const View& r, const View& dx,
                               const Options& options = {});

// The formula as it is evaluated, on one line. Shared parts t1, t2, … come first.
std::string formula(const Activation& f);

// Formula, derivative, error bound and code of an activation, as text.
std::string show(const Activation& f, bool backward = false);

// Threads of the CPU backend: TENON_THREADS, else OMP_NUM_THREADS, else the number of cores. 0
// restores this default.
void set_threads(int count);
int threads();

// Replaces the thread pool by a scheduler of the host. It must call body on ranges that cover [0,
// n) once, on any threads, and return when all are done. An empty function restores the pool.
using ParallelFor =
    std::function<void(int64_t n, const std::function<void(int64_t begin, int64_t end)>& body)>;
void set_parallel_for(ParallelFor replacement);

}  // namespace tenon

#pragma GCC visibility pop

#endif
