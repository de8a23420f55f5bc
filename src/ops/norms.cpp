// The float64 form of norms: (x − mean)·rstdev, times gamma, plus beta.
#include "ops/norms.h"

namespace tenon {

namespace {

constexpr double kUnit = 0x1p-24;  // 0.5 ulp of fp32 at 1

struct Norm64 {
  NormKind kind;
  const OpCall& call;
  Run64& run;

  [[nodiscard]] bool layer() const { return kind == NormKind::layer; }
  [[nodiscard]] bool l2() const { return kind == NormKind::l2; }

  [[nodiscard]] std::vector<double> gamma() const {
    if (l2()) return std::vector<double>(static_cast<size_t>(call.cols), 1.0);
    std::vector<double> g = run.parameter(0).v;
    if (call.arguments.flag("zero_centered_gamma"))
      for (double& v : g) v += 1;
    return g;
  }

  // Replaces x by (x − mean)·rstdev and returns rstdev. If the values of a row are nearly equal,
  // rstdev is large, and the rounding error of the mean dominates.
  double normalise(double* x) const {
    const int64_t cols = call.cols;
    const auto eps = static_cast<double>(static_cast<float>(call.arguments.number("eps")));
    double mean = 0, square = 0;
    if (layer())
      for (int64_t c = 0; c < cols; ++c) mean += x[c] / static_cast<double>(cols);
    if (layer() && cols > 1) mean += run.noise() * 2 * kUnit * root_mean_square(x, cols);
    for (int64_t c = 0; c < cols; ++c) square += (x[c] - mean) * (x[c] - mean);
    const double s = 1 / std::sqrt((l2() ? square : square / static_cast<double>(cols)) + eps);
    for (int64_t c = 0; c < cols; ++c) x[c] = (x[c] - mean) * s;
    return s;
  }

  void forward() const {
    run.kept = run.value;
    run.sums(call.cols, 0);
    const std::vector<double> g = gamma();
    for (int64_t r = 0; r < run.value.rows; ++r) {
      double* const y = run.value.row(r);
      normalise(y);
      for (int64_t c = 0; c < call.cols; ++c) {
        y[c] *= g[static_cast<size_t>(c)];
        if (layer()) y[c] += run.parameter(1).v[static_cast<size_t>(c)];
      }
    }
  }

  void backward() const {
    Matrix64 hat = run.stored(run.kept, Run64::Stored::plain);
    std::vector<double> s;
    for (int64_t r = 0; r < hat.rows; ++r) s.push_back(normalise(hat.row(r)));
    if (!l2()) give_sums(hat);
    const std::vector<double> g = gamma();
    for (int64_t r = 0; r < hat.rows; ++r)
      input_gradient(run.value.row(r), hat.row(r), g, s[static_cast<size_t>(r)]);
  }

 private:
  void give_sums(const Matrix64& hat) const {
    Matrix64 terms = run.value;
    double size = 0;
    if (layer()) {
      Matrix64 beta = column_sums(terms, size);
      run.give_gradient(1, std::move(beta), terms.rows, size);
    }
    for (size_t i = 0; i < terms.v.size(); ++i) terms.v[i] *= hat.v[i];
    Matrix64 sum = column_sums(terms, size);
    run.give_gradient(0, std::move(sum), terms.rows, size);
  }

  void input_gradient(double* w, const double* h, const std::vector<double>& g, double s) const {
    const int64_t cols = call.cols;
    double sum = 0, along = 0;
    for (int64_t c = 0; c < cols; ++c) {
      w[c] *= g[static_cast<size_t>(c)];
      sum += w[c];
      along += w[c] * h[c];
    }
    const double count = l2() ? 1 : static_cast<double>(cols);
    const double mean = layer() ? sum / count : 0;
    for (int64_t c = 0; c < cols; ++c) {
      const double part = h[c] * along / count;
      // Magnitude of a sum that may cancel.
      const double terms = std::fabs(w[c]) + std::fabs(mean) + std::fabs(part);
      w[c] = s * (w[c] - mean - part + run.noise() * 2 * kUnit * terms);
    }
  }
};

}  // namespace

Float64 norm_float64(NormKind kind) {
  return {.forward =
              [kind](const OpCall& c, Run64& r) {
                Norm64{kind, c, r}.forward();
              },
          .backward =
              [kind](const OpCall& c, Run64& r) {
                Norm64{kind, c, r}.backward();
              }};
}

}  // namespace tenon
