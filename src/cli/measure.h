// Statistics of a tensor and the error of a trial on it, measured in float64.
#pragma once

#include <string>
#include <vector>

#include "cli/tensor_file.h"
#include "tenon/format.h"

namespace tenon::cli {

// A quantisation to try: an FP8 format, a scaling mode and an orientation.
struct Trial {
  std::string name;  // e4m3:mxfp8
  Format format;
  Orientation orientation = Orientation::rowwise;
  float scale = 0;  // delayed: the multiplier; 0: derived from this tensor's amax
};

struct TrialOptions {
  float eps = 0, scale = 0;
  bool exact_scales = false, columnwise = false;
};

// The names of all modes and `all`, separated by commas.
std::string listed_modes();
// Parses `DTYPE:MODE`, `all`, or several of them separated by commas. The default dtype is e4m3.
std::vector<Trial> parse_trials(const std::string& text, const TrialOptions& options);

// Elements v with 2^e <= |v| < 2^(e+1), for every exponent e of fp32.
struct Bin {
  int64_t count = 0, flushed = 0;
  double squares = 0, errors = 0;  // sums of v² and (v − q)²
};
inline constexpr int kLeastExponent = -149, kMostExponent = 127;
inline constexpr size_t kBins = kMostExponent - kLeastExponent + 1;

struct Census {
  int64_t elements = 0, zeros = 0, nonfinite = 0;
  float amax = 0;         // the integer maximum of the bits of |v|, so NaN is the largest
  float finite_amax = 0;  // over finite elements only
  std::vector<Bin> bins = std::vector<Bin>(kBins);
};
Census take_census(const FileTensor& t);

struct Outcome {
  Trial trial;
  int64_t saturated = 0, flushed = 0, nonfinite = 0;
  int64_t spoiled = 0;  // finite before quantisation, not finite after it
  double relative_rms = 0, max_error = 0, worst_relative = 0;
  double snr_db = 0;  // infinite if there is no error
  int64_t bytes_before = 0, bytes_after = 0, scales = 0, distinct_scales = 0;
  double least_scale = 0, most_scale = 0;  // finite scale_inv of blocks that are not all 0
  std::vector<Bin> bins = std::vector<Bin>(kBins);

  // Exponents of the smallest and the largest scale_inv.
  [[nodiscard]] int least_exponent() const;
  [[nodiscard]] int most_exponent() const;
};
Outcome apply(const Trial& trial, const FileTensor& t, const Census& census);

// A tensor before and after quantisation, for reports and pictures.
struct Report {
  std::string name, shape;
  Stored type = Stored::f32;
  Census before;
  std::vector<Outcome> after;
};

}  // namespace tenon::cli
