// The subcommands; each returns the exit code for scripts.
#pragma once

#include <string>
#include <vector>

#include "tenon/options.h"

namespace tenon::cli {

// 0: fine, 1: something failed the check, 2: wrong usage or input (CLI11's own codes are mapped).
enum Exit : int { ok = 0, failed = 1, usage = 2 };

struct CheckArgs {
  std::vector<std::string> substrings;
  bool list = false;
  std::string device = "cpu";
  std::string precision;  // empty: both
};

int doctor(bool json);
int list();
int show(const std::string& text, bool backward);
int check(const CheckArgs& args);
int demo();

}  // namespace tenon::cli
