// The subcommands; each returns the exit code for scripts.
#pragma once

#include <string>
#include <vector>

#include "tenon/options.h"

namespace tenon::cli {

// What scripts see: no_device means that nothing ran because the device is not here.
enum Exit : int { ok = 0, failed = 1, usage = 2, no_device = 3 };

struct CheckArgs {
  std::vector<std::string> substrings;
  bool list = false;
  std::string device = "cpu";
  std::string precision;  // empty: both
};

struct QuantizeArgs {
  std::string file, recipe, tensor, svg;
  float eps = 0, scale = 0;
  bool exact_scales = false, columnwise = false, json = false;
};

struct PlanArgs {
  std::string chain;  // its text, or @FILE
  int64_t rows = 256, cols = 0;
  std::string dtype = "f32", recipe = "none", keep = "input";
  std::string precision = "native", rounding = "once", device = "cpu";
  std::string format = "text", output;
  double gbps = 0, tflops = 0;
  bool backward = false, eval = false;
};

int doctor(bool json);
int list(bool markdown);
int show(const std::string& text, bool backward);
int check(const CheckArgs& args);
int demo();
int quantize(const QuantizeArgs& args);
int plan(const PlanArgs& args);

}  // namespace tenon::cli
