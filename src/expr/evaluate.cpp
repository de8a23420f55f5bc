// Each word in float64 with its derivatives, and the propagation of the bound E.
#include "expr/evaluate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "expr/order.h"

namespace tenon {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kOverflow32 = 0x1.ffffffp127;  // fp32 rounds larger values to infinity
constexpr double kTwoOverRootPi = 1.1283791670955126;
constexpr size_t kBatch = 256;

double sigmoid64(double x) {
  const double e = std::exp(-std::fabs(x));
  return (x < 0 ? e : 1.0) / (1.0 + e);
}

double times(double derivative, double error) {
  return derivative == 0 || error == 0 ? 0 : std::fabs(derivative) * error;  // 0·∞ is 0
}

bool holds(Rel rel, double a, double b) {
  switch (rel) {
    case Rel::lt:
      return a < b;
    case Rel::le:
      return a <= b;
    case Rel::gt:
      return a > b;
    case Rel::ge:
      return a >= b;
    case Rel::eq:
      return a == b;
    default:
      return a != b;
  }
}

double min64(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::nan("");
  return a < b || (a == b && std::signbit(a)) ? a : b;
}

struct Value {
  double v = 0, e = 0;
};

// A transcendental word and the magnitude of its derivative at x, in float64.
struct Function {
  double (*f)(double);
  double (*slope)(double x, double y);
};

constexpr std::array<Function, 8> kFunctions{{
    {[](double x) { return std::exp(x); }, [](double, double y) { return y; }},
    {[](double x) { return std::expm1(x); }, [](double, double y) { return y + 1; }},
    {[](double x) { return std::log(x); }, [](double x, double) { return 1 / x; }},
    {[](double x) { return std::log1p(x); }, [](double x, double) { return 1 / (1 + x); }},
    {sigmoid64, [](double x, double y) { return y * sigmoid64(-x); }},
    {[](double x) { return std::tanh(x); },
     [](double x, double) { return 4 * sigmoid64(2 * x) * sigmoid64(-2 * x); }},
    {[](double x) { return std::erf(x); },
     [](double x, double) { return kTwoOverRootPi * std::exp(-x * x); }},
    {[](double x) { return std::erfc(x); },
     [](double x, double) { return kTwoOverRootPi * std::exp(-x * x); }},
}};

const Function& function(Word w) { return kFunctions[index(w) - index(Word::exp)]; }

// Exact unless the argument is within its error of a midpoint. Then either neighbour is correct.
Value rounded(const Value& a, DType dtype) {
  const double v = nearest(a.v, dtype);
  const double low = nearest(a.v - a.e, dtype);
  const double high = nearest(a.v + a.e, dtype);
  const auto gap = [&](double other) { return other == v ? 0 : std::fabs(other - v); };
  return {v, a.e == 0 || std::isinf(a.e) ? a.e : std::max(gap(low), gap(high))};
}

// An overflowed operand makes arithmetic unbounded even if the other factor is 0: ∞·0 is NaN in
// fp32.
bool unbounded(const Node& n, const Value& a, const Value& b) {
  return index(n.word) <= index(Word::div) && (std::isinf(a.e) || std::isinf(b.e));
}

// The exact value and the propagated error of one node, without the rounding of the node itself.
Value propagate(const Node& n, const Value& a, const Value& b, const Value& c, const Value& d) {
  switch (n.word) {
    case Word::add:
      return {a.v + b.v, a.e + b.e};
    case Word::sub:
      return {a.v - b.v, a.e + b.e};
    case Word::mul:
      return {a.v * b.v, times(b.v, a.e) + times(a.v, b.e)};
    case Word::div:
      return {a.v / b.v, times(1 / b.v, a.e) + times(a.v / b.v / b.v, b.e)};
    case Word::min:
    case Word::max: {
      const double v = n.word == Word::min ? min64(a.v, b.v) : -min64(-a.v, -b.v);
      const bool close = std::fabs(a.v - b.v) <= a.e + b.e;
      return {v, close ? std::max(a.e, b.e) : v == a.v ? a.e : b.e};
    }
    case Word::neg:
      return {-a.v, a.e};
    case Word::abs:
      return {std::fabs(a.v), a.e};
    case Word::sqrt: {
      const double y = std::sqrt(a.v);
      return {y, times(0.5 / y, a.e)};
    }
    case Word::rsqrt: {
      const double y = 1 / std::sqrt(a.v);
      return {y, times(0.5 * y / a.v, a.e)};
    }
    case Word::select: {
      const Value& taken = holds(n.rel(), a.v, b.v) ? c : d;
      const bool either = a.e + b.e > 0 && std::fabs(a.v - b.v) <= a.e + b.e;
      if (!either) return taken;
      const double gap = c.v == d.v ? 0 : std::fabs(c.v - d.v);
      return {taken.v, std::max(c.e, d.e) + gap};
    }
    case Word::round:
      return rounded(a, n.dtype());
    default: {
      const double y = function(n.word).f(a.v);
      return {y, a.e == 0 ? 0 : times(function(n.word).slope(a.v, y), a.e)};
    }
  }
}

// An unknown value. It may be NaN, for example from ∞ − ∞.
constexpr Value kUnknown{std::numeric_limits<double>::quiet_NaN(), kInfinity};

// Whether a node depends on an unknown value (a select: through its condition), or adds an infinity
// to a value that may have overflowed to the opposite infinity.
bool lost(const Node& n, const std::array<Value, 4>& in) {
  const int inputs = n.word == Word::select ? 2 : n.arity();
  for (int i = 0; i < inputs; ++i)
    if (std::isnan(in[i].v) && std::isinf(in[i].e)) return true;
  const auto meet = [](const Value& a, const Value& b) {
    return std::isinf(a.e) && std::isinf(b.v);
  };
  return (n.word == Word::add || n.word == Word::sub) && (meet(in[0], in[1]) || meet(in[1], in[0]));
}

// If fp32 may have overflowed, values that depend on that infinity have no bound.
Value as_input(Value v) {
  if (std::isfinite(v.v) && std::fabs(v.v) + v.e >= kOverflow32) v.e = kInfinity;
  return v;
}

double own_error(const Node& n, double v, double native) {
  if (n.word == Word::round) return 0;  // propagate handles it
  const double ulp = ulp32(v);
  if (native > 0 && info(n.word).kind == WordKind::transcendental)
    return std::isfinite(v) ? std::max(native * std::fabs(v), 0.5 * ulp) : 0;
  return info(n.word).beta * ulp;
}

}  // namespace

double native_error(DType output) {
  if (output == DType::f32) return 0;
  return output == DType::f16 ? 0x1p-15 * M_SQRT1_2 : 0x1p-12 * M_SQRT1_2;
}

double ulp32(double v) {
  const double a = std::fabs(v);
  if (!(a < kInfinity)) return 0;
  return a < 0x1p-126 ? 0x1p-149 : std::ldexp(1.0, std::ilogb(a) - 23);
}

Oracle::Oracle(const Graph& graph, std::span<const uint32_t> roots, double native)
    : graph_(graph),
      roots_(roots.begin(), roots.end()),
      nodes_(order(graph, roots)),
      native_(native) {}

Evaluation Oracle::run(size_t n, std::span<const float* const> loads,
                       std::span<const double* const> errors) const {
  Evaluation out;
  out.value.assign(roots_.size(), std::vector<double>(n));
  out.bound = out.value;
  std::vector<std::array<Value, kBatch>> values(graph_.size());
  for (size_t start = 0; start < n; start += kBatch) {
    const size_t count = std::min(kBatch, n - start);
    for (const uint32_t id : nodes_) {
      const Node& node = graph_[id];
      auto& result = values[id];
      if (node.word == Word::constant) {
        if (start == 0) result.fill({node.value, 0});
        continue;
      }
      if (node.word == Word::load) {
        const double* const error = errors.empty() ? nullptr : errors[node.slot];
        for (size_t i = 0; i < count; ++i)
          result[i] = {loads[node.slot][start + i], error ? error[start + i] : 0};
        continue;
      }
      for (size_t i = 0; i < count; ++i) {
        std::array<Value, 4> in;
        for (size_t k = 0; k < in.size(); ++k) in[k] = as_input(values[node.in[k]][i]);
        Value v = propagate(node, in[0], in[1], in[2], in[3]);
        // If loads have errors, the second-order term counts. Example: the square of the rounding
        // error that remains after the mean of a constant row is subtracted.
        if (!errors.empty() && node.word == Word::mul) v.e += times(in[0].e, in[1].e);
        v.e += own_error(node, v.v, native_);
        if (std::isnan(v.e) || unbounded(node, in[0], in[1])) v.e = kInfinity;
        result[i] = lost(node, in) ? kUnknown : v;
      }
    }
    for (size_t r = 0; r < roots_.size(); ++r)
      for (size_t i = 0; i < count; ++i) {
        const Value& v = values[roots_[r]][i];
        out.value[r][start + i] = v.v;
        out.bound[r][start + i] = v.e;
      }
  }
  return out;
}

double nearest(double v, DType dtype) {
  const DTypeInfo& f = info(dtype);
  const double overflow = std::copysign(f.saturates ? f.max : kInfinity, v);
  if (std::isinf(v)) return overflow;
  if (v == 0 || std::isnan(v)) return v;
  const int e = std::max(std::ilogb(v), 1 - f.bias) - f.mantissa_bits;
  const double r = std::ldexp(std::nearbyint(std::ldexp(v, -e)), e);  // exact scalings
  return std::fabs(r) > f.max ? overflow : r;
}

bool within(float result, DType dtype, double exact, double bound) {
  if (std::isinf(bound)) return true;  // after an inner overflow nothing is promised
  if (std::isnan(exact)) return std::isnan(result);
  if (std::isnan(result)) return false;
  if (std::isinf(exact)) return static_cast<double>(result) == nearest(exact, dtype);
  const double slack = 1.01 * bound;
  if (dtype == DType::f32 && std::fabs(static_cast<double>(result) - exact) <= slack) return true;
  const double low = nearest(exact - slack, dtype);
  const double high = nearest(exact + slack, dtype);
  if (low <= result && result <= high && dtype != DType::f32) return true;
  const bool overflows = std::isinf(low) || std::isinf(high);
  return overflows && std::fabs(result) >= info(dtype).max && std::signbit(result) == (exact < 0);
}

}  // namespace tenon
