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

int doctor(bool json);
int list(bool markdown);
int show(const std::string& text, bool backward);
int check(const CheckArgs& args);
int demo();
int quantize(const QuantizeArgs& args);

}  // namespace tenon::cli
