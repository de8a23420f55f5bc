// Common code of the tests: matrices with guard bytes, reference sums, and error checks.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/tenon.hpp"

namespace tenon::test {

inline constexpr float kInf = __builtin_inff();
inline constexpr float kNan = __builtin_nanf("");
inline constexpr DType kPlain[] = {DType::f32, DType::f16, DType::bf16};
inline constexpr float kSpecials[] = {
    0.0F,  -0.0F,    kInf,     -kInf,     kNan, 0x1p-149F, -0x1p-140F, 0x1p-127F, 0x1.fffffep127F,
    -3.0F, 0x1p-24F, 65504.0F, -65520.0F, 1.0F, -1.0F};

inline constexpr Options kStrict{.precision = Precision::strict};
inline constexpr Options kEager{.precision = Precision::strict, .rounding = Rounding::eager};

inline uint32_t bits(float v) { return __builtin_bit_cast(uint32_t, v); }
inline float from_bits(uint32_t b) { return __builtin_bit_cast(float, b); }

// Whether to run the next case of a long list. Always true, unless TENON_TEST_EVERY is n: then true
// every n-th time. Sanitizers use it, because they are slow and check memory, not values.
inline bool chosen() {
  static const char* const text = std::getenv("TENON_TEST_EVERY");
  static const size_t every = text ? std::strtoul(text, nullptr, 10) : 1;
  static size_t number = 0;
  return number++ % every == 0;
}

// NaNs are equal to each other. All other values must have equal bits.
inline bool equal(float a, float b) { return bits(a) == bits(b) || (a != a && b != b); }

// Conversions independent of the library: f16 by the compiler, bf16 with integers.
inline uint32_t encode_ref(DType d, float v) {
  if (d == DType::f32) return bits(v);
  if (d == DType::f16) {
    const auto half = static_cast<_Float16>(v);
    return v != v ? 0x7e00U : __builtin_bit_cast(uint16_t, half);
  }
  if (v != v) return 0x7fc0U;
  const uint32_t b = bits(v);
  return (b + 0x7fffU + ((b >> 16) & 1U)) >> 16;
}
inline float decode_ref(DType d, uint32_t code) {
  if (d == DType::f32) return from_bits(code);
  if (d == DType::bf16) return from_bits(code << 16);
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(code)));
}
inline float rounded_ref(DType d, float v) { return decode_ref(d, encode_ref(d, v)); }

// The adjacent-pair tree sum of the specification.
inline float tree(std::vector<float> v) {
  if (v.empty()) return 0.0F;
  while (v.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i + 1 < v.size(); i += 2) next.push_back(v[i] + v[i + 1]);
    if (v.size() % 2) next.push_back(v.back());
    v = next;
  }
  return v[0];
}

// A matrix with guard bytes, padding after each row, and any byte address.
class Mat {
 public:
  static constexpr uint8_t kPoison = 0xA5;

  Mat(DType dtype, int64_t rows, int64_t cols, int64_t pad = 0, size_t shift = 0)
      : bytes_(64 + shift + static_cast<size_t>(rows * (cols + pad)) * size(dtype) + 64, kPoison),
        offset_(64 + shift),
        dtype_(dtype),
        rows_(rows),
        cols_(cols),
        stride_(cols + pad) {}

  [[nodiscard]] View view() const { return rows_from(0, rows_); }
  [[nodiscard]] View rows_from(int64_t first, int64_t count) const {
    return matrix(bytes_.data() + position(first, 0), dtype_, count, cols_, stride_);
  }
  [[nodiscard]] uint32_t code(int64_t r, int64_t c) const {
    uint32_t value = 0;
    std::memcpy(&value, bytes_.data() + position(r, c), size(dtype_));
    return value;
  }
  [[nodiscard]] float at(int64_t r, int64_t c) const { return decode_ref(dtype_, code(r, c)); }
  void set(int64_t r, int64_t c, float v) {
    const uint32_t value = encode_ref(dtype_, v);
    std::memcpy(bytes_.data() + position(r, c), &value, size(dtype_));
  }

  // Fills with ordinary values. With `specials`, every fifth column has special values.
  Mat& fill(unsigned seed, bool specials = false, float spread = 2) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, spread);
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < cols_; ++c)
        set(r, c,
            specials && c % 5 == 3 ? kSpecials[random() % std::size(kSpecials)] : normal(random));
    return *this;
  }

  // Whether all bytes outside of the elements are unchanged.
  [[nodiscard]] bool guards_hold() const {
    std::vector<uint8_t> copy = bytes_;
    for (int64_t r = 0; r < rows_ && cols_ > 0; ++r)
      std::memset(copy.data() + position(r, 0), kPoison, static_cast<size_t>(cols_) * size(dtype_));
    return untouched(copy);
  }
  // Whether nothing was written.
  [[nodiscard]] bool untouched() const { return untouched(bytes_); }
  [[nodiscard]] bool same_bytes(const Mat& other) const { return bytes_ == other.bytes_; }

  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t cols() const { return cols_; }
  [[nodiscard]] DType dtype() const { return dtype_; }

 private:
  static size_t size(DType d) { return d == DType::f32 ? 4 : 2; }
  static bool untouched(const std::vector<uint8_t>& bytes) {
    for (const uint8_t b : bytes)
      if (b != kPoison) return false;
    return true;
  }
  [[nodiscard]] size_t position(int64_t r, int64_t c) const {
    return offset_ + static_cast<size_t>(r * stride_ + c) * size(dtype_);
  }

  std::vector<uint8_t> bytes_;
  size_t offset_;
  DType dtype_;
  int64_t rows_, cols_, stride_;
};

// Compares an element with the exact fp32 value, rounded once to the dtype of the matrix.
inline void expect_element(const Mat& m, int64_t r, int64_t c, float value, std::string_view what) {
  const float expected = rounded_ref(m.dtype(), value);
  if (!equal(m.at(r, c), expected))
    ADD_FAILURE() << what << " (" << r << ", " << c << "): got " << m.at(r, c) << " = 0x"
                  << std::hex << m.code(r, c) << ", expected " << expected;
}

// The bytes from the first to the last element of a view.
inline int64_t span_bytes(const View& v) {
  if (v.rows == 0 || v.cols == 0) return 0;
  return ((v.rows - 1) * v.stride + v.cols) * info(v.dtype).bytes;
}

// The gated layouts. `separate` is two tensors.
enum class Gate : uint8_t { stacked, swapped, by1, by8, by32, separate };
inline constexpr Gate kGates[] = {Gate::stacked, Gate::swapped, Gate::by1,
                                  Gate::by8,     Gate::by32,    Gate::separate};
inline int64_t interleave(Gate g) {
  return g == Gate::by1 ? 1 : g == Gate::by8 ? 8 : g == Gate::by32 ? 32 : 0;
}
inline Layout layout_of(Gate g) {
  if (g == Gate::swapped) return Layout::swapped();
  return interleave(g) ? Layout::interleaved(interleave(g)) : Layout::stacked();
}
// The column of the 2H-wide tensor for column c of half a (0) or b (1).
inline int64_t gated_column(Gate g, int64_t h, int half, int64_t c) {
  if (const int64_t k = interleave(g)) return c / k * 2 * k + half * k + c % k;
  return (g == Gate::swapped ? 1 - half : half) * h + c;
}
inline bool fits(Gate g, int64_t h) { return interleave(g) == 0 || h % interleave(g) == 0; }

// Runs f and expects an Error with this code and a message with all parts.
template <class F>
void expect_error(F f, Code code, std::initializer_list<std::string_view> parts) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.code()), static_cast<int>(code)) << e.what();
    for (const std::string_view part : parts)
      EXPECT_NE(std::string_view(e.what()).find(part), std::string_view::npos)
          << "no '" << part << "' in: " << e.what();
    return;
  } catch (const std::exception& e) {
    ADD_FAILURE() << "not a tenon::Error: " << e.what();
    return;
  }
  ADD_FAILURE() << "no error, expected one with '" << (parts.size() ? *parts.begin() : "") << "'";
}

// Runs f, expects an Error with a user-error code, and returns its message.
template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_argument);
    return e.what();
  }
  return "no error";
}

// Sets the thread count for a scope.
class Threads {
 public:
  explicit Threads(int count) { set_threads(count); }
  ~Threads() { set_threads(0); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
};

using Real = long double;
using Hand = std::function<Real(Real a, Real b)>;

inline Real sig_ref(Real x) { return 1 / (1 + std::exp(-x)); }
inline Real gelu_ref(Real x) {
  return 0.5L * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0L)) * (x + 0.044715L * x * x * x)));
}
inline Real gelu_erf_ref(Real x) { return 0.5L * x * (1 + std::erf(x / std::sqrt(2.0L))); }
inline Real relu_ref(Real x) { return x > 0 ? x : 0; }
inline Real softplus_ref(Real x) { return std::log(1 + std::exp(x)); }

// An activation and its value in extended precision, written independently of Expr.
struct Row {
  const char* act;
  int inputs;
  Hand f;
};
inline const std::vector<Row>& rows() {
  static const std::vector<Row> kRows{
      {"gelu", 1, [](Real x, Real) { return gelu_ref(x); }},
      {"gelu_erf", 1, [](Real x, Real) { return gelu_erf_ref(x); }},
      {"silu", 1, [](Real x, Real) { return x * sig_ref(x); }},
      {"relu", 1, [](Real x, Real) { return relu_ref(x); }},
      {"qgelu", 1, [](Real x, Real) { return x * sig_ref(1.702L * x); }},
      {"quick_gelu", 1, [](Real x, Real) { return x * sig_ref(1.702L * x); }},
      {"srelu", 1, [](Real x, Real) { return relu_ref(x) * relu_ref(x); }},
      {"sigmoid", 1, [](Real x, Real) { return sig_ref(x); }},
      {"tanh", 1, [](Real x, Real) { return std::tanh(x); }},
      {"softplus", 1, [](Real x, Real) { return softplus_ref(x); }},
      {"mish", 1, [](Real x, Real) { return x * std::tanh(softplus_ref(x)); }},
      {"hardswish", 1,
       [](Real x, Real) { return x * std::min(std::max(x + 3, Real(0)), Real(6)) / 6; }},
      {"leaky_relu", 1, [](Real x, Real) { return x > 0 ? x : 0.01L * x; }},
      {"leaky_relu(slope=0.25)", 1, [](Real x, Real) { return x > 0 ? x : 0.25L * x; }},
      {"elu", 1, [](Real x, Real) { return x > 0 ? x : std::expm1(x); }},
      {"elu(alpha=0.5)", 1, [](Real x, Real) { return x > 0 ? x : 0.5L * std::expm1(x); }},
      {"x*sigmoid(beta*x) + 0.5*x; beta = 1.25", 1,
       [](Real x, Real) { return x * sig_ref(1.25L * x) + 0.5L * x; }},
      {"glu", 2, [](Real a, Real b) { return sig_ref(a) * b; }},
      {"geglu", 2, [](Real a, Real b) { return gelu_ref(a) * b; }},
      {"geglu_erf", 2, [](Real a, Real b) { return gelu_erf_ref(a) * b; }},
      {"swiglu", 2, [](Real a, Real b) { return a * sig_ref(a) * b; }},
      {"reglu", 2, [](Real a, Real b) { return relu_ref(a) * b; }},
      {"qgeglu", 2, [](Real a, Real b) { return a * sig_ref(1.702L * a) * b; }},
      {"sreglu", 2, [](Real a, Real b) { return relu_ref(a) * relu_ref(a) * b; }},
      {"gated(mish)", 2, [](Real a, Real b) { return a * std::tanh(softplus_ref(a)) * b; }},
      {"gated(x*sigmoid(beta*x); beta = 2)", 2,
       [](Real a, Real b) { return a * sig_ref(2 * a) * b; }},
      {"clamped_swiglu(limit=2, alpha=1.5, offset=0.5)", 2,
       [](Real a, Real b) {
         const Real w = std::min(a, Real(2));
         return w * sig_ref(1.5L * w) * (std::min(std::max(b, Real(-2)), Real(2)) + 0.5L);
       }},
      {"situglu(beta1=3, beta2=5)", 2,
       [](Real a, Real b) { return 3 * std::tanh(a / 3) * sig_ref(a) * 5 * std::tanh(b / 5); }},
  };
  return kRows;
}

}  // namespace tenon::test
