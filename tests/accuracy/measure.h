// What is measured of a function at many points, and what must hold there.
#pragma once

#include <array>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "function.h"

namespace tenon::accuracy {

enum class Check : uint8_t { strict, native_bf16, native_f16, bits, limits };
inline constexpr std::array<std::string_view, 5> kChecks{
    "strict within E", "native bf16 within E", "native f16 within E", "strict bits", "limits"};

// The largest of something and where it was found.
struct Worst {
  double value = 0;
  float a = 0, b = 0;
  double bound = 0;  // E in ulp there

  void offer(const Worst& other);
};

// Bounds above this many ulp mean that terms cancel or that something inside underflows.
inline constexpr double kPlainUlp = 10;

struct RootReport {
  Worst ulp;                     // strict f32: error in ulp of the exact value
  Worst plain_ulp;               // the same where E is at most kPlainUlp
  std::array<Worst, 3> ratio{};  // error/E for each Bound; native: beyond the final rounding
  std::array<size_t, kChecks.size()> failures{};
  std::array<std::string, kChecks.size()> first{};  // of the failures
};

// Of one function; chunks measured by several threads meet here.
class Report {
 public:
  explicit Report(size_t roots) : roots_(roots) {}
  void merge(const std::vector<RootReport>& part);
  [[nodiscard]] const std::vector<RootReport>& roots() const { return roots_; }

 private:
  std::mutex mutex_;
  std::vector<RootReport> roots_;
};

// Everything on one chunk; `check_oracle` compares the fast oracle with the library's as well.
std::vector<RootReport> measure(const Function& f, const Points& at, bool check_oracle);

// The bound alone, for the exhaustive run.
std::vector<RootReport> measure_strict(const Function& f, const Points& at);

// Infinities of the gated functions that promise a limit there.
std::vector<RootReport> measure_infinities(const Function& f);

std::string number(double v);

}  // namespace tenon::accuracy
