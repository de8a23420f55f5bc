// Computes the oracle's value and bound for every store, and sums with the same tree.
#include "support/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/philox.h"
#include "expr/evaluate.h"
#include "support/verify_encoded.h"
#include "support/verify_product.h"
#include "tenon/error.h"

namespace tenon {

namespace {

using Value = Bounded;

float element(const View& v, int64_t r, int64_t c) {
  return decode(v.dtype, code_at(v, r * v.stride + c));
}

// If fp32 may have overflowed, sums with this value have no bound.
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

// Sums blocks of 32 in index order, then the tree.
Value ordered(const std::vector<Value>& v) {
  constexpr size_t kBlock = 32;
  std::vector<Value> blocks;
  for (size_t i = 0; i < v.size(); ++i) {
    if (i % kBlock == 0)
      blocks.push_back(v[i]);
    else
      blocks.back() = add(summand(blocks.back()), summand(v[i]));
  }
  return tree(std::move(blocks));
}

// Compares the bits of |v| as integers: NaN is the largest.
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
      if (s.join && got >= exact.v) return;  // got may be the previous value of the view
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
          expect(s.ordered ? ordered(column) : tree(std::move(column)), 0, s.columns(c));
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
        break;  // checked by the encoder
      case Store::To::column:
        for (int64_t r = 0; r < rows; ++r) expect(values[static_cast<size_t>(r)], r, 0);
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

namespace {

// The largest rounding error of v, if v itself is uncertain by `e`. Subnormals have the spacing of
// the smallest normal number.
double half_ulp(double v, double e, DType dtype) {
  const DTypeInfo& i = info(dtype);
  const double most = std::fabs(v) + e;
  const int exponent = most > 0 ? std::max(std::ilogb(most), 1 - i.bias) : 1 - i.bias;
  return std::isfinite(most) ? std::ldexp(0.5, exponent - i.mantissa_bits) : 0;
}

// The loads of a step at every element. Totals have bounds after they are computed.
class Inputs {
 public:
  Inputs(const Step& step, const RunArgs& args, const std::vector<Value>& product)
      : step_(step), args_(args), values_(step.loads.size()), errors_(step.loads.size()) {
    const auto n = static_cast<size_t>(args.rows * step.cols);
    for (size_t i = 0; i < values_.size(); ++i) {
      values_[i].reserve(n);
      for (int64_t r = 0; r < args.rows; ++r)
        for (int64_t c = 0; c < step.cols; ++c)
          values_[i].push_back(load_element(step.loads[i], args, r, c));
    }
    if (step.gemm()) put_product(product);
    for (uint32_t t = 0; t < step.totals().size(); ++t) find_total(t);
  }

  // Values per root, row by row. One value per row if the root depends only on the row.
  [[nodiscard]] std::vector<std::vector<Value>> run(std::span<const uint32_t> roots) const {
    return evaluate(roots, values_, errors_, static_cast<size_t>(args_.rows * step_.cols));
  }
  [[nodiscard]] std::vector<Value> column(uint32_t root) const {
    auto values = std::vector<std::vector<float>>(step_.loads.size());
    auto errors = std::vector<std::vector<double>>(step_.loads.size());
    for (size_t i = 0; i < step_.loads.size(); ++i) {
      const Load& l = step_.loads[i];
      const bool total = l.from == Load::From::total;
      const bool known = total || l.from == Load::From::column || l.from == Load::From::scalar ||
                         l.from == Load::From::parameter;
      for (int64_t r = 0; r < args_.rows; ++r) {
        const Value v = total ? totals_[l.arg][static_cast<size_t>(r)] : Value{};
        values[i].push_back(total   ? static_cast<float>(v.v)
                            : known ? load_element(l, args_, r, 0)
                                    : 0);
        if (total) errors[i].push_back(v.e);
      }
    }
    return evaluate(std::span(&root, 1), values, errors, static_cast<size_t>(args_.rows))[0];
  }

 private:
  [[nodiscard]] std::vector<std::vector<Value>> evaluate(
      std::span<const uint32_t> roots, const std::vector<std::vector<float>>& values,
      const std::vector<std::vector<double>>& errors, size_t n) const {
    std::vector<const float*> pointers;
    std::vector<const double*> bounds;
    for (size_t i = 0; i < values.size(); ++i) {
      pointers.push_back(values[i].data());
      bounds.push_back(errors[i].empty() ? nullptr : errors[i].data());
    }
    const Evaluation exact =
        Oracle(*step_.graph, roots, step_.native_error()).run(n, pointers, bounds);
    std::vector<std::vector<Value>> out(roots.size(), std::vector<Value>(n));
    for (size_t k = 0; k < roots.size(); ++k)
      for (size_t i = 0; i < n; ++i) out[k][i] = {exact.value[k][i], exact.bound[k][i]};
    return out;
  }

  void put_product(const std::vector<Value>& product) {
    for (size_t i = 0; i < step_.loads.size(); ++i) {
      const Load& l = step_.loads[i];
      if (l.from != Load::From::product) continue;
      for (int64_t k = 0; k < args_.rows * step_.cols; ++k) {
        const int64_t place = k / step_.cols * step_.gemm()->cols + l.columns(k % step_.cols);
        const Value& v = product[static_cast<size_t>(place)];
        values_[i][static_cast<size_t>(k)] = static_cast<float>(v.v);
        errors_[i].push_back(v.e + (l.dtype == DType::f32 ? 0 : half_ulp(v.v, v.e, l.dtype)));
      }
    }
  }

  void find_total(uint32_t t) {
    const std::vector<Value> summands = run(std::span(&step_.totals()[t], 1))[0];
    std::vector<Value>& totals = totals_.emplace_back();
    for (int64_t r = 0; r < args_.rows; ++r) {
      const auto first = summands.begin() + r * step_.cols;
      Value sum = tree({first, first + step_.cols});
      // A load is an fp32 value. Its rounding error is added to the bound.
      const double kept = static_cast<float>(sum.v);
      if (std::isfinite(kept)) sum.e += std::fabs(kept - sum.v);
      totals.push_back({kept, sum.e});
    }
    for (size_t i = 0; i < step_.loads.size(); ++i) {
      if (step_.loads[i].from != Load::From::total || step_.loads[i].arg != t) continue;
      for (int64_t k = 0; k < args_.rows * step_.cols; ++k) {
        const Value& v = totals[static_cast<size_t>(k / step_.cols)];
        values_[i][static_cast<size_t>(k)] = static_cast<float>(v.v);
        errors_[i].push_back(v.e);
      }
    }
  }

  const Step& step_;
  const RunArgs& args_;
  std::vector<std::vector<float>> values_;
  std::vector<std::vector<double>> errors_;
  std::vector<std::vector<Value>> totals_;  // per total, one value per row
};

}  // namespace

std::optional<std::string> verify(const Step& step, const RunArgs& args) {
  return verify_losing(step, args, 0);
}

std::optional<std::string> verify_losing(const Step& step, const RunArgs& given, double lost) {
  const std::vector<Value> product =
      step.gemm() ? products(step, given, lost) : std::vector<Value>{};
  RunArgs args = given;
  if (step.rows) args.rows = step.rows;
  const int64_t rows = args.rows;
  const Inputs inputs(step, args, product);
  std::vector<uint32_t> roots;
  for (const Store& s : step.stores) roots.push_back(s.value);
  const std::vector<std::vector<Value>> exact = inputs.run(roots);
  const Verifier verifier(step, rows, args.out);
  std::vector<std::vector<Value>> tensors;
  for (const Encoder& e : step.encoders) tensors.emplace_back(static_cast<size_t>(rows * e.cols));
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    const bool column = s.to == Store::To::column;
    if (auto wrong = verifier.store(s, column ? inputs.column(s.value) : exact[k])) return wrong;
    if (s.to != Store::To::encoded) continue;
    const int64_t width = step.encoders[s.arg].cols;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c)
        tensors[s.arg][static_cast<size_t>(r * width + s.columns(c))] =
            exact[k][static_cast<size_t>(r * step.cols + c)];
  }
  for (size_t i = 0; i < step.encoders.size(); ++i)
    if (const auto wrong = verify_encoded(step.encoders[i], args, tensors[i]))
      return step.name + ": " + *wrong;
  return std::nullopt;
}

}  // namespace tenon
