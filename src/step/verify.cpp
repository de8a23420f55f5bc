// The oracle's value and bound for every store, sums by the same tree.
#include "step/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/philox.h"
#include "expr/evaluate.h"
#include "step/verify_encoded.h"
#include "tenon/error.h"

namespace tenon {

namespace {

using Value = Bounded;

float element(const View& v, int64_t r, int64_t c) {
  return decode(v.dtype, code_at(v, r * v.stride + c));
}

// Where fp32 may have overflowed, nothing is promised of what is added to it.
Value summand(Value x) {
  if (std::isfinite(x.v) && std::fabs(x.v) + x.e >= kOverflow32)
    x.e = std::numeric_limits<double>::infinity();
  return x;
}

Value add(const Value& a, const Value& b) {
  Value sum{a.v + b.v, a.e + b.e};
  sum.e += 0.5 * ulp32(sum.v);
  return summand(sum);
}

Value tree(std::vector<Value> v) {
  if (v.empty()) return {};
  if (v.size() > 1) std::ranges::transform(v, v.begin(), summand);
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
  double least = native_error(DType::e4m3);  // what an amax alone is worth
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
      const float got = element(out, r, c);
      if (wrong || within(got, s.dtype, exact.v, exact.e)) return;
      if (s.join && got >= exact.v) return;  // what the view held before
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
      case Store::To::encoded:
        break;  // by encoder
      case Store::To::column:
        for (int64_t r = 0; r < rows && cols > 0; ++r) expect(at(r, 0), r, 0);
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

float load_element(const Load& l, const RunArgs& args, int64_t r, int64_t c) {
  const auto in = [&]() -> const View& { return args.in[l.arg]; };
  switch (l.from) {
    case Load::From::tile:
      return l.transposed ? element(in(), l.columns(c), r) : element(in(), r, l.columns(c));
    case Load::From::row:
      return element(in(), 0, l.columns(c));
    case Load::From::column:
      return element(in(), r, 0);
    case Load::From::scalar:
      return element(in(), 0, 0);
    case Load::From::block: {
      const Blocks b = l.format.blocks(l.orientation);
      return element(in(), 0,
                     scale_offset(l.format, l.orientation, r / b.rows, l.columns(c) / b.cols,
                                  {in().rows, in().cols}, in().stride));
    }
    case Load::From::random: {
      const uint64_t* s = args.random;
      const uint64_t i = (s[2] + static_cast<uint64_t>(r)) * s[4] + s[3] + static_cast<uint64_t>(c);
      const uint32_t word = philox(s[0], i / 8, s[1] + l.arg).w[i % 8 / 2];
      return static_cast<float>(i % 2 ? word >> 16 : word & 0xffffU);
    }
    case Load::From::product:
    case Load::From::total:
      break;  // not in memory
    case Load::From::parameter:
      return args.parameters[l.arg];
  }
  return 0;
}

std::optional<std::string> verify(const Step& step, const RunArgs& args) {
  const int64_t rows = args.rows;
  const auto n = static_cast<size_t>(rows * step.cols);
  std::vector<std::vector<float>> loads;
  std::vector<const float*> pointers;
  for (const Load& l : step.loads) {
    std::vector<float>& values = loads.emplace_back();
    values.reserve(n);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c) values.push_back(load_element(l, args, r, c));
  }
  for (const auto& values : loads) pointers.push_back(values.data());
  const Oracle oracle(*step.graph, step.roots(), native_bound(step));
  const Evaluation exact = oracle.run(n, pointers);
  const Verifier verifier(step, rows, args.out);
  std::vector<std::vector<Value>> tensors;
  for (const Encoder& e : step.encoders) tensors.emplace_back(static_cast<size_t>(rows * e.cols));
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    std::vector<Value> values(n);
    for (size_t i = 0; i < n; ++i) values[i] = {exact.value[k][i], exact.bound[k][i]};
    if (auto wrong = verifier.store(s, values)) return wrong;
    if (s.to != Store::To::encoded) continue;
    const int64_t width = step.encoders[s.arg].cols;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c)
        tensors[s.arg][static_cast<size_t>(r * width + s.columns(c))] =
            values[static_cast<size_t>(r * step.cols + c)];
  }
  for (size_t i = 0; i < step.encoders.size(); ++i)
    if (const auto wrong = verify_encoded(step.encoders[i], args, tensors[i]))
      return step.name + ": " + *wrong;
  return std::nullopt;
}

}  // namespace tenon
