// `tenon plan`: prints the plan of a chain as text, JSON or an HTML page.
#include "tenon/plan.h"

#include <fmt/core.h>

#include <cmath>

#include "cli/chain_args.h"
#include "cli/output_file.h"
#include "step/target.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

struct PlanArgs : ChainArgs {
  std::string format = "text", output;
  double gbps = 0, tflops = 0;
};

int plan(const PlanArgs& args) {
  require(std::isfinite(args.gbps) && args.gbps >= 0, "plan --gbps ", args.gbps,
          ": it must be a positive number");
  require(std::isfinite(args.tflops) && args.tflops >= 0, "plan --tflops ", args.tflops,
          ": it must be a positive number");
  require(args.tflops == 0 || args.gbps > 0, "plan --tflops ", args.tflops,
          ": a floor needs a bandwidth too; add --gbps");
  if (!args.output.empty()) require_other_file("plan -o", args.output, chain_file(args));
  const Plan made = build(parse_chain(chain_text(args)), request_of(args));
  const int64_t rows = args.rows.value_or(ChainArgs::kRows);
  Speed speed{.gbps = args.gbps, .gflops = 1e3 * args.tflops};
  if (args.gbps == 0 && !args.target.empty()) {
    const Target& t = named_target(args.target);
    speed = {.gbps = 1e-9 * t.bytes_per_second, .gflops = 1e-9 * t.flops_per_second};
  }
  const std::string text = args.format == "json"   ? made.json(rows, speed)
                           : args.format == "html" ? made.html(rows, speed)
                                                   : made.describe(rows, speed);
  if (args.output.empty())
    fmt::print("{}", text);
  else
    write_file("plan -o", args.output, text);
  return ok;
}

}  // namespace

extern const Command kPlanCommand{
    "plan", "what a chain of ops becomes: passes, bytes and memory", []() -> Bound {
      static PlanArgs args;
      args.command = "plan";
      return {chain_options(
                  args, {{"--gbps", &args.gbps,
                          "a bandwidth in GB/s for the floor of each pass; default: the target's"},
                         {"--tflops", &args.tflops, "a rate for products, part of the floor"},
                         {"--format", &args.format, "", {"text", "json", "html"}},
                         {"-o,--output", &args.output, "write to this file"}}),
              [] { return plan(args); }};
    }};

}  // namespace tenon::cli
