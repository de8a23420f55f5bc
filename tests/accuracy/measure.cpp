// Runs a chunk in each precision and compares with float64, the scalar reference and the limits.
// Float64 values are computed once for all comparisons.
#include "measure.h"

#include <bit>
#include <cmath>
#include <cstdio>

#include "expr/evaluate.h"
#include "limits.h"

namespace tenon::accuracy {

namespace {

struct Where {
  float a = 0, b = 0;
};

class Trial {
 public:
  Trial(const Function& f, const Points& at)
      : f_(f), at_(at), a_(at.a.decoded()), b_(at.b.decoded()), reports_(f.roots()) {
    columns_ = f.columns({a_.data(), 1}, {b_.data(), 1});
  }

  std::vector<RootReport> all(bool check_oracle) {
    f_.exact().run(a_.size(), columns_, exact_);
    f_.reference().run(a_.size(), columns_, reference_);
    if (check_oracle && !f_.exact().agrees_with_oracle(kSample, columns_))
      fail(0, Check::strict, 0, "the fast oracle differs from the library's");
    const DType in = at_.a.dtype();
    {
      const auto out = f_.run(at_, DType::f32, Precision::strict);
      for (size_t r = 0; r < out.size(); ++r) {
        bound_f32(r, out[r]);
        bits(r, out[r]);
        limits(r, out[r]);
      }
    }
    if (in != DType::f32) {
      const auto out = f_.run(at_, in, Precision::strict);
      for (size_t r = 0; r < out.size(); ++r) {
        bound_16(r, out[r], kStrict);
        bits(r, out[r]);
        limits(r, out[r]);
      }
    }
    native_f32();
    for (const DType native : {DType::bf16, DType::f16}) {
      if (in != DType::f32 && in != native) continue;
      const auto out = f_.run(at_, native, Precision::native);
      for (size_t r = 0; r < out.size(); ++r) {
        bound_16(r, out[r], native == DType::bf16 ? kNativeBf16 : kNativeF16);
        limits(r, out[r]);
      }
    }
    return reports_;
  }

  std::vector<RootReport> f32_only() {
    f_.strict_exact().run(a_.size(), columns_, exact_);
    const auto out = f_.run(at_, DType::f32, Precision::strict);
    for (size_t r = 0; r < out.size(); ++r) {
      bound_f32(r, out[r]);
      limits(r, out[r]);
    }
    native_f32();
    return reports_;
  }

 private:
  static constexpr size_t kSample = 2048;

  [[nodiscard]] Where where(size_t i) const { return {a_[i], b_.empty() ? 0 : b_[i]}; }

  void fail(size_t root, Check check, size_t i, const std::string& what) {
    const auto c = static_cast<size_t>(check);
    RootReport& report = reports_[root];
    if (report.failures[c]++ > 0) return;
    const Where w = where(i);
    report.first[c] = str("at ", number(w.a), f_.gated() ? str(", ", number(w.b)) : "", ": ", what);
  }

  void wrong_bound(size_t root, Bound k, size_t i, DType dtype, float got) {
    fail(root, static_cast<Check>(k), i,
         str(number(got), " in ", info(dtype).name, ", exact ", number(exact_.value[root][i]),
             ", E ", number(exact_.bound[k][root][i])));
  }

  // The bound is that of strict results.
  void native_f32() {
    const auto out = f_.run(at_, DType::f32, Precision::native);
    for (size_t r = 0; r < out.size(); ++r) {
      const double* value = exact_.value[r].data();
      const double* bound = exact_.bound[kStrict][r].data();
      const auto* result = reinterpret_cast<const float*>(out[r].bytes());
      for (size_t i = 0; i < out[r].size(); ++i) {
        const double e = bound[i];
        if (e == std::numeric_limits<double>::infinity()) continue;
        const double error = std::fabs(result[i] - value[i]);
        if (!(error <= 1.01 * e) && !within(result[i], DType::f32, value[i], e))
          fail(r, Check::native_f32, i,
               str(number(result[i]), ", exact ", number(value[i]), ", E ", number(e)));
        if (!(error > reports_[r].native_f32.value * e) || std::isinf(error)) continue;
        const Where w = where(i);
        reports_[r].native_f32 = {error / e, w.a, w.b, 0};
      }
      limits(r, out[r]);
    }
  }

  void bound_f32(size_t root, const Elements& out) {
    const double* value = exact_.value[root].data();
    const double* bound = exact_.bound[kStrict][root].data();
    const auto* result = reinterpret_cast<const float*>(out.bytes());
    RootReport& report = reports_[root];
    double worst_ulp = 0;
    double worst_plain = 0;
    double worst_ratio = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const double e = bound[i];
      if (e == std::numeric_limits<double>::infinity()) continue;
      const double error = std::fabs(result[i] - value[i]);
      if (!(error <= 1.01 * e)) {
        if (!within(result[i], DType::f32, value[i], e))
          wrong_bound(root, kStrict, i, DType::f32, result[i]);
        if (!(error < std::numeric_limits<double>::infinity())) continue;
      }
      if (error > worst_ratio * e) {
        worst_ratio = error / e;
        const Where w = where(i);
        report.ratio[kStrict] = {worst_ratio, w.a, w.b, 0};
      }
      if (error == 0) continue;
      const double u = fast_ulp32(value[i]);
      if (error > worst_ulp * u) {
        worst_ulp = error / u;
        const Where w = where(i);
        report.ulp = {worst_ulp, w.a, w.b, e / u};
      }
      if (e <= kPlainUlp * u && error > worst_plain * u) {
        worst_plain = error / u;
        const Where w = where(i);
        report.plain_ulp = {worst_plain, w.a, w.b, e / u};
      }
    }
  }

  void bound_16(size_t root, const Elements& out, Bound k) {
    visit(out.dtype(), [&](auto tag) {
      if constexpr (info(tag()).bytes == 2) bound_codes<tag()>(root, out, k);
    });
  }

  template <DType d>
  void bound_codes(size_t root, const Elements& out, Bound k) {
    const double* value = exact_.value[root].data();
    const double* bound = exact_.bound[k][root].data();
    const auto* result = reinterpret_cast<const uint16_t*>(out.bytes());
    for (size_t i = 0; i < out.size(); ++i) {
      const double e = bound[i];
      if (e == std::numeric_limits<double>::infinity()) continue;
      // Fast path: most results are the rounded fp32 value that is nearest to the exact value.
      const auto near = static_cast<float>(value[i]);
      if (std::fabs(near - value[i]) <= e && encode<d>(near) == result[i]) continue;
      const float got = decode<d>(result[i]);
      if (!within(got, d, value[i], e)) wrong_bound(root, k, i, d, got);
      const double beyond = beyond_rounding<d>(result[i], value[i]);
      if (beyond > reports_[root].ratio[k].value * e) {
        const Where w = where(i);
        reports_[root].ratio[k] = {beyond / e, w.a, w.b, 0};
      }
    }
  }

  // The distance of the exact value from the interval that rounds to `code`.
  template <DType d>
  static double beyond_rounding(uint32_t code, double exact) {
    constexpr uint32_t kSign = 1U << (info(d).exponent_bits + info(d).mantissa_bits);
    const uint32_t magnitude = code & (kSign - 1);
    if (magnitude >= info(d).largest || !std::isfinite(exact)) return 0;
    const double at = decode<d>(magnitude);
    const double up = decode<d>(magnitude + 1);
    const double down = magnitude == 0 ? -up : decode<d>(magnitude - 1);
    const double v = code & kSign ? -exact : exact;
    return std::max({0.0, v - (at + up) / 2, (at + down) / 2 - v});
  }

  // Strict results must equal the reference, rounded once to the dtype of the output.
  void bits(size_t root, const Elements& out) {
    visit(out.dtype(), [&](auto tag) {
      const auto* codes = reinterpret_cast<const Storage<tag()>*>(out.bytes());
      for (size_t i = 0; i < out.size(); ++i) {
        const float expected = reference_[root][i];
        const uint32_t code = encode<tag()>(expected);
        const uint32_t got = codes[i];
        if (code == got || (expected != expected && std::isnan(decode<tag()>(got)))) continue;
        fail(root, Check::bits, i,
             str(number(decode<tag()>(got)), " in ", info(tag()).name, ", the reference has ",
                 number(decode<tag()>(code))));
      }
    });
  }

  void limits(size_t root, const Elements& out) {
    if (f_.group() == Function::Group::word) return;
    const Ends* ends = nullptr;
    for (const Ends& e : kEnds)
      if (e.name == f_.name()) ends = &e;
    visit(out.dtype(), [&](auto tag) {
      const auto* codes = reinterpret_cast<const Storage<tag()>*>(out.bytes());
      for (size_t i = 0; i < out.size(); ++i) {
        const Where w = where(i);
        const float got = decode<tag()>(codes[i]);
        const Nan rule = nan_rule(f_, root, w.a, w.b);
        if (rule != Nan::open && std::isnan(got) != (rule == Nan::due))
          fail(root, Check::limits, i, rule == Nan::due ? "not NaN" : "NaN");
        if (!ends || !std::isinf(w.a)) continue;
        const float limit = (root == 0 ? ends->value : ends->derivative)[w.a > 0 ? 1 : 0];
        if (got != rounded_to<tag()>(limit))
          fail(root, Check::limits, i, str(number(got), ", the limit is ", number(limit)));
      }
    });
  }

  const Function& f_;
  const Points& at_;
  std::vector<float> a_, b_;
  std::vector<Column> columns_;
  Values exact_;
  std::vector<std::vector<float>> reference_;
  std::vector<RootReport> reports_;
};

}  // namespace

void Worst::offer(const Worst& other) {
  const auto rank = [](const Worst& w) {
    return std::pair(std::bit_cast<uint32_t>(w.a), std::bit_cast<uint32_t>(w.b));
  };
  // Breaks ties by rank, so that the result does not depend on the order of threads.
  if (other.value > value || (other.value == value && value > 0 && rank(other) < rank(*this)))
    *this = other;
}

void Report::merge(const std::vector<RootReport>& part) {
  const std::lock_guard guard(mutex_);
  for (size_t r = 0; r < roots_.size(); ++r) {
    roots_[r].ulp.offer(part[r].ulp);
    roots_[r].plain_ulp.offer(part[r].plain_ulp);
    roots_[r].native_f32.offer(part[r].native_f32);
    for (size_t k = 0; k < part[r].ratio.size(); ++k) roots_[r].ratio[k].offer(part[r].ratio[k]);
    for (size_t c = 0; c < kChecks.size(); ++c) {
      if (roots_[r].failures[c] == 0) roots_[r].first[c] = part[r].first[c];
      roots_[r].failures[c] += part[r].failures[c];
    }
  }
}

std::vector<RootReport> measure(const Function& f, const Points& at, bool check_oracle) {
  return Trial(f, at).all(check_oracle);
}

std::vector<RootReport> measure_f32(const Function& f, const Points& at) {
  return Trial(f, at).f32_only();
}

// At ±∞ the results must equal those at the largest finite values.
std::vector<RootReport> measure_infinities(const Function& f) {
  std::vector<RootReport> reports(f.roots());
  if (f.name() != "clamped_swiglu" && f.name() != "situglu") return reports;
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr std::array<float, 12> kValues{kInfinity, -kInfinity, kMost,     -kMost, 0.0F,   -0.0F,
                                          1.0F,      -1.0F,      0x1p-149F, 7.0F,   -75.0F, 30.0F};
  const auto finite = [](float v) { return std::isinf(v) ? std::copysign(kMost, v) : v; };
  Points infinite{{DType::f32, kChunk}, {DType::f32, kChunk}};
  Points largest = infinite;
  for (size_t i = 0; i < kChunk; ++i) {
    const float a = kValues[i % kValues.size()];
    const float b = kValues[i / kValues.size() % kValues.size()];
    infinite.a.set(i, std::bit_cast<uint32_t>(a));
    infinite.b.set(i, std::bit_cast<uint32_t>(b));
    largest.a.set(i, std::bit_cast<uint32_t>(finite(a)));
    largest.b.set(i, std::bit_cast<uint32_t>(finite(b)));
  }
  for (const auto& [d, precision] : {std::pair{DType::f32, Precision::strict},
                                     {DType::f32, Precision::native},
                                     {DType::bf16, Precision::native},
                                     {DType::f16, Precision::native}}) {
    const auto at_infinity = f.run(infinite, d, precision);
    const auto at_largest = f.run(largest, d, precision);
    for (size_t r = 0; r < f.roots(); ++r)
      for (size_t i = 0; i < kChunk; ++i) {
        const float got = decode(d, at_infinity[r].code(i));
        const float limit = decode(d, at_largest[r].code(i));
        if (got == limit) continue;
        const auto c = static_cast<size_t>(Check::limits);
        if (reports[r].failures[c]++ == 0)
          reports[r].first[c] = str("at ", number(decode(DType::f32, infinite.a.code(i))), ", ",
                                    number(decode(DType::f32, infinite.b.code(i))), ": ",
                                    number(got), ", the limit is ", number(limit));
      }
  }
  return reports;
}

std::string number(double v) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.9g", v);
  return text.data();
}

}  // namespace tenon::accuracy
