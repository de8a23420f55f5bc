// Runs the float64 forms of a chain's ops, forward and backward.
#include "support/reference.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "backend/cpu/pool.h"
#include "core/philox.h"
#include "expr/evaluate.h"
#include "lazy/halves.h"
#include "lower/data.h"
#include "ops/op.h"
#include "tenon/error.h"

namespace tenon::support {

namespace {

constexpr double kUnit = 0x1p-24;  // half an ulp of fp32 at 1

// a·b, four rows at once, so that they share the loads of a row of b.
Matrix64 product(const Matrix64& a, const Matrix64& b) {
  constexpr int64_t kRows = 4, kDepth = 128;
  Matrix64 y = zeros64(a.rows, b.cols);
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

// A formula and its gradients at float64 points. The oracle loads fp32, so a double is passed as a
// sum of three fp32 values.
class Formula64 {
 public:
  explicit Formula64(const Activation& f) : inputs_(f.inputs) {
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

void add_to(Matrix64& to, const Matrix64& from) {
  if (to.v.empty()) to = zeros64(from.rows, from.cols);
  for (size_t i = 0; i < from.v.size(); ++i) to.v[i] += from.v[i];
}

// Adds random noise to values, up to the rounding error of their formats. The exact run has no
// noise.
class Rounding64 {
 public:
  Rounding64(const PlanRequest& request, uint64_t seed) : request_(request), seed_(seed) {}

  double draw() {
    if (!seed_) return 0;
    if (drawn_ % 4 == 0) words_ = philox(seed_, drawn_ / 4, 1);
    return words_.w[drawn_++ % 4] * 0x1p-31 - 1;
  }
  // Noise for a value that is stored in the chain's dtype. It is computed from sums of `length`
  // terms, which are rounded at their intermediate size.
  void store(Matrix64& m, int64_t length, double size = 0) {
    if (!seed_) return;
    const double own = std::ldexp(1.0, -info(request_.dtype).mantissa_bits - 1) + 4 * kUnit;
    const double sum =
        length > 1 ? kUnit * std::sqrt(double(length)) * std::max(size, root_mean_square(m)) : 0;
    for (double& v : m.v) v += draw() * (own * std::fabs(v) + sum);
  }
  // Noise for a quantised value: half a step. Near 0 the step is absolute.
  [[nodiscard]] Matrix64 quantised(Matrix64 m, const Format& f) {
    if (!seed_ || f.scaling == Scaling::none) return m;
    double amax = 0;
    for (const double v : m.v) amax = std::max(amax, std::fabs(v));
    const DTypeInfo& d = info(f.dtype);
    const double half = std::ldexp(1.0, -d.mantissa_bits - 1);
    // A power-of-two scale, or a scale from an older amax, may use only half of the range.
    const double least = 2 * amax / d.max * std::ldexp(half, 1 - d.bias);
    for (double& v : m.v) v += draw() * std::max(half * std::fabs(v), least);
    return m;
  }

 private:
  const PlanRequest& request_;
  uint64_t seed_, drawn_ = 0;
  RandomWords words_{};
};

// The state that the ops of a chain share during a run.
struct ChainState {
  const Reference& given;
  Rounding64 rounding;
  Tensors64 results = {}, channels = {}, channel_gradients = {};
  int64_t extras = 0, extra_outs = 0, streams = 0;
};

// One op: its tensors, and the float64 form of its schema.
class OpRun final : public Run64 {
 public:
  OpRun(ChainState& chain, size_t index, int64_t cols)
      : chain_(chain),
        op_(chain.given.chain[index]),
        name_(op_.label.empty() ? str(op_.name, index) : op_.label),
        use_(OpUse::of(op_, name_)),
        call_{.arguments = use_.arguments, .cols = cols, .training = request().training} {
    for (size_t i = 0; i < schema().extra_inputs.size(); ++i)
      extras_.push_back(i < op_.reads.size() ? op_.reads[i] : str("extra", chain.extras++));
    for (size_t i = 0; i < schema().extra_outputs.size(); ++i)
      outputs_.push_back(i < op_.writes.size() ? op_.writes[i]
                                               : str("extra_out", chain.extra_outs++));
    if (form().element && draws()) stream_ = chain.streams++;
    for (size_t i = 0; i < index; ++i) {
      const std::string& earlier = chain.given.chain[i].name;
      number_ += earlier == "linear" || earlier == "quantize";
    }
  }

  void forward() {
    length_ = 1;
    if (form().activation.body)
      activate();
    else if (form().element)
      each_forward();
    else if (form().forward)
      form().forward(call_, *this);
    for (const std::string& out : outputs_)
      (is_channel(out, op_.writes) ? chain_.channels : chain_.results)[out] = value;
    chain_.rounding.store(value, length_, size_);
  }

  void backward() {
    for (const std::string& out : outputs_)
      add_to(value, is_channel(out, op_.writes) ? chain_.channel_gradients[out]
                                                : chain_.given.given.at("d" + out));
    if (form().activation.body)
      activate_backward();
    else if (form().element)
      each_backward();
    else if (form().backward)
      form().backward(call_, *this);
    chain_.rounding.store(value, length_, size_);
  }

  [[nodiscard]] const Matrix64& parameter(size_t number) const override {
    return chain_.given.given.at(str(name_, ".", schema().parameters[number].name));
  }
  void give_gradient(size_t number, Matrix64 gradient, int64_t length, double size) override {
    chain_.rounding.store(gradient, length, size);
    chain_.results[str("d", name_, ".", schema().parameters[number].name)] = std::move(gradient);
  }
  void sums(int64_t length, double size) override {
    length_ = length;
    size_ = size;
  }
  double noise() override { return chain_.rounding.draw(); }
  [[nodiscard]] Matrix64 stored(Matrix64 m, Stored as) override {
    if (as == Stored::plain) {
      chain_.rounding.store(m, 1);
      return m;
    }
    const Recipe recipe = recipe_here();
    const Format& f = as == Stored::input    ? recipe.input
                      : as == Stored::weight ? recipe.weight
                                             : recipe.gradient;
    return chain_.rounding.quantised(std::move(m), f);
  }
  [[nodiscard]] Matrix64 product(const Matrix64& a, const Matrix64& b) const override {
    return support::product(a, b);
  }

 private:
  [[nodiscard]] const PlanRequest& request() const { return chain_.given.request; }
  // The request for this op, else its text, else the recipe of the plan.
  [[nodiscard]] Recipe recipe_here() const {
    const auto& requests = request().op_requests;
    if (number_ < requests.size() && requests[number_].recipe) return *requests[number_].recipe;
    const auto name = use_.arguments.text("recipe");
    return name ? recipe(*name) : request().recipe;
  }
  [[nodiscard]] const OpSchema& schema() const { return *use_.schema; }
  [[nodiscard]] const Float64& form() const { return schema().float64; }
  static bool is_channel(const std::string& name, const std::vector<std::string>& list) {
    return std::ranges::find(list, name) != list.end();
  }
  [[nodiscard]] bool is_column(size_t i) const {
    return schema().extra_inputs[i].kind == ExtraSchema::Kind::column;
  }
  [[nodiscard]] const Matrix64& extra(size_t i) const {
    return is_channel(extras_[i], op_.reads) ? chain_.channels.at(extras_[i])
                                             : chain_.given.given.at(extras_[i]);
  }
  void give_extra_gradient(size_t i, Matrix64 gradient) {
    if (is_channel(extras_[i], op_.reads))
      add_to(chain_.channel_gradients[extras_[i]], gradient);
    else
      chain_.results["d" + extras_[i]] = std::move(gradient);
  }

  // An elementwise op at (r, c) of `x`. Variables: the input, the parameters, the extra inputs.
  [[nodiscard]] Dual at(const Matrix64& x, int64_t r, int64_t c) const {
    const Dual in(x.row(r)[c], 0);
    std::vector<Dual> parameters, extras;
    size_t variable = 1;
    for (size_t i = 0; i < schema().parameters.size(); ++i)
      parameters.emplace_back(parameter(i).row(0)[c], variable++);
    for (size_t i = 0; i < extras_.size(); ++i)
      extras.emplace_back(extra(i).row(r)[is_column(i) ? 0 : c], variable++);
    const Point p{std::span(&in, 1), parameters, extras, [&] { return bits(r, c); }};
    return form().element(call_, p);
  }
  // Whether the op uses random bits.
  [[nodiscard]] bool draws() const {
    bool drawn = false;
    const Dual one(1);
    const std::vector<Dual> parameters(schema().parameters.size(), one),
        extras(extras_.size(), one);
    const Point p{std::span(&one, 1), parameters, extras, [&] {
                    drawn = true;
                    return 65535.0;
                  }};
    form().element(call_, p);
    return drawn;
  }
  [[nodiscard]] double bits(int64_t r, int64_t c) const {
    const auto [seed, offset, row0, col0, columns] = chain_.given.random;
    const uint64_t i =
        (row0 + static_cast<uint64_t>(r)) * columns + col0 + static_cast<uint64_t>(c);
    const uint32_t word = philox(seed, i / 8, offset + static_cast<uint64_t>(stream_)).w[i % 8 / 2];
    return i % 2 ? word >> 16 : word & 0xffffU;
  }

  void each_forward() {
    kept = value;
    for (int64_t r = 0; r < kept.rows; ++r)
      for (int64_t c = 0; c < kept.cols; ++c) value.row(r)[c] = at(kept, r, c).v;
  }

  void each_backward() {
    const Matrix64 x = kept_input();
    const size_t parameters = schema().parameters.size();
    std::vector<Matrix64> terms(parameters + extras_.size(), zeros64(value.rows, value.cols));
    for (int64_t r = 0; r < value.rows; ++r)
      for (int64_t c = 0; c < value.cols; ++c) {
        const Dual y = at(x, r, c);
        double& g = value.row(r)[c];
        for (size_t i = 0; i < terms.size(); ++i) terms[i].row(r)[c] = g * y.d[i + 1];
        g *= y.d[0];
      }
    for (size_t i = 0; i < parameters; ++i) {
      double size = 0;
      Matrix64 sum = column_sums(terms[i], size);
      give_gradient(i, std::move(sum), value.rows, size);
    }
    for (size_t i = 0; i < extras_.size(); ++i)
      give_extra_gradient(
          i, is_column(i) ? row_sums(terms[parameters + i]) : std::move(terms[parameters + i]));
  }

  [[nodiscard]] Matrix64 row_sums(const Matrix64& terms) {
    Matrix64 sum = zeros64(terms.rows, 1);
    for (int64_t r = 0; r < terms.rows; ++r)
      for (int64_t c = 0; c < terms.cols; ++c) sum.row(r)[0] += terms.row(r)[c];
    chain_.rounding.store(sum, terms.cols);
    return sum;
  }

  // The op's input as the backward pass reads it.
  [[nodiscard]] Matrix64 kept_input() {
    const std::string_view keep = kKeeps[static_cast<size_t>(request().keep)];
    if (use_.arguments.text("keep").value_or(std::string(keep)) == kKeeps[1])
      return chain_.rounding.quantised(kept,
                                       {.dtype = DType::e4m3, .scaling = Scaling::block1x128});
    return stored(kept, Stored::plain);
  }

  // The halves of a gated input, or the whole input.
  [[nodiscard]] std::vector<Matrix64> inputs(const Matrix64& x) const {
    if (form().activation.inputs == 1) return {x};
    const int64_t h = x.cols / 2;
    const std::array<ColumnMap, 2> maps = halves(layout_of(use_.arguments), h);
    std::vector<Matrix64> parts{zeros64(x.rows, h), zeros64(x.rows, h)};
    for (size_t i = 0; i < 2; ++i)
      for (int64_t r = 0; r < x.rows; ++r)
        for (int64_t c = 0; c < h; ++c) parts[i].row(r)[c] = x.row(r)[maps[i](c)];
    return parts;
  }
  static std::vector<const double*> columns_of(const std::vector<Matrix64>& in) {
    std::vector<const double*> list;
    for (const Matrix64& m : in) list.push_back(m.v.data());
    return list;
  }
  [[nodiscard]] Activation activation() const {
    Activation f = form().activation;
    for (Parameter& p : f.parameters) p.value = static_cast<float>(use_.arguments.number(p.name));
    return f;
  }
  void multiply_rows(Matrix64& m) const {
    for (int64_t r = 0; r < m.rows; ++r)
      for (int64_t c = 0; c < m.cols; ++c) m.row(r)[c] *= extra(0).row(r)[0];
  }

  void activate() {
    kept = value;
    const std::vector<Matrix64> in = inputs(value);
    value = in[0];
    value.v = Formula64(activation()).run(false, value.v.size(), columns_of(in))[0];
    if (form().activation.scaled) multiply_rows(value);
  }

  void activate_backward() {
    Formula64 formula(activation());
    const Matrix64 x = kept_input();
    const std::vector<Matrix64> in = inputs(x);
    if (form().activation.scaled) {
      Matrix64 terms = value;
      const std::vector<double> y = formula.run(false, in[0].v.size(), columns_of(in))[0];
      for (size_t i = 0; i < y.size(); ++i) terms.v[i] *= y[i];
      give_extra_gradient(0, row_sums(terms));
      multiply_rows(value);
    }
    std::vector<const double*> at = columns_of(in);
    at.push_back(value.v.data());
    const auto d = formula.run(true, value.v.size(), at);
    if (in.size() == 1) {
      value.v = d[0];
      return;
    }
    const int64_t h = value.cols;
    const std::array<ColumnMap, 2> maps = halves(layout_of(use_.arguments), h);
    value = zeros64(x.rows, x.cols);
    for (size_t i = 0; i < 2; ++i)
      for (int64_t r = 0; r < x.rows; ++r)
        for (int64_t c = 0; c < h; ++c)
          value.row(r)[maps[i](c)] = d[i][static_cast<size_t>(r * h + c)];
  }

  ChainState& chain_;
  const Op& op_;
  std::string name_;
  OpUse use_;
  OpCall call_;
  std::vector<std::string> extras_, outputs_;
  int64_t stream_ = 0;
  size_t number_ = 0;   // linears and quantizes before it
  int64_t length_ = 1;  // number of terms in the sums of its value
  double size_ = 0;     // magnitude of those sums without cancellation
};

}  // namespace

Tensors64 Reference::run(uint64_t noise) const {
  ChainState state{.given = *this, .rounding = Rounding64(request, noise)};
  std::vector<std::unique_ptr<OpRun>> ops;
  Matrix64 value = given.at("x");
  for (size_t i = 0; i < chain.size(); ++i) {
    OpRun& op = *ops.emplace_back(std::make_unique<OpRun>(state, i, value.cols));
    op.value = std::move(value);
    op.forward();
    value = std::move(op.value);
  }
  state.results["y"] = std::move(value);
  if (!request.backward) return std::move(state.results);
  value = given.at("dy");
  for (size_t i = chain.size(); i-- > 0;) {
    ops[i]->value = std::move(value);
    ops[i]->backward();
    value = std::move(ops[i]->value);
  }
  state.results["dx"] = std::move(value);
  return std::move(state.results);
}

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
  for (const PlanData::Whole& w : data_of(plan).whole) least = std::lcm(least, w.rows.div);
  return least;
}

double work_per_row(const Plan& plan) {
  constexpr double kElement = 2000;  // cost of a formula with its bound, in multiply-adds
  const int64_t least = least_rows(plan);
  double work = 0;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : data_of(plan).steps(pass)) {
      const auto rows = static_cast<double>(s.rows(least));
      work += static_cast<double>(s.step.flops(s.rows(least)));
      if (!s.rows.fixed) work += kElement * rows * static_cast<double>(s.step.cols);
    }
  return work / static_cast<double>(least);
}

}  // namespace tenon::support
