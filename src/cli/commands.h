// The subcommands; each returns the exit code for scripts.
#pragma once

#include <cstdint>
#include <optional>
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
  int every = 1;
  int random = 0;  // how many cases by chance, in place of the list
  uint64_t seed = 1;
};

struct QuantizeArgs {
  std::string file, recipe, tensor, svg;
  float eps = 0, scale = 0;
  bool exact_scales = false, columnwise = false, json = false;
};

// A chain and how it is planned: what `plan` and `run` have in common.
struct ChainArgs {
  static constexpr int64_t kRows = 256;  // unless said

  std::string command;  // for messages
  std::string chain;    // its text, or @FILE
  std::optional<int64_t> rows;
  int64_t cols = 0;
  std::string dtype = "f32", recipe = "none", keep = "input";
  std::string precision = "native", rounding = "once", device = "cpu";
  bool backward = false, eval = false;
};

struct PlanArgs : ChainArgs {
  std::string format = "text", output;
  double gbps = 0, tflops = 0;
};

struct ChainRunArgs : ChainArgs {
  std::string input, output;  // files
  uint64_t seed = 1;
  int repeat = 5;
  std::optional<double> tolerance;  // in place of what the formats allow
  bool check = true, json = false;
};

// action: list, clear or warm; a chain and an architecture for warm.
struct CacheArgs : ChainArgs {
  std::string action = "list", arch;
};

struct BenchArgs {
  std::string device = "cpu", dtype = "bf16", precision = "native", cases = "default";
  std::vector<std::string> filters, shapes;
  int64_t rows = 0, cols = 0;  // 0: the device's own
  int shots = 11;
  std::string file, arch = "sm_90a";
  bool list = false, compile_only = false, costs = true, json = false;
};

int doctor(bool json);
int list(bool markdown);
int show(const std::string& text, bool backward);
int check(const CheckArgs& args);
int quantize(const QuantizeArgs& args);
int plan(const PlanArgs& args);
int run(const ChainRunArgs& args);
int cache(const CacheArgs& args);
int bench(const BenchArgs& args);

}  // namespace tenon::cli
