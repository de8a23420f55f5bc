// Every op of a chain in float64, forward and backward.
#include "support/reference.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "backend/cpu/pool.h"
#include "core/philox.h"
#include "expr/evaluate.h"
#include "lower/data.h"
#include "lower/stage.h"
#include "ops/activation.h"
#include "tenon/error.h"

namespace tenon::support {

namespace {

constexpr double kUnit = 0x1p-24;  // half an ulp of fp32 at 1

Matrix64 zeros(int64_t rows, int64_t cols) {
  return {rows, cols, std::vector<double>(static_cast<size_t>(rows * cols))};
}

Matrix64 transposed(const Matrix64& m) {
  Matrix64 t = zeros(m.cols, m.rows);
  for (int64_t r = 0; r < m.rows; ++r)
    for (int64_t c = 0; c < m.cols; ++c) t.row(c)[r] = m.row(r)[c];
  return t;
}

// a·b, four rows at once, so that a row of b is loaded once for them.
Matrix64 product(const Matrix64& a, const Matrix64& b) {
  constexpr int64_t kRows = 4, kDepth = 128;
  Matrix64 y = zeros(a.rows, b.cols);
  cpu::parallel_for(cdiv(a.rows, kRows), [&](int64_t begin, int64_t end) {
    for (int64_t k0 = 0; k0 < a.cols; k0 += kDepth)
      for (int64_t r = begin * kRows; r < std::min(end * kRows, a.rows); r += kRows) {
        const int64_t high = std::min(kRows, a.rows - r);
        for (int64_t k = k0; k < std::min(k0 + kDepth, a.cols); ++k) {
          const double* const from = b.row(k);
          if (high == kRows) {
            double* __restrict const y0 = y.row(r);
            double* __restrict const y1 = y.row(r + 1);
            double* __restrict const y2 = y.row(r + 2);
            double* __restrict const y3 = y.row(r + 3);
            const double a0 = a.row(r)[k], a1 = a.row(r + 1)[k];
            const double a2 = a.row(r + 2)[k], a3 = a.row(r + 3)[k];
            for (int64_t c = 0; c < b.cols; ++c) {
              y0[c] += a0 * from[c];
              y1[c] += a1 * from[c];
              y2[c] += a2 * from[c];
              y3[c] += a3 * from[c];
            }
            continue;
          }
          for (int64_t i = 0; i < high; ++i)
            for (int64_t c = 0; c < b.cols; ++c) y.row(r + i)[c] += a.row(r + i)[k] * from[c];
        }
      }
  });
  return y;
}

double root_mean_square(const double* v, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i)
    if (std::isfinite(v[i])) sum += v[i] * v[i];
  return n > 0 ? std::sqrt(sum / static_cast<double>(n)) : 0;
}
double root_mean_square(const Matrix64& m) {
  return root_mean_square(m.v.data(), static_cast<int64_t>(m.v.size()));
}

void add_to(Matrix64& to, const Matrix64& from) {
  if (to.v.empty()) to = zeros(from.rows, from.cols);
  for (size_t i = 0; i < from.v.size(); ++i) to.v[i] += from.v[i];
}

// A formula and its gradients at doubles. The oracle loads fp32, so a double is the sum of three.
class Formula {
 public:
  explicit Formula(const Activation& f) : inputs_(f.inputs) {
    for (int i = 0; i < inputs_; ++i) in_.push_back(wide());
    const Expr g = wide();
    std::vector<Expr> parameters;
    for (const Parameter& p : f.parameters) parameters.emplace_back(p.value);
    value_ = call(f, in_, parameters);
    gradients_ = grad(value_, g, in_);
  }

  using Columns = std::vector<const double*>;  // the inputs, then the gradient

  // f, or the gradient of each input, at n points.
  [[nodiscard]] std::vector<std::vector<double>> run(bool backward, size_t n, const Columns& at) {
    std::vector<uint32_t> roots;
    if (!backward) roots.push_back(graph_.id(value_));
    if (backward)
      for (const Expr e : gradients_) roots.push_back(graph_.id(e));
    const Oracle oracle(graph_, roots, 0);
    std::vector<std::vector<double>> out(roots.size(), std::vector<double>(n));
    constexpr int64_t kPart = 1024;
    cpu::parallel_for(cdiv(static_cast<int64_t>(n), kPart), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const size_t first = static_cast<size_t>(p * kPart);
        const size_t count = std::min(n - first, static_cast<size_t>(kPart));
        std::vector<std::vector<float>> parts;
        for (const double* column : at) split(column + first, count, parts);
        parts.resize(slots_, std::vector<float>(count));
        std::vector<const float*> loads;
        for (const auto& part : parts) loads.push_back(part.data());
        const Evaluation e = oracle.run(count, loads);
        for (size_t r = 0; r < roots.size(); ++r)
          std::ranges::copy(e.value[r], out[r].begin() + static_cast<int64_t>(first));
      }
    });
    return out;
  }

 private:
  Expr wide() {
    const Expr high = graph_.load(slots_), middle = graph_.load(slots_ + 1);
    const Expr low = graph_.load(slots_ + 2);
    slots_ += 3;
    return high + (middle + low);
  }
  static void split(const double* v, size_t n, std::vector<std::vector<float>>& parts) {
    std::vector<float> high(n), middle(n), low(n);
    for (size_t i = 0; i < n; ++i) {
      high[i] = static_cast<float>(v[i]);
      if (!std::isfinite(high[i])) continue;
      middle[i] = static_cast<float>(v[i] - double{high[i]});
      low[i] = static_cast<float>(v[i] - double{high[i]} - double{middle[i]});
    }
    for (auto* part : {&high, &middle, &low}) parts.push_back(std::move(*part));
  }

  Graph graph_;
  int inputs_;
  uint32_t slots_ = 0;
  std::vector<Expr> in_;
  Expr value_;
  std::vector<Expr> gradients_;
};

class Interpreter {
 public:
  Interpreter(const Reference& r, uint64_t noise) : r_(r), noise_(noise) {}

  Tensors64 run() {
    value_ = r_.given.at("x");
    for (size_t i = 0; i < r_.chain.size(); ++i) {
      at(i);
      (this->*kind_->forward)();
      store(value_, op().length, op().size);
    }
    results_["y"] = value_;
    if (!r_.request.backward) return std::move(results_);
    value_ = r_.given.at("dy");
    for (size_t i = r_.chain.size(); i-- > 0;) {
      at(i);
      (this->*kind_->backward)();
      store(value_, op().length, op().size);
    }
    results_["dx"] = value_;
    return std::move(results_);
  }

 private:
  struct State {
    Matrix64 x;          // the op's input, or what backward needs of it
    int64_t length = 1;  // of the sums that its value is made of
    double size = 0;     // of those sums, if no terms cancel
    int64_t extra = 0;   // which of the caller's extra tensors
  };
  struct Kind {
    std::string_view name;
    void (Interpreter::*forward)();
    void (Interpreter::*backward)();
  };
  static const Kind kKinds[15];
  static const Kind kActivation;

  void at(size_t i) {
    states_.resize(r_.chain.size());
    index_ = i;
    op_ = &r_.chain[i];
    name_ = op_->label.empty() ? str(op_->name, i) : op_->label;
    kind_ = &kActivation;
    for (const Kind& k : kKinds)
      if (k.name == op_->name) kind_ = &k;
  }
  State& op() { return states_[index_]; }
  [[nodiscard]] const Matrix64& parameter(const char* name) const {
    return r_.given.at(str(name_, ".", name));
  }
  Matrix64& gradient(const char* name) { return results_[str("d", name_, ".", name)]; }
  [[nodiscard]] Arguments arguments() const {
    for (const OpKind& k : op_kinds())
      if (k.name == op_->name) return {*op_, k.arguments, name_};
    fail(Code::invalid_argument, name_, ": no op of this name");
  }

  double draw() {
    if (drawn_ % 4 == 0) words_ = philox(noise_, drawn_ / 4, 1);
    return words_.w[drawn_++ % 4] * 0x1p-31 - 1;
  }
  // A value that is stored or handed on in the chain's dtype, made of sums of `length` terms, which
  // are rounded at the size that they have on their way.
  void store(Matrix64& m, int64_t length, double size = 0) {
    if (!noise_) return;
    const double own = std::ldexp(1.0, -info(r_.request.dtype).mantissa_bits - 1) + 4 * kUnit;
    const double sum =
        length > 1 ? kUnit * std::sqrt(double(length)) * std::max(size, root_mean_square(m)) : 0;
    for (double& v : m.v) v += draw() * (own * std::fabs(v) + sum);
  }
  // A value in a quantised format: half a step, which is an absolute one near 0.
  [[nodiscard]] Matrix64 quantised(Matrix64 m, const Format& f) {
    if (!noise_ || f.scaling == Scaling::none) return m;
    double amax = 0;
    for (const double v : m.v) amax = std::max(amax, std::fabs(v));
    const DTypeInfo& d = info(f.dtype);
    const double half = std::ldexp(1.0, -d.mantissa_bits - 1);
    // A scale that is a power of two, or that an older amax gave, uses half of the range.
    const double least = 2 * amax / d.max * std::ldexp(half, 1 - d.bias);
    for (double& v : m.v) v += draw() * std::max(half * std::fabs(v), least);
    return m;
  }

  void nothing() {}

  // Of a sum of n products.
  static double size_of(int64_t n, const Matrix64& a, const Matrix64& b) {
    return std::sqrt(double(n)) * root_mean_square(a) * root_mean_square(b);
  }

  void linear() {
    const Matrix64& w = parameter("weight");
    op().x = value_;
    op().length = w.cols;
    op().size = size_of(w.cols, value_, w);
    const Recipe& recipe = r_.request.recipe;
    value_ = product(quantised(value_, recipe.input), transposed(quantised(w, recipe.weight)));
  }
  void linear_backward() {
    const Matrix64& w = parameter("weight");
    const Recipe& recipe = r_.request.recipe;
    const Matrix64 dy = quantised(value_, recipe.gradient);
    Matrix64& dw = gradient("weight");
    dw = product(transposed(dy), quantised(op().x, recipe.input));
    store(dw, value_.rows, size_of(value_.rows, dy, op().x));
    value_ = product(dy, quantised(w, recipe.weight));
    op().length = w.rows;
    op().size = size_of(w.rows, dy, w);
  }

  void bias() {
    const Matrix64& b = parameter("bias");
    each([&](double& v, int64_t, int64_t c) { v += b.v[static_cast<size_t>(c)]; });
  }
  void bias_backward() {
    gradient("bias") = columns([](double g, int64_t, int64_t) { return g; });
  }

  void scale() {
    const auto factor = static_cast<double>(static_cast<float>(*arguments().number("c")));
    each([&](double& v, int64_t, int64_t) { v *= factor; });
  }

  void add() {
    if (op_->reads.empty()) {
      op().extra = extras_++;
      add_to(value_, r_.given.at(str("extra", op().extra)));
    } else {
      add_to(value_, channels_.at(op_->reads[0]));
    }
  }
  void add_backward() {
    if (op_->reads.empty())
      results_[str("dextra", op().extra)] = value_;
    else
      add_to(channel_gradients_[op_->reads[0]], value_);
  }

  void extra_output() {
    if (op_->writes.empty()) op().extra = extra_outs_++;
    (op_->writes.empty() ? results_[str("extra_out", op().extra)] : channels_[op_->writes[0]]) =
        value_;
  }
  void extra_output_backward() {
    add_to(value_, op_->writes.empty() ? r_.given.at(str("dextra_out", op().extra))
                                       : channel_gradients_[op_->writes[0]]);
  }

  void dropout() {
    if (!r_.request.training) return;
    op().extra = dropouts_++;
    mask();
  }
  void dropout_backward() {
    if (r_.request.training) mask();
  }
  void mask() {
    const double threshold = std::nearbyint(65536 * *arguments().number("p"));
    const auto kept =
        threshold < 65536 ? double{static_cast<float>(65536 / (65536 - threshold))} : 0.0;
    const auto [seed, offset, row0, col0, columns] = r_.random;
    const uint64_t high = offset + static_cast<uint64_t>(op().extra);
    each([&, seed = seed, row0 = row0, col0 = col0, columns = columns](double& v, int64_t r,
                                                                       int64_t c) {
      const uint64_t i =
          (row0 + static_cast<uint64_t>(r)) * columns + col0 + static_cast<uint64_t>(c);
      const uint32_t word = philox(seed, i / 8, high).w[i % 8 / 2];
      const double bits = i % 2 ? word >> 16 : word & 0xffffU;
      v = bits >= threshold ? v * kept : 0;
    });
  }

  // Norms: (x − mean)·rstdev, times gamma, plus beta.
  struct Norm {
    bool layer, l2, zero_centered;
    double eps;
  };
  [[nodiscard]] Norm norm_of() const {
    const bool l2 = op_->name == "l2norm";
    const Arguments a = arguments();
    const double eps = a.number("eps").value_or(l2 ? 1e-6 : 1e-5);
    return {op_->name == "layernorm", l2, !l2 && a.flag("zero_centered_gamma").value_or(false),
            double{static_cast<float>(eps)}};
  }
  [[nodiscard]] std::vector<double> gamma_of(const Norm& n, int64_t cols) const {
    std::vector<double> gamma(static_cast<size_t>(cols), 1.0);
    if (!n.l2) gamma = parameter("gamma").v;
    if (n.zero_centered)
      for (double& g : gamma) g += 1;
    return gamma;
  }
  // x becomes (x − mean)·rstdev; gives rstdev. In a row of nearly equal numbers rstdev makes what
  // the mean's roundings cost the largest error of all.
  double normalise(const Norm& n, double* x, int64_t cols) {
    double mean = 0, square = 0;
    if (n.layer)
      for (int64_t c = 0; c < cols; ++c) mean += x[c] / static_cast<double>(cols);
    if (n.layer && cols > 1 && noise_) mean += draw() * 2 * kUnit * root_mean_square(x, cols);
    for (int64_t c = 0; c < cols; ++c) square += (x[c] - mean) * (x[c] - mean);
    const double s = 1 / std::sqrt((n.l2 ? square : square / static_cast<double>(cols)) + n.eps);
    for (int64_t c = 0; c < cols; ++c) x[c] = (x[c] - mean) * s;
    return s;
  }
  void norm() {
    const Norm n = norm_of();
    op().x = value_;
    op().length = value_.cols;
    const std::vector<double> gamma = gamma_of(n, value_.cols);
    for (int64_t r = 0; r < value_.rows; ++r) normalise(n, value_.row(r), value_.cols);
    each([&](double& v, int64_t, int64_t c) { v *= gamma[static_cast<size_t>(c)]; });
    if (!n.layer) return;
    const Matrix64& beta = parameter("beta");
    each([&](double& v, int64_t, int64_t c) { v += beta.v[static_cast<size_t>(c)]; });
  }
  void norm_backward() {
    const Norm n = norm_of();
    Matrix64 hat = op().x;
    store(hat, 1);  // as it was saved
    std::vector<double> s;
    for (int64_t r = 0; r < hat.rows; ++r) s.push_back(normalise(n, hat.row(r), hat.cols));
    if (!n.l2)
      gradient("gamma") =
          columns([&](double g, int64_t r, int64_t c) { return g * hat.row(r)[c]; });
    if (n.layer) gradient("beta") = columns([](double g, int64_t, int64_t) { return g; });
    const std::vector<double> gamma = gamma_of(n, value_.cols);
    each([&](double& v, int64_t, int64_t c) { v *= gamma[static_cast<size_t>(c)]; });
    const double count = n.l2 ? 1 : static_cast<double>(value_.cols);
    for (int64_t r = 0; r < value_.rows; ++r) {
      double* const w = value_.row(r);
      const double* const h = hat.row(r);
      double sum = 0, along = 0;
      for (int64_t c = 0; c < value_.cols; ++c) {
        sum += w[c];
        along += w[c] * h[c];
      }
      const double mean = n.layer ? sum / count : 0;
      for (int64_t c = 0; c < value_.cols; ++c) {
        const double part = h[c] * along / count;
        const double terms = std::fabs(w[c]) + std::fabs(mean) + std::fabs(part);  // may cancel
        const double rounding = noise_ ? draw() * 2 * kUnit * terms : 0;
        w[c] = s[static_cast<size_t>(r)] * (w[c] - mean - part + rounding);
      }
    }
  }

  void reshape() {
    op().x.cols = value_.cols;
    shape(*arguments().integer("cols", 1));
  }
  void reshape_backward() { shape(op().x.cols); }
  void shape(int64_t cols) {
    value_.rows = value_.rows * value_.cols / cols;
    value_.cols = cols;
  }

  void quantize() { value_ = quantised(std::move(value_), r_.request.recipe.input); }
  void quantize_backward() { value_ = quantised(std::move(value_), r_.request.recipe.gradient); }

  // Every activation and formula of the registry.
  struct Act {
    Activation f;
    std::optional<Layout> layout;
    bool fp8 = false;  // its input is kept so
  };
  [[nodiscard]] Act act_of() const {
    auto [f, a] = activation_op(*op_, name_);
    Act act{.f = std::move(f), .layout = {}};
    act.layout = layout_named(a.text("layout").value_or("stacked"));
    const std::string_view keep = kKeeps[static_cast<size_t>(r_.request.keep)];
    act.fp8 = a.text("keep").value_or(std::string(keep)) == kKeeps[1];
    return act;
  }
  // The halves of a gated input, or the input, as columns.
  [[nodiscard]] static std::vector<Matrix64> inputs(const Act& act, const Matrix64& x) {
    if (act.f.inputs == 1) return {x};
    const int64_t h = x.cols / 2;
    const std::array<ColumnMap, 2> maps = halves(*act.layout, h);
    std::vector<Matrix64> parts{zeros(x.rows, h), zeros(x.rows, h)};
    for (size_t i = 0; i < 2; ++i)
      for (int64_t r = 0; r < x.rows; ++r)
        for (int64_t c = 0; c < h; ++c) parts[i].row(r)[c] = x.row(r)[maps[i](c)];
    return parts;
  }
  void act() {
    const Act act = act_of();
    op().x = value_;
    const std::vector<Matrix64> in = inputs(act, value_);
    value_ = in[0];
    value_.v = Formula(act.f).run(false, value_.v.size(), columns_of(in))[0];
    if (!act.f.scaled) return;
    op().extra = extras_++;
    multiply_rows(r_.given.at(str("extra", op().extra)));
  }
  void act_backward() {
    const Act act = act_of();
    Formula formula(act.f);
    Matrix64 x = op().x;
    if (act.fp8)
      x = quantised(std::move(x), {.dtype = DType::e4m3, .scaling = Scaling::block1x128});
    else
      store(x, 1);
    std::vector<Matrix64> in = inputs(act, x);
    if (act.f.scaled) {
      const std::vector<double> y = formula.run(false, in[0].v.size(), columns_of(in))[0];
      Matrix64& ds = results_[str("dextra", op().extra)];
      ds = zeros(value_.rows, 1);
      for (size_t i = 0; i < y.size(); ++i)
        ds.v[i / static_cast<size_t>(value_.cols)] += value_.v[i] * y[i];
      store(ds, value_.cols);
      multiply_rows(r_.given.at(str("extra", op().extra)));
    }
    std::vector<const double*> at = columns_of(in);
    at.push_back(value_.v.data());
    const auto d = formula.run(true, value_.v.size(), at);
    if (act.f.inputs == 1) {
      value_.v = d[0];
      return;
    }
    const int64_t h = value_.cols;
    const std::array<ColumnMap, 2> maps = halves(*act.layout, h);
    value_ = zeros(x.rows, x.cols);
    for (size_t i = 0; i < 2; ++i)
      for (int64_t r = 0; r < x.rows; ++r)
        for (int64_t c = 0; c < h; ++c)
          value_.row(r)[maps[i](c)] = d[i][static_cast<size_t>(r * h + c)];
  }
  void multiply_rows(const Matrix64& s) {
    each([&](double& v, int64_t r, int64_t) { v *= s.v[static_cast<size_t>(r)]; });
  }
  static std::vector<const double*> columns_of(const std::vector<Matrix64>& in) {
    std::vector<const double*> list;
    for (const Matrix64& m : in) list.push_back(m.v.data());
    return list;
  }

  template <class F>
  void each(F f) {
    for (int64_t r = 0; r < value_.rows; ++r)
      for (int64_t c = 0; c < value_.cols; ++c) f(value_.row(r)[c], r, c);
  }
  template <class F>
  Matrix64 columns(F f) {
    Matrix64 sum = zeros(1, value_.cols), terms = value_;
    each([&](double& v, int64_t r, int64_t c) {
      terms.row(r)[c] = f(v, r, c);
      sum.v[static_cast<size_t>(c)] += terms.row(r)[c];
    });
    store(sum, value_.rows, std::sqrt(double(value_.rows)) * root_mean_square(terms));
    return sum;
  }

  const Reference& r_;
  uint64_t noise_, drawn_ = 0;
  RandomWords words_{};
  size_t index_ = 0;
  const Op* op_ = nullptr;
  const Kind* kind_ = nullptr;
  std::string name_;
  std::vector<State> states_;
  Matrix64 value_;
  Tensors64 results_, channels_, channel_gradients_;
  int64_t extras_ = 0, extra_outs_ = 0, dropouts_ = 0;
};

// A name that is none of these is an activation.
const Interpreter::Kind Interpreter::kKinds[15] = {
    {"linear", &Interpreter::linear, &Interpreter::linear_backward},
    {"bias", &Interpreter::bias, &Interpreter::bias_backward},
    {"scale", &Interpreter::scale, &Interpreter::scale},
    {"dropout", &Interpreter::dropout, &Interpreter::dropout_backward},
    {"add", &Interpreter::add, &Interpreter::add_backward},
    {"make_extra_output", &Interpreter::extra_output, &Interpreter::extra_output_backward},
    {"layernorm", &Interpreter::norm, &Interpreter::norm_backward},
    {"rmsnorm", &Interpreter::norm, &Interpreter::norm_backward},
    {"l2norm", &Interpreter::norm, &Interpreter::norm_backward},
    {"quantize", &Interpreter::quantize, &Interpreter::quantize_backward},
    {"reshape", &Interpreter::reshape, &Interpreter::reshape_backward},
    // One rank: the sum over the group, the gathered and the scattered rows are the value itself.
    {"identity", &Interpreter::nothing, &Interpreter::nothing},
    {"all_reduce", &Interpreter::nothing, &Interpreter::nothing},
    {"all_gather", &Interpreter::nothing, &Interpreter::nothing},
    {"reduce_scatter", &Interpreter::nothing, &Interpreter::nothing},
};
const Interpreter::Kind Interpreter::kActivation{"", &Interpreter::act, &Interpreter::act_backward};

}  // namespace

Tensors64 Reference::run(uint64_t noise) const { return Interpreter(*this, noise).run(); }

Distance distance(const Matrix64& got, const Matrix64& exact, DType dtype) {
  Distance d;
  const double whole = root_mean_square(exact);
  double errors = 0, squares = 0;
  for (int64_t r = 0; r < exact.rows; ++r) {
    const double size = whole + root_mean_square(exact.row(r), exact.cols);
    for (int64_t c = 0; c < exact.cols; ++c) {
      const double v = exact.row(r)[c], e = std::fabs(got.row(r)[c] - v);
      if (!std::isfinite(nearest(v, dtype))) {
        ++d.not_finite;
        d.lost = d.lost || std::isfinite(got.row(r)[c]);
        continue;
      }
      d.lost = d.lost || !std::isfinite(e);
      errors += e * e;
      squares += v * v;
      if (e > 0) d.worst = std::max(d.worst, e / (size + std::fabs(v)));
    }
  }
  if (errors > 0) d.rms = std::sqrt(errors / squares);
  return d;
}

int64_t least_rows(const Plan& plan) {
  int64_t least = 1;
  for (const PlanData::Whole& w : plan.data().whole) least = std::lcm(least, w.rows.div);
  return least;
}

double work_per_row(const Plan& plan) {
  constexpr double kElement = 2000;  // of a formula with its bound, in multiply-adds
  const int64_t least = least_rows(plan);
  double work = 0;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : plan.data().steps(pass)) {
      const auto rows = static_cast<double>(s.rows(least));
      work += static_cast<double>(s.step.flops(s.rows(least)));
      if (!s.rows.fixed) work += kElement * rows * static_cast<double>(s.step.cols);
    }
  return work / static_cast<double>(least);
}

}  // namespace tenon::support
