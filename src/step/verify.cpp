// The oracle's value and bound for every store, sums by the same tree.
#include "step/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "expr/evaluate.h"
#include "tenon/error.h"

namespace tenon {

namespace {

struct Value {
  double v = 0, e = 0;
};

float element(const View& v, DType dtype, int64_t r, int64_t c) {
  const int bytes = info(dtype).bytes;
  uint32_t code = 0;
  std::memcpy(&code, static_cast<const char*>(v.data) + (r * v.stride + c) * bytes,
              static_cast<size_t>(bytes));
  return decode(dtype, code);
}

Value add(const Value& a, const Value& b) {
  constexpr double kOverflow32 = 0x1.ffffffp127;
  Value sum{a.v + b.v, a.e + b.e};
  sum.e += 0.5 * ulp32(sum.v);
  if (std::isfinite(sum.v) && std::fabs(sum.v) + sum.e >= kOverflow32)
    sum.e = std::numeric_limits<double>::infinity();
  return sum;
}

Value tree(std::vector<Value> v) {
  if (v.empty()) return {};
  while (v.size() > 1) {
    const size_t pairs = v.size() / 2;
    for (size_t i = 0; i < pairs; ++i) v[i] = add(v[2 * i], v[2 * i + 1]);
    if (v.size() % 2) v[pairs] = v.back();
    v.resize(pairs + v.size() % 2);
  }
  return v[0];
}

// The bits of |v| as a number: NaN is the largest.
Value largest(const std::vector<Value>& v) {
  Value most;
  for (const Value& x : v) {
    if (std::isnan(x.v)) return x;
    if (std::isinf(x.e)) return {0, x.e};
    most.v = std::max(most.v, std::fabs(x.v));
    most.e = std::max(most.e, x.e);
  }
  return most;
}

// The tightest error any result asks for; an amax follows the others.
double native_bound(const Step& step) {
  if (step.effective_precision() == Precision::strict) return 0;
  double least = 1;
  for (const Store& s : step.stores)
    if (s.to != Store::To::amax) least = std::min(least, native_error(s.dtype));
  return least;
}

class Verifier {
 public:
  Verifier(const Step& step, int64_t rows, std::span<const View> out)
      : step_(step), rows_(rows), out_(out) {}

  std::optional<std::string> store(const Store& s, const std::vector<Value>& values) const {
    const View& out = out_[s.arg];
    const auto at = [&](int64_t r, int64_t c) {
      return values[static_cast<size_t>(r * step_.cols + c)];
    };
    std::optional<std::string> wrong;
    const auto expect = [&](const Value& exact, int64_t r, int64_t c) {
      const float got = element(out, s.dtype, r, c);
      if (wrong || within(got, s.dtype, exact.v, exact.e)) return;
      wrong =
          str(step_.name, ": ", kStoreNames[static_cast<size_t>(s.to)], " (", r, ", ", c, ") is ",
              got, ", exact ", exact.v, " with bound ", exact.e, " in ", info(s.dtype).name);
    };
    const int64_t rows = rows_;
    const int64_t cols = step_.cols;
    switch (s.to) {
      case Store::To::tile:
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < cols; ++c) expect(at(r, c), r, s.columns(c));
        break;
      case Store::To::column_sum:
        for (int64_t c = 0; c < cols; ++c) {
          std::vector<Value> column;
          for (int64_t r = 0; r < rows; ++r) column.push_back(at(r, c));
          expect(tree(std::move(column)), 0, s.columns(c));
        }
        break;
      case Store::To::row_sum:
        for (int64_t r = 0; r < rows; ++r) {
          const auto first = values.begin() + r * cols;
          expect(tree({first, first + cols}), r, 0);
        }
        break;
      case Store::To::sum:
        expect(tree(values), 0, 0);
        break;
      case Store::To::amax:
        expect(largest(values), 0, 0);
        break;
    }
    return wrong;
  }

 private:
  const Step& step_;
  int64_t rows_;
  std::span<const View> out_;
};

}  // namespace

float load_element(const Load& l, std::span<const View> in, std::span<const float> parameters,
                   int64_t r, int64_t c) {
  switch (l.from) {
    case Load::From::tile:
      return element(in[l.arg], l.dtype, r, l.columns(c));
    case Load::From::row:
      return element(in[l.arg], l.dtype, 0, l.columns(c));
    case Load::From::column:
      return element(in[l.arg], l.dtype, r, 0);
    case Load::From::scalar:
      return element(in[l.arg], l.dtype, 0, 0);
    default:
      return parameters[l.arg];
  }
}

std::optional<std::string> verify(const Step& step, int64_t rows, std::span<const View> in,
                                  std::span<const View> out, std::span<const float> parameters) {
  const auto n = static_cast<size_t>(rows * step.cols);
  std::vector<std::vector<float>> loads;
  std::vector<const float*> pointers;
  for (const Load& l : step.loads) {
    std::vector<float>& values = loads.emplace_back();
    values.reserve(n);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c)
        values.push_back(load_element(l, in, parameters, r, c));
  }
  for (const auto& values : loads) pointers.push_back(values.data());
  const Oracle oracle(*step.graph, step.roots(), native_bound(step));
  const Evaluation exact = oracle.run(n, pointers);
  const Verifier verifier(step, rows, out);
  for (size_t k = 0; k < step.stores.size(); ++k) {
    std::vector<Value> values(n);
    for (size_t i = 0; i < n; ++i) values[i] = {exact.value[k][i], exact.bound[k][i]};
    if (auto wrong = verifier.store(step.stores[k], values)) return wrong;
  }
  return std::nullopt;
}

}  // namespace tenon
