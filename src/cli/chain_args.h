// Arguments that all commands with a chain share.
#pragma once

#include "cli/command.h"
#include "tenon/plan.h"

namespace tenon::cli {

// A chain and its plan options.
struct ChainArgs {
  static constexpr int64_t kRows = 256;  // default

  std::string command;  // for messages
  std::string chain;    // its text, or @FILE
  std::optional<int64_t> rows;
  int64_t cols = 0;
  std::string dtype = "f32", recipe = "none", keep = "input";
  std::string precision = "native", rounding = "once", device = "cpu", target;
  bool backward = false, eval = false;
};

// The options of a chain, then the options of the command.
std::vector<Option> chain_options(ChainArgs& args, std::vector<Option> more);

// The chain text: the argument itself, or the content of the file that it names.
std::string chain_text(const ChainArgs& args);
// The path of that file, or empty.
std::string chain_file(const ChainArgs& args);

PlanRequest request_of(const ChainArgs& args);

// Builds a plan. Errors explain that a command has no opaque ops.
Plan build(const Chain& chain, const PlanRequest& request);

}  // namespace tenon::cli
