// Tests of norms as one step: exact bits against scalar loops, values against float64, all store
// types.
#include "backend/cpu/norm.h"

#include "backend/cpu/executor.h"
#include "backend/cpu/here.h"
#include "backend/cpu/isa.h"
#include "core/philox.h"
#include "lazy/builder.h"
#include "lower/single_norm.h"
#include "runtime/execute.h"
#include "support/quantize_reference.h"
#include "support/support.h"
#include "support/verify.h"

namespace tenon::test {
namespace {

using A = NormArgs;
using From = Load::From;
using To = Store::To;
constexpr NormKind kKinds[] = {NormKind::layer, NormKind::rms, NormKind::l2};
constexpr float kEps = 1e-5F;
constexpr double kUnit = 0x1p-24;  // half an ulp of 1: the error of one rounding

struct Args {
  std::vector<View> in = std::vector<View>(A::inputs), out = std::vector<View>(A::outputs);
  std::vector<float> parameters{kEps};
  int64_t rows = 0;
  const uint64_t* random = nullptr;

  static void put(std::vector<View>& to, const std::vector<uint32_t>& at,
                  const std::vector<View>& v) {
    for (size_t i = 0; i < at.size(); ++i) to[at[i]] = v[i];
  }
};

std::shared_ptr<const Kernel> executor(const Step& step) {
  return std::get<std::shared_ptr<const Kernel>>(cpu::make_executor(step, cpu::here()));
}

// Runs with exactly the workspace that the kernel requests, with guard bytes.
void run(const Kernel& kernel, const Args& a) {
  const size_t bytes = kernel.workspace(a.rows);
  std::vector<uint8_t> memory(bytes + 192, Mat::kPoison);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const size_t start = 64 + (64 - address % 64) % 64;
  kernel.run({.rows = a.rows,
              .in = a.in,
              .out = a.out,
              .parameters = a.parameters,
              .random = a.random,
              .workspace = memory.data() + start});
  for (size_t i = 0; i < memory.size(); ++i)
    ASSERT_TRUE((i >= start && i < start + bytes) || memory[i] == Mat::kPoison) << "workspace";
}

std::optional<std::string> verified(const Step& step, const Args& a) {
  return verify(
      step,
      {.rows = a.rows, .in = a.in, .out = a.out, .parameters = a.parameters, .random = a.random});
}

// Sums blocks of 32 in order, then the tree: gradients of gamma and beta.
float ordered(const std::vector<float>& v) {
  std::vector<float> blocks;
  for (size_t i = 0; i < v.size(); i += 32) {
    float sum = v[i];
    for (size_t k = i + 1; k < std::min(i + 32, v.size()); ++k) sum = sum + v[k];
    blocks.push_back(sum);
  }
  return tree(blocks);
}

// Values by row and column.
struct Table {
  int64_t cols = 0;
  std::vector<float> v;
  [[nodiscard]] float at(int64_t r, int64_t c) const {
    return v[static_cast<size_t>(r * cols + c)];
  }
};

// The inputs of a call in fp32, and its results, with plain loops in the order of the formulas.
struct Scalar {
  NormForm form;
  int64_t rows = 0;
  Table x = {}, residual = {}, grad = {}, added = {};  // v empty: not given
  std::vector<float> gamma = {}, beta = {}, mean = {}, rstdev = {};
  Table y = {}, sum = {};
  std::vector<float> dgamma = {}, dbeta = {};

  [[nodiscard]] float between(float v) const {
    return form.rounding == Rounding::eager ? rounded_ref(form.x.format.dtype, v) : v;
  }
  [[nodiscard]] float factor(int64_t c) const {
    const float g = gamma[static_cast<size_t>(c)];
    return form.zero_centered_gamma ? g + 1.0F : g;
  }

  void forward() {
    const auto n = static_cast<float>(form.cols);
    y.cols = sum.cols = form.cols;
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<float> s;
      for (int64_t c = 0; c < form.cols; ++c)
        s.push_back(residual.v.empty() ? x.at(r, c) : between(x.at(r, c) + residual.at(r, c)));
      sum.v.insert(sum.v.end(), s.begin(), s.end());
      mean.push_back(tree(s) / n);
      if (form.kind == NormKind::layer)
        for (float& v : s) v = v - mean.back();
      std::vector<float> squares;
      for (const float v : s) squares.push_back(v * v);
      float total = tree(squares);
      if (form.kind != NormKind::l2) total = total / n;
      rstdev.push_back(1.0F / std::sqrt(total + kEps));
      for (int64_t c = 0; c < form.cols; ++c) {
        float v = s[static_cast<size_t>(c)] * rstdev.back();
        if (!gamma.empty()) v = v * factor(c);
        if (!beta.empty()) v = v + beta[static_cast<size_t>(c)];
        y.v.push_back(between(v));
      }
    }
  }

  void backward() {
    const auto n = static_cast<float>(form.cols);
    y.cols = form.cols;
    std::vector<std::vector<float>> by_column(static_cast<size_t>(form.cols)), grads = by_column;
    for (int64_t r = 0; r < rows; ++r) {
      const float root = rstdev[static_cast<size_t>(r)];
      std::vector<float> normal, w, products;
      for (int64_t c = 0; c < form.cols; ++c) {
        const float g = grad.at(r, c);
        const float d =
            form.kind == NormKind::layer ? x.at(r, c) - mean[static_cast<size_t>(r)] : x.at(r, c);
        normal.push_back(form.kind == NormKind::l2 ? d : d * root);
        w.push_back(gamma.empty() ? g : g * factor(c));
        products.push_back(form.kind == NormKind::l2 ? normal.back() * g
                                                     : w.back() * normal.back());
        by_column[static_cast<size_t>(c)].push_back(g * normal.back());
        grads[static_cast<size_t>(c)].push_back(g);
      }
      const float first = tree(w) / n;
      const float total = form.kind == NormKind::l2 ? tree(products) : tree(products) / n;
      for (size_t c = 0; c < w.size(); ++c) {
        float d = form.kind == NormKind::layer ? w[c] - first : w[c];
        d = form.kind == NormKind::l2 ? d - normal[c] * (root * root) * total
                                      : d - normal[c] * total;
        d = between(root * d);
        if (!added.v.empty()) d = between(d + added.at(r, static_cast<int64_t>(c)));
        y.v.push_back(d);
      }
    }
    for (const auto& v : by_column) dgamma.push_back(ordered(v));
    for (const auto& v : grads) dbeta.push_back(ordered(v));
  }
};

// result − exact| must be at most `e` plus half a step of the stored dtype.
void expect_close(float got, DType d, double exact, double e, const char* what) {
  if (!std::isfinite(exact)) return;
  const double step = d == DType::f32 ? 0x1p-24 : d == DType::f16 ? 0x1p-11 : 0x1p-8;
  const double least = d == DType::f16 ? 0x1p-25 : 0x1p-134;
  const double bound = 1.01 * (e + (std::fabs(exact) + e) * step) + least;
  EXPECT_LE(std::fabs(got - exact), bound) << what << ": got " << got << ", exact " << exact;
}

double depth(int64_t n) { return n < 2 ? 0 : std::ceil(std::log2(static_cast<double>(n))); }

// First-order errors: a tree of depth D has at most D roundings of Σ|v|.
void check_forward64(const Scalar& s, const Mat& y) {
  const int64_t n = s.form.cols;
  const double d = depth(n);
  for (int64_t r = 0; r < s.rows; ++r) {
    double mean = 0, size = 0, square = 0, error = 0;
    const auto at = [&](int64_t c) {
      return static_cast<double>(s.x.at(r, c)) + (s.residual.v.empty() ? 0 : s.residual.at(r, c));
    };
    for (int64_t c = 0; c < n; ++c) mean += at(c) / n, size += std::fabs(at(c)) / n;
    if (s.form.kind != NormKind::layer) mean = 0;
    const double of_mean = s.form.kind == NormKind::layer ? (d + 2) * kUnit * size : 0;
    const auto of = [&](int64_t c) {
      return of_mean + kUnit * (std::fabs(at(c) - mean) + std::fabs(at(c)));
    };
    const double share = s.form.kind == NormKind::l2 ? 1 : 1.0 / static_cast<double>(n);
    for (int64_t c = 0; c < n; ++c) {
      const double v = at(c) - mean;
      square += v * v * share;
      error += (2 * std::fabs(v) + of(c)) * of(c) * share;
    }
    error += (d + 3) * kUnit * square;
    const double root = 1 / std::sqrt(square + kEps);
    const double relative = 0.5 * error / (square + kEps) + 3 * kUnit;
    for (int64_t c = 0; c < n; ++c) {
      const double gamma = s.gamma.empty() ? 1
                                           : s.gamma[static_cast<size_t>(c)] +
                                                 (s.form.zero_centered_gamma ? 1.0 : 0);
      const double beta = s.beta.empty() ? 0 : s.beta[static_cast<size_t>(c)];
      const double v = (at(c) - mean) * root * gamma;
      const double e = std::fabs(gamma) * root * of(c) + std::fabs(v) * (relative + 4 * kUnit) +
                       kUnit * (std::fabs(beta) + std::fabs(root * (at(c) - mean)));
      expect_close(y.at(r, c), y.dtype(), v + beta, e, "y in float64");
    }
  }
}

void check_backward64(const Scalar& s, const Mat& dx, const Mat* dgamma) {
  const int64_t n = s.form.cols;
  const double d = depth(n);
  std::vector<double> sums(static_cast<size_t>(n)), sizes = sums;
  for (int64_t r = 0; r < s.rows; ++r) {
    const double root = s.rstdev[static_cast<size_t>(r)];
    const bool l2 = s.form.kind == NormKind::l2;
    const double mean = s.form.kind == NormKind::layer ? s.mean[static_cast<size_t>(r)] : 0;
    const double share = l2 ? 1 : 1.0 / static_cast<double>(n);
    const auto normal = [&](int64_t c) {
      return l2 ? static_cast<double>(s.x.at(r, c)) : (s.x.at(r, c) - mean) * root;
    };
    const auto w = [&](int64_t c) {
      return s.grad.at(r, c) * (s.gamma.empty() ? 1 : static_cast<double>(s.factor(c)));
    };
    double first = 0, total = 0, first_size = 0, total_size = 0;
    for (int64_t c = 0; c < n; ++c) {
      first += w(c) * share, first_size += std::fabs(w(c)) * share;
      total += w(c) * normal(c) * share, total_size += std::fabs(w(c) * normal(c)) * share;
      sums[static_cast<size_t>(c)] += s.grad.at(r, c) * normal(c);
      sizes[static_cast<size_t>(c)] += std::fabs(s.grad.at(r, c) * normal(c));
    }
    if (s.form.kind != NormKind::layer) first = first_size = 0;
    for (int64_t c = 0; c < n; ++c) {
      const double part = normal(c) * total * (l2 ? root * root : 1);
      const double scale = normal(c) * (l2 ? root * root : 1);
      const double size = std::fabs(w(c)) + std::fabs(first) + std::fabs(part);
      const double e =
          std::fabs(root) * ((d + 4) * kUnit * first_size +
                             (d + 6) * kUnit * std::fabs(scale) * total_size + 8 * kUnit * size);
      const double extra = s.added.v.empty() ? 0 : s.added.at(r, c);
      const double v = root * (w(c) - first - part);
      expect_close(dx.at(r, c), dx.dtype(), v + extra, e + kUnit * std::fabs(v), "dx in float64");
    }
  }
  const double adds = std::min<double>(static_cast<double>(s.rows), 32) + depth(s.rows / 32 + 1);
  for (int64_t c = 0; dgamma && c < n; ++c)
    expect_close(dgamma->at(0, c), dgamma->dtype(), sums[static_cast<size_t>(c)],
                 (adds + 4) * kUnit * sizes[static_cast<size_t>(c)], "dgamma in float64");
}

struct Options {
  DType x = DType::f32, y = DType::f32, vectors = DType::f32;
  bool residual = false, sum = false, gamma = true, beta = false, shifted = false;
  Rounding rounding = Rounding::once;
  int64_t pad = 0;
  size_t shift = 0;
  bool specials = false;
};

NormForm form_of(NormKind kind, int64_t cols, const Options& o) {
  NormForm f;
  f.kind = kind;
  f.cols = cols;
  f.precision = Precision::strict;
  f.rounding = o.rounding;
  f.x = f.grad = o.x;
  f.y = o.y;
  if (kind != NormKind::l2 && o.gamma) f.gamma = o.vectors;
  if (kind == NormKind::layer && o.beta) f.beta = o.vectors;
  f.zero_centered_gamma = o.shifted;
  if (o.residual) f.residual = o.x;
  if (o.residual && o.sum) f.sum = o.y;
  f.mean = f.rstdev = true;
  return f;
}

Table table(const Mat& m) { return {m.cols(), numbers(m)}; }

void check_forward(NormKind kind, int64_t rows, int64_t cols, const Options& o) {
  const NormForm form = form_of(kind, cols, o);
  const Mat x = Mat(o.x, rows, cols, o.pad, o.shift).fill(1, o.specials);
  const Mat residual = Mat(o.x, rows, cols, o.pad + 1, o.shift).fill(2);
  const Mat gamma = Mat(o.vectors, 1, cols, 0, o.shift).fill(3);
  const Mat beta = Mat(o.vectors, 1, cols).fill(4);
  Scalar s{.form = form, .rows = rows, .x = table(x)};
  if (form.residual) s.residual = table(residual);
  if (form.gamma) s.gamma = numbers(gamma);
  if (form.beta) s.beta = numbers(beta);
  s.forward();
  const Step step = norm_step(form);
  Args a{.rows = rows};
  Args::put(a.in, {A::x, A::residual, A::gamma, A::beta},
            {x.view(), residual.view(), gamma.view(), beta.view()});
  const std::shared_ptr<const Kernel> chosen = kernel_for(step, Device::cpu).kernel;
  for (const int threads : {1, 2, 7})
    for (const auto& kernel : {chosen, executor(step)}) {
      const Threads scope(threads);
      const Mat y(o.y, rows, cols, o.pad, o.shift), sum(o.y, rows, cols, o.pad);
      const Mat mean(DType::f32, rows, 1, o.pad, o.shift), rstdev(DType::f32, rows, 1);
      Args::put(a.out, {A::y, A::sum, A::mean, A::rstdev},
                {y.view(), sum.view(), mean.view(), rstdev.view()});
      run(*kernel, a);
      EXPECT_TRUE(y.guards_hold() && sum.guards_hold() && mean.guards_hold());
      for (int64_t r = 0; r < rows; ++r) {
        expect_element(rstdev, r, 0, s.rstdev[static_cast<size_t>(r)], "rstdev");
        if (kind == NormKind::layer)
          expect_element(mean, r, 0, s.mean[static_cast<size_t>(r)], "mean");
        for (int64_t c = 0; c < cols; ++c) {
          expect_element(y, r, c, s.y.at(r, c), "y");
          if (form.sum) expect_element(sum, r, c, s.sum.at(r, c), "sum");
        }
      }
      EXPECT_TRUE(kind == NormKind::layer || mean.untouched());
      if (::testing::Test::HasFailure()) return;
      if (threads != 1 || kernel != chosen) continue;
      if (!o.specials && o.rounding == Rounding::once) check_forward64(s, y);
      EXPECT_EQ(rows * cols < 3000 ? verified(step, a).value_or("") : "", "");
    }
}

void check_backward(NormKind kind, int64_t rows, int64_t cols, const Options& o) {
  NormForm form = form_of(kind, cols, o);
  if (kind != NormKind::l2) form.dgamma = o.vectors;
  if (kind == NormKind::layer && o.beta) form.dbeta = DType::f32;
  if (o.residual) form.added = o.x;
  const Mat x = Mat(o.x, rows, cols, o.pad, o.shift).fill(1, o.specials);
  const Mat grad = Mat(o.x, rows, cols, o.pad + 2, o.shift).fill(2);
  const Mat added = Mat(o.x, rows, cols).fill(3);
  const Mat gamma = Mat(o.vectors, 1, cols, 0, o.shift).fill(4);
  const Mat mean = Mat(DType::f32, rows, 1, 3).fill(5);
  Mat rstdev(DType::f32, rows, 1, 1);
  for (int64_t r = 0; r < rows; ++r) rstdev.set(r, 0, 0.3F + 0.01F * static_cast<float>(r % 7));
  Scalar s{.form = form, .rows = rows, .x = table(x), .grad = table(grad)};
  if (form.added) s.added = table(added);
  if (form.gamma) s.gamma = numbers(gamma);
  s.mean = numbers(mean);
  s.rstdev = numbers(rstdev);
  s.backward();
  const Step step = norm_backward_step(form);
  Args a{.rows = rows};
  Args::put(a.in, {A::x, A::grad, A::added, A::gamma, A::mean_in, A::rstdev_in},
            {x.view(), grad.view(), added.view(), gamma.view(), mean.view(), rstdev.view()});
  const std::shared_ptr<const Kernel> chosen = kernel_for(step, Device::cpu).kernel;
  for (const int threads : {1, 2, 7})
    for (const auto& kernel : {chosen, executor(step)}) {
      const Threads scope(threads);
      const Mat dx(o.y, rows, cols, o.pad, o.shift), dgamma(o.vectors, 1, cols, 0, o.shift),
          dbeta(DType::f32, 1, cols);
      Args::put(a.out, {A::y, A::dgamma, A::dbeta}, {dx.view(), dgamma.view(), dbeta.view()});
      run(*kernel, a);
      EXPECT_TRUE(dx.guards_hold() && dgamma.guards_hold() && dbeta.guards_hold());
      for (int64_t c = 0; c < cols; ++c) {
        for (int64_t r = 0; r < rows; ++r) expect_element(dx, r, c, s.y.at(r, c), "dx");
        const auto i = static_cast<size_t>(c);
        if (form.dgamma) expect_element(dgamma, 0, c, s.dgamma[i], "dgamma");
        if (form.dbeta) expect_element(dbeta, 0, c, s.dbeta[i], "dbeta");
      }
      if (::testing::Test::HasFailure()) return;
      if (threads != 1 || kernel != chosen) continue;
      if (!o.specials && o.rounding == Rounding::once)
        check_backward64(s, dx, form.dgamma ? &dgamma : nullptr);
      EXPECT_EQ(rows * cols < 3000 ? verified(step, a).value_or("") : "", "");
    }
}

struct Size {
  int64_t rows, cols;
};
constexpr Size kSizes[] = {{3, 0},    {0, 13},   {0, 0},    {1, 1},   {33, 1},   {31, 7},
                           {129, 31}, {33, 127}, {5, 128},  {2, 511}, {31, 512}, {33, 513},
                           {1, 640},  {3, 1031}, {2, 4096}, {3, 2063}};

template <class Check>
void every_size(Check check) {
  size_t at = 0;
  for (const NormKind kind : kKinds)
    for (const Size& s : kSizes)
      for (const DType x : kPlain) {
        ++at;
        Options o{.x = x, .y = at % 3 ? x : kPlain[at % 9 / 3], .vectors = kPlain[at % 4 % 3]};
        o.residual = at % 4 == 1;
        o.sum = at % 8 == 1;
        o.gamma = at % 7 != 2;
        o.beta = at % 2 == 0;
        o.shifted = at % 5 == 3;
        o.rounding = at % 6 == 5 ? Rounding::eager : Rounding::once;
        o.pad = static_cast<int64_t>(at % 3);
        o.shift = at % 4;
        o.specials = at % 11 == 7;
        SCOPED_TRACE(str("kind ", static_cast<int>(kind), " ", s.rows, "x", s.cols, " ",
                         info(x).name, " to ", info(o.y).name, " form ", at));
        check(kind, s.rows, s.cols, o);
        if (::testing::Test::HasFailure()) return;
      }
}

TEST(Norm, ForwardInEverySizeAndForm) { every_size(check_forward); }
TEST(Norm, BackwardInEverySizeAndForm) { every_size(check_backward); }

TEST(Norm, FusedLoopsInEveryForm) {
  for (const NormKind kind : kKinds)
    for (const DType d : {DType::f32, DType::bf16})
      for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7, 8, 11}) {
        if (!chosen()) continue;
        Options o{.x = d, .y = d, .vectors = kPlain[bits % 3]};
        o.gamma = bits & 1;
        o.beta = bits & 2;
        o.residual = bits & 4;
        o.sum = bits % 3 == 0;
        o.shifted = bits & 8;
        SCOPED_TRACE(str("kind ", static_cast<int>(kind), " ", info(d).name, " bits ", bits));
        const NormForm form = form_of(kind, 700, o);
        EXPECT_EQ(kernel_for(norm_step(form), Device::cpu).maker,
                  cpu::isa_here().norms ? "norm" : "executor");
        check_forward(kind, 35, 700, o);
        check_backward(kind, 67, 700, o);
        if (HasFailure()) return;
      }
}

TEST(Norm, LongRowsAndManyRows) {
  for (const NormKind kind : kKinds) {
    check_forward(kind, 2, 65537, {.x = DType::bf16, .y = DType::bf16, .beta = true});
    check_backward(kind, 2, 65537, {});
    check_backward(kind, 300, 161, {.x = DType::bf16, .y = DType::bf16, .beta = true});
    check_backward(kind, 300, 5, {.x = DType::f16, .y = DType::f16, .beta = true});
    if (HasFailure()) return;
  }
}

TEST(Norm, ResultsPastTheCacheHaveTheSameBits) {
  constexpr int64_t kRows = 130, kCols = 4096;
  for (const DType d : {DType::f32, DType::bf16}) {
    const Mat x = Mat(d, kRows, kCols).fill(1), g = Mat(d, kRows, kCols).fill(2);
    const Mat root = Mat(DType::f32, kRows, 1).fill(3), gamma = Mat(d, 1, kCols).fill(4);
    Options o{.x = d, .y = d, .vectors = d};
    NormForm form = form_of(NormKind::rms, kCols, o);
    form.dgamma = d;
    for (const bool backward : {false, true}) {
      const Step step = backward ? norm_backward_step(form) : norm_step(form);
      std::vector<std::vector<uint8_t>> results;
      const std::shared_ptr<const Kernel> chosen = kernel_for(step, Device::cpu).kernel;
      for (const auto& kernel : {chosen, executor(step)}) {
        std::vector<uint8_t> memory(static_cast<size_t>(kRows * kCols * 4 + 64));
        const size_t skip = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        const Mat rstdev(DType::f32, kRows, 1), dgamma(d, 1, kCols);
        Args a{.rows = kRows};
        Args::put(a.in, {A::x, A::grad, A::gamma, A::rstdev_in},
                  {x.view(), g.view(), gamma.view(), root.view()});
        Args::put(a.out, {A::y, A::rstdev, A::mean, A::dgamma},
                  {matrix(memory.data() + skip, d, kRows, kCols), rstdev.view(), rstdev.view(),
                   dgamma.view()});
        run(*kernel, a);
        results.emplace_back(
            memory.begin() + static_cast<int64_t>(skip),
            memory.begin() + static_cast<int64_t>(skip) + kRows * kCols * info(d).bytes);
      }
      EXPECT_EQ(results[0], results[1]) << info(d).name << " backward " << backward;
    }
  }
}

TEST(Norm, InPlace) {
  for (const NormKind kind : kKinds)
    for (const DType d : kPlain)
      for (const int64_t cols : {37, 700}) {
        Mat x = Mat(d, 35, cols, 1, 2).fill(1), y(d, 35, cols, 1, 2);
        const NormForm form = form_of(kind, cols, {.x = d, .y = d, .gamma = false});
        Args a{.rows = 35};
        const Mat mean(DType::f32, 35, 1), rstdev(DType::f32, 35, 1);
        Args::put(a.in, {A::x}, {x.view()});
        Args::put(a.out, {A::mean, A::rstdev}, {mean.view(), rstdev.view()});
        const auto kernel = kernel_for(norm_step(form), Device::cpu).kernel;
        a.out[A::y] = y.view();
        run(*kernel, a);
        a.out[A::y] = x.view();
        run(*kernel, a);
        EXPECT_TRUE(x.same_bytes(y)) << static_cast<int>(kind) << " " << info(d).name;
      }
}

// The result of a row depends only on that row, so calls may be split anywhere.
TEST(Norm, RowsMaySplitOverCalls) {
  const Mat x = Mat(DType::bf16, 37, 611).fill(1);
  const Options o{.x = DType::bf16, .y = DType::bf16, .gamma = false};
  const auto kernel = kernel_for(norm_step(form_of(NormKind::layer, 611, o)), Device::cpu).kernel;
  const auto halves = [&](int64_t k) {
    const Mat y(DType::bf16, 37, 611), columns(DType::f32, 37, 1);
    for (const auto& [first, n] : {std::pair{int64_t{0}, k}, {k, 37 - k}}) {
      Args a{.rows = n};
      a.in[A::x] = x.rows_from(first, n);
      a.out[A::y] = y.rows_from(first, n);
      a.out[A::mean] = a.out[A::rstdev] = columns.view();
      run(*kernel, a);
    }
    return y;
  };
  for (const int64_t k : {1, 2, 17, 36}) EXPECT_TRUE(halves(k).same_bytes(halves(0))) << k;
}

// Every mode, dtype and orientation after a residual add, with odd strides and addresses.
void check_quantised(const Spec& given, int64_t rows, int64_t cols, bool backward) {
  Spec spec = given;
  NormForm form = form_of(NormKind::layer, cols, {.x = DType::bf16, .residual = !backward});
  const Mat x = Mat(DType::bf16, rows, cols, 1).fill(1, rows == 7),
            other = Mat(DType::bf16, rows, cols).fill(2), gamma = Mat(DType::f32, 1, cols).fill(3);
  const Mat columns[2] = {Mat(DType::f32, rows, 1).fill(4), Mat(DType::f32, rows, 1).fill(5)};
  Scalar s{.form = form, .rows = rows, .x = table(x)};
  (backward ? s.grad : s.residual) = table(other);
  s.gamma = numbers(gamma);
  if (backward) {
    s.mean = numbers(columns[0]);
    s.rstdev = numbers(columns[1]);
    s.backward();
  } else {
    s.forward();
  }
  const Quantised want = quantise_ref(spec, s.y.v, rows, cols);
  for (const int threads : {1, 2}) {
    const Threads scope(threads);
    const Encoded y(spec, rows, cols, true);
    const Tensor t = y.tensor();
    const Mat mean(DType::f32, rows, 1), rstdev(DType::f32, rows, 1), sums(DType::f32, 1, cols);
    Args a{.rows = rows};
    a.in[A::x] = x.view();
    a.in[backward ? A::grad : A::residual] = other.view();
    Args::put(a.in, {A::gamma, A::mean_in, A::rstdev_in},
              {gamma.view(), columns[0].view(), columns[1].view()});
    a.in[A::y_scale] = spec.mode == Scaling::delayed ? t.scale : t.amax;
    static_assert(A::y == 0);  // so that its views have the indices of an encoder
    a.out[Encoder::row_data] = t.rowwise.data;
    a.out[Encoder::row_scale] = t.rowwise.scale_inv;
    a.out[Encoder::column_data] = t.columnwise.data;
    a.out[Encoder::column_scale] = t.columnwise.scale_inv;
    a.out[Encoder::health] = t.health;
    Args::put(a.out, {A::y_amax, A::mean, A::rstdev, A::dgamma},
              {t.amax, mean.view(), rstdev.view(), sums.view()});
    form.y = Operand(t);
    if (backward) form.dgamma = DType::f32;
    const auto go = [&] {
      const Step step = backward ? norm_backward_step(form) : norm_step(form);
      run(*kernel_for(step, Device::cpu).kernel, a);
      EXPECT_EQ(threads == 1 && rows * cols < 6000 ? verified(step, a).value_or("") : "", "");
    };
    if (spec.mode == Scaling::current) {
      form.y_amax = form.amax_only = true;
      go();
      form.y_amax = form.amax_only = false;
    }
    form.y_amax = spec.mode == Scaling::delayed;
    go();
    EXPECT_EQ(y.differs(want), "") << spec.text();
    for (int64_t c = 0; backward && c < cols; ++c)
      expect_element(sums, 0, c, s.dgamma[static_cast<size_t>(c)], "dgamma");
  }
}

TEST(Norm, QuantisedResultsInEveryMode) {
  for (const Size& size : {Size{33, 31}, Size{7, 513}, Size{130, 161}, Size{0, 40}, Size{3, 0}})
    for (const Spec& spec : all_specs(true)) {
      if (!chosen()) continue;
      SCOPED_TRACE(str(size.rows, "x", size.cols, " ", spec.text()));
      check_quantised(spec, size.rows, size.cols, false);
      check_quantised(spec, size.rows, size.cols, true);
      if (HasFailure()) return;
    }
}

TEST(Norm, OrderedSums) {
  for (const int64_t rows : {0, 1, 2, 31, 32, 33, 63, 64, 65, 97, 128, 129, 300, 1000})
    for (const int64_t cols : {1, 5, 600}) {
      const Mat x = Mat(DType::f32, rows, cols, 1).fill(1);
      StepBuilder build("ordered", cols, Precision::strict);
      const Expr v = build.load({From::tile, 0, DType::f32});
      build.store({.to = To::column_sum, .arg = 0, .ordered = true}, v);
      build.store({.to = To::column_sum, .arg = 1}, v);
      const Step step = build.finish();
      for (const int threads : {1, 2, 7}) {
        const Threads scope(threads);
        const Mat by_order(DType::f32, 1, cols), by_tree(DType::f32, 1, cols);
        Args a{.in = {x.view()}, .out = {by_order.view(), by_tree.view()}, .rows = rows};
        run(*executor(step), a);
        for (int64_t c = 0; c < cols; ++c) {
          std::vector<float> column;
          for (int64_t r = 0; r < rows; ++r) column.push_back(x.at(r, c));
          EXPECT_EQ(by_order.code(0, c), bits(ordered(column))) << rows << "x" << cols;
          EXPECT_EQ(by_tree.code(0, c), bits(tree(column))) << rows << "x" << cols;
        }
        if (HasFailure()) return;
      }
    }
}

// Totals together with dropout, a bias, interleaved columns, sums and an amax in one step.
void check_mixed(int64_t rows, int64_t cols) {
  StepBuilder build("mixed", cols, Precision::strict);
  const ColumnMap map{4, 8, 4};
  const Expr u = build.load({.from = From::random, .arg = 1});
  const Expr x = build.load({From::tile, 0, DType::f16, map});
  const Expr kept = select(u >= 20000.0F, x + build.load({From::row, 1, DType::bf16}), 0.0F);
  const Expr scale = build.load({From::column, 2, DType::bf16});
  const Expr first = build.total(kept);
  const Expr second = build.total(kept * first + scale);
  const Expr third = build.total(scale);  // the same value in every column
  const Expr y = kept - second * scale + third;
  build.store({To::tile, 0, DType::bf16, map}, y);
  build.store({To::tile, 1, DType::f32, {}}, second);
  build.store({To::row_sum, 2, DType::f32, {}}, y);
  build.store({To::sum, 3, DType::f32, {}}, y);
  build.store({To::amax, 4, DType::f32, {}}, y);
  build.store({To::column, 5, DType::f16, {}}, first + scale);
  build.store({To::column_sum, 6, DType::f32, {}}, y);
  const Step step = build.finish();
  const std::array<uint64_t, 5> state{7, 9, 3, 5, 1000};
  const Mat in = Mat(DType::f16, rows, 2 * cols, 1).fill(1),
            bias = Mat(DType::bf16, 1, cols).fill(2), column = Mat(DType::bf16, rows, 1, 2).fill(3);
  for (const int threads : {1, 2, 7}) {
    const Threads scope(threads);
    const Mat tile(DType::bf16, rows, 2 * cols), wide(DType::f32, rows, cols),
        row(DType::f32, rows, 1), total(DType::f32, 1, 1), most(DType::f32, 1, 1),
        numbers(DType::f16, rows, 1, 1), columns(DType::f32, 1, cols);
    Args a{.in = {in.view(), bias.view(), column.view()},
           .out = {tile.view(), wide.view(), row.view(), total.view(), most.view(), numbers.view(),
                   columns.view()},
           .rows = rows,
           .random = state.data()};
    run(*kernel_for(step, Device::cpu).kernel, a);
    EXPECT_EQ(threads == 1 && rows * cols < 3000 ? verified(step, a).value_or("") : "", "");
    std::vector<float> all;
    uint32_t amax = 0;
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<float> values, products;
      for (int64_t c = 0; c < cols; ++c) {
        const uint64_t i =
            (state[2] + static_cast<uint64_t>(r)) * state[4] + state[3] + static_cast<uint64_t>(c);
        const uint32_t word = philox(state[0], i / 8, state[1] + 1).w[i % 8 / 2];
        const uint32_t u16 = i % 2 ? word >> 16 : word & 0xffffU;
        values.push_back(u16 >= 20000 ? in.at(r, map(c)) + bias.at(0, c) : 0.0F);
      }
      const float t = tree(values), s = column.at(r, 0);
      for (const float v : values) products.push_back(v * t + s);
      const float t2 = tree(products);
      const float t3 = tree(std::vector<float>(static_cast<size_t>(cols), s));
      std::vector<float> line;
      for (int64_t c = 0; c < cols; ++c) {
        line.push_back(values[static_cast<size_t>(c)] - t2 * s + t3);
        amax = std::max(amax, bits(line.back()) & 0x7fffffffU);
        expect_element(tile, r, map(c), line.back(), "tile");
        expect_element(wide, r, c, t2, "total in every column");
      }
      expect_element(row, r, 0, tree(line), "row sum");
      expect_element(numbers, r, 0, t + s, "column");
      all.insert(all.end(), line.begin(), line.end());
    }
    expect_element(total, 0, 0, tree(all), "sum");
    EXPECT_EQ(most.code(0, 0), amax);
    for (int64_t c = 0; c < cols; ++c) {
      std::vector<float> list;
      for (int64_t r = 0; r < rows; ++r) list.push_back(all[static_cast<size_t>(r * cols + c)]);
      expect_element(columns, 0, c, tree(list), "column sum");
    }
    EXPECT_TRUE(numbers.guards_hold());
  }
}

TEST(Norm, TotalsBesideEveryOtherLoadAndStore) {
  for (const Size& s : {Size{1, 4}, Size{33, 8}, Size{7, 512}, Size{130, 36}, Size{5, 1100}}) {
    SCOPED_TRACE(str(s.rows, "x", s.cols));
    check_mixed(s.rows, s.cols);
    if (HasFailure()) return;
  }
}

TEST(Norm, VerificationSeesAWrongNumber) {
  const Mat x = Mat(DType::f32, 5, 40).fill(1);
  Mat y(DType::f32, 5, 40), mean(DType::f32, 5, 1), rstdev(DType::f32, 5, 1);
  const Step step = norm_step(form_of(NormKind::layer, 40, {.gamma = false}));
  Args a{.rows = 5};
  Args::put(a.in, {A::x}, {x.view()});
  Args::put(a.out, {A::y, A::mean, A::rstdev}, {y.view(), mean.view(), rstdev.view()});
  run(*executor(step), a);
  EXPECT_FALSE(verified(step, a));
  y.set(3, 7, y.at(3, 7) * 1.0001F);
  EXPECT_TRUE(verified(step, a));
  run(*executor(step), a);
  rstdev.set(2, 0, rstdev.at(2, 0) * 1.0001F);
  EXPECT_TRUE(verified(step, a));
}

TEST(Norm, FusedLoopsRefuseWithAReason) {
  const auto why = [](const Step& step) {
    const Attempt attempt = cpu::make_norm(step, cpu::here());
    const auto* refusal = std::get_if<Refusal>(&attempt);
    return refusal ? refusal->why : "";
  };
  EXPECT_NE(why(norm_step(form_of(NormKind::rms, 64, {}))), "");  // short rows
  for (const DType d : {DType::f16, DType::bf16})                 // no loops, mixed dtypes
    EXPECT_NE(why(norm_step(form_of(NormKind::rms, 512, {.x = d}))), "");
  StepBuilder build("other", 512, Precision::strict);
  const Expr x = build.load({From::tile, 0, DType::f32});
  build.store({To::tile, 0, DType::f32}, x - build.total(x * x * x));
  EXPECT_NE(why(build.finish()), "");
}

}  // namespace
}  // namespace tenon::test
