// The measurements of a function at many points, and its requirements.
#pragma once

#include <array>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "function.h"

namespace tenon::accuracy {

enum class Check : uint8_t { strict, native_bf16, native_f16, native_f32, bits, limits };
inline constexpr std::array<std::string_view, 6> kChecks{
    "strict within E",     "native bf16 within E", "native f16 within E",
    "native f32 within E", "strict bits",          "limits"};

// The largest value of a quantity, and its point.
struct Worst {
  double value = 0;
  float a = 0, b = 0;
  double bound = 0;  // E in ulp at that point

  void offer(const Worst& other);
};

// Larger bounds (in ulp) are caused by cancellation or underflow inside of the formula.
inline constexpr double kPlainUlp = 10;

struct RootReport {
  Worst ulp;                     // strict f32: error in ulp of the exact value
  Worst plain_ulp;               // the same if E is at most kPlainUlp
  std::array<Worst, 3> ratio{};  // error/E for each Bound; native: without the final rounding
  Worst native_f32;              // error/E
  std::array<size_t, kChecks.size()> failures{};
  std::array<std::string, kChecks.size()> first{};  // first failure of each check
};

// The report of one function. Several threads add their chunks.
class Report {
 public:
  explicit Report(size_t roots) : roots_(roots) {}
  void merge(const std::vector<RootReport>& part);
  [[nodiscard]] const std::vector<RootReport>& roots() const { return roots_; }

 private:
  std::mutex mutex_;
  std::vector<RootReport> roots_;
};

// All measurements of one chunk. `check_oracle` also compares the fast oracle with the library's.
std::vector<RootReport> measure(const Function& f, const Points& at, bool check_oracle);

// Only the bounds and limits of f32 results, for the exhaustive run.
std::vector<RootReport> measure_f32(const Function& f, const Points& at);

// Infinities of the gated functions that guarantee a limit.
std::vector<RootReport> measure_infinities(const Function& f);

std::string number(double v);

}  // namespace tenon::accuracy
