// The `tenon` command.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>

#include "cli/commands.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace {

// What every command with a chain takes.
void add_chain_options(CLI::App& app, tenon::cli::ChainArgs& args) {
  args.command = app.get_name();
  app.add_option("CHAIN", args.chain,
                 "e.g. \"linear(512,2048) bias swiglu linear(1024,512)\", or @FILE")
      ->required();
  app.add_option("--rows", args.rows, "of the input")
      ->default_str(std::to_string(tenon::cli::ChainArgs::kRows));
  app.add_option("--cols", args.cols, "of the input, where the chain does not say");
  app.add_option("--dtype", args.dtype, "of the input and the parameters")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  app.add_option("--recipe", args.recipe, "none, delayed, current, mxfp8 or block")
      ->capture_default_str();
  app.add_flag("--backward", args.backward, "the gradients too");
  app.add_flag("--eval", args.eval, "evaluation: dropout does nothing");
  app.add_option("--keep", args.keep, "what an op keeps for its backward")
      ->check(CLI::IsMember({"input", "fp8", "recompute"}))
      ->capture_default_str();
  app.add_option("--precision", args.precision)->check(CLI::IsMember({"native", "strict"}));
  app.add_option("--rounding", args.rounding)->check(CLI::IsMember({"once", "eager"}));
  app.add_option("--device", args.device)->check(CLI::IsMember({"cpu", "cuda", "null"}));
}

int command(int argc, char** argv) {
  using namespace tenon;  // NOLINT: the command is the library's
  CLI::App app{"Tenon: fused transformer operations on CPU and CUDA", "tenon"};
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 fine, 1 a check failed or the machine did, 2 wrong usage or input, "
      "3 no such device here.");
  app.set_version_flag("--version", version());

  bool json = false;
  auto* doctor = app.add_subcommand("doctor", "what this machine offers: CPU, threads, CUDA");
  doctor->add_flag("--json", json, "one JSON object");

  bool markdown = false;
  auto* list = app.add_subcommand("list", "every registered activation");
  list->add_flag("--markdown", markdown, "the page docs/activations.md");

  std::string text;
  bool backward = false;
  auto* show = app.add_subcommand("show", "formula, derivative, error bound and printed code");
  show->add_option("ACTIVATION", text,
                   "a name, gated(…), or a formula (after -- if it starts with a minus)")
      ->required();
  show->add_flag("--backward", backward, "print the code of the derivative");

  cli::CheckArgs args;
  auto* check = app.add_subcommand("check", "run the conformance cases against float64");
  check->add_option("SUBSTRING", args.substrings, "only cases that contain all of these");
  check->add_flag("--list", args.list, "print the cases, run nothing");
  check->add_option("--device", args.device)->check(CLI::IsMember({"cpu", "cuda"}));
  check->add_option("--precision", args.precision)->check(CLI::IsMember({"strict", "native"}));
  check->add_option("--every", args.every, "only each Nth of the cases")
      ->check(CLI::Range(1, 1000000));
  check
      ->add_option("--random", args.random,
                   "so many strict cases by chance, in place of the list; on cuda over at most "
                   "400 kernel texts")
      ->check(CLI::Range(0, 1000000));
  check->add_option("--seed", args.seed, "of those")->capture_default_str();

  cli::QuantizeArgs quantise;
  auto* quantize = app.add_subcommand(
      "quantize", "what a recipe does to the tensors of an .npy or .safetensors file");
  quantize->add_option("FILE", quantise.file)->required();
  quantize
      ->add_option("--recipe", quantise.recipe,
                   "[e4m3:|e5m2:]MODE; delayed, current, mxfp8, block1x128, block128x128, all; "
                   "several with commas")
      ->required();
  quantize->add_option("--tensor", quantise.tensor,
                       "the tensor of this name, or all whose names contain it");
  quantize->add_option("--eps", quantise.eps, "current, block: the least amax");
  quantize->add_option("--scale", quantise.scale,
                       "delayed: the multiplier (default: from the tensor's own amax, as a warm "
                       "history gives it)");
  quantize->add_flag("--exact-scales", quantise.exact_scales,
                     "block: scales need not be powers of two");
  quantize->add_flag("--columnwise", quantise.columnwise, "the columnwise encoding");
  quantize->add_flag("--json", quantise.json, "one JSON object a line, tensor and recipe");
  quantize->add_option("--svg", quantise.svg, "write a picture to this file");

  cli::PlanArgs planned;
  auto* plan = app.add_subcommand("plan", "what a chain of ops becomes: passes, bytes and memory");
  add_chain_options(*plan, planned);
  plan->add_option("--gbps", planned.gbps, "a bandwidth in GB/s: shows the floor of each pass");
  plan->add_option("--tflops", planned.tflops, "a rate for products, part of the floor");
  plan->add_option("--format", planned.format)
      ->check(CLI::IsMember({"text", "json", "html"}))
      ->capture_default_str();
  plan->add_option("-o,--output", planned.output, "write to this file");

  cli::ChainRunArgs ran;
  bool unchecked = false;
  auto* run = app.add_subcommand(
      "run", "run a chain of ops, check it against the unfused chain in float64, and time it");
  add_chain_options(*run, ran);
  run->add_option("--input", ran.input,
                  "tensors by the names that `tenon plan` shows: .safetensors, or an .npy with x; "
                  "all others are random");
  run->add_option("--output", ran.output, "write outputs and gradients to this .safetensors file");
  run->add_option("--seed", ran.seed, "of what is random")->capture_default_str();
  run->add_option("--repeat", ran.repeat, "how often it is timed; 0: not at all; on the cpu only")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  run->add_option("--tolerance", ran.tolerance,
                  "the relative error that is allowed, in place of what the formats allow");
  run->add_flag("--no-check", unchecked, "do not compare with float64");
  run->add_flag("--json", ran.json, "one JSON object");

  cli::CacheArgs cached;
  auto* cache = app.add_subcommand("cache", "the compiled CUDA kernels on disk");
  cache->require_subcommand(1);
  cache->add_subcommand("list", "what is there, latest used first");
  cache->add_subcommand("clear", "remove all");
  auto* warm = cache->add_subcommand("warm", "compile the kernels of a chain ahead");
  add_chain_options(*warm, cached);
  warm->add_option("--arch", cached.arch, "e.g. sm_90a; this machine's GPU unless given");

  cli::BenchArgs timed;
  bool no_costs = false;
  auto* bench = app.add_subcommand(
      "bench", "time kernels as shares of the fastest copy with the same reads and writes");
  bench->add_option("--device", timed.device)
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  bench->add_option("--cases", timed.cases, "default, or all: every activation in every format")
      ->check(CLI::IsMember({"default", "all"}))
      ->capture_default_str();
  std::vector<std::string> wanted;
  bench->add_option("SUBSTRING", wanted, "only cases with all of these words");
  bench->add_option("--filter", timed.filters,
                    "cases with all these words, e.g. \"gelu rowcol\"; several: any of them");
  bench->add_option("--rows", timed.rows, "16384 on cuda, 2048 on cpu");
  bench->add_option("--cols", timed.cols, "14336 on cuda, 4096 on cpu");
  bench->add_option("--shape", timed.shapes, "ROWSxCOLS in place of these; several are timed");
  bench->add_option("--dtype", timed.dtype, "of inputs and plain results")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  bench->add_option("--precision", timed.precision)
      ->check(CLI::IsMember({"native", "strict"}))
      ->capture_default_str();
  bench->add_option("--shots", timed.shots, "how often each case is timed")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  bench->add_flag("--json", timed.json, "one JSON object a case on stdout, in place of tables");
  bench->add_option("--save", timed.file, "write everything to this file, as JSON");
  bench->add_flag("--list", timed.list, "print the cases and their makers, run nothing");
  bench->add_flag("--compile-only", timed.compile_only,
                  "compile every kernel and print what it takes; needs no GPU");
  bench->add_option("--arch", timed.arch, "for --compile-only")->capture_default_str();
  bench->add_flag("--no-costs", no_costs, "leave out host and compile times");

  const auto known = [&](const std::string& name) {
    const auto all = app.get_subcommands([](const CLI::App*) { return true; });
    return std::ranges::any_of(all, [&](const CLI::App* c) { return c->get_name() == name; });
  };
  if (argc > 1 && argv[1][0] != '-' && !known(argv[1])) {
    std::fprintf(stderr, "tenon: there is no command '%s'; see tenon --help\n", argv[1]);
    return cli::usage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? cli::ok : cli::usage;
  }
  if (*doctor) return cli::doctor(json);
  if (*list) return cli::list(markdown);
  if (*show) return cli::show(text, backward);
  if (*check) return cli::check(args);
  if (*quantize) return cli::quantize(quantise);
  if (*plan) return cli::plan(planned);
  timed.costs = !no_costs && !timed.json;
  if (!wanted.empty()) timed.filters.push_back(CLI::detail::join(wanted, " "));
  if (*bench) return cli::bench(timed);
  if (*cache) {
    cached.action = cache->get_subcommands().front()->get_name();
    return cli::cache(cached);
  }
  ran.check = !unchecked;
  if (*run) return cli::run(ran);
  return cli::usage;
}

}  // namespace

int main(int argc, char** argv) {
  const auto unwritten = [](int error) {
    std::fprintf(stderr,
                 "tenon: the standard output could not be written: %s; make room or send it "
                 "elsewhere\n",
                 std::strerror(error));
    return tenon::cli::failed;
  };
  try {
    const int code = command(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    return unwritten(errno);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "tenon: %s: its tensors are too large for the memory of this machine; give fewer "
                 "--rows or --cols, smaller ops or a smaller file\n",
                 argc > 1 ? argv[1] : "");
    return tenon::cli::failed;
  } catch (const std::system_error& e) {  // fmt could not print
    return unwritten(e.code().value());
  } catch (const tenon::Error& e) {
    std::fprintf(stderr, "tenon: %s\n", e.what());
    return e.code() == tenon::Code::invalid_argument ? tenon::cli::usage : tenon::cli::failed;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tenon: %s\n", e.what());
    return tenon::cli::failed;
  }
}
