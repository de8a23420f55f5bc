// Helper functions of the float64 forms of ops.
#include "ops/float64.h"

namespace tenon {

Matrix64 transposed(const Matrix64& m) {
  Matrix64 t = zeros64(m.cols, m.rows);
  for (int64_t r = 0; r < m.rows; ++r)
    for (int64_t c = 0; c < m.cols; ++c) t.row(c)[r] = m.row(r)[c];
  return t;
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

Matrix64 column_sums(const Matrix64& terms, double& size) {
  Matrix64 sum = zeros64(1, terms.cols);
  for (int64_t r = 0; r < terms.rows; ++r)
    for (int64_t c = 0; c < terms.cols; ++c) sum.row(0)[c] += terms.row(r)[c];
  size = std::sqrt(static_cast<double>(terms.rows)) * root_mean_square(terms);
  return sum;
}

}  // namespace tenon
