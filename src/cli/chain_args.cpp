// Reads chains and plan options from the command line.
#include "cli/chain_args.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "cli/tensor_file.h"
#include "ops/op.h"
#include "tenon/activation.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

// The command line parser has already checked the name.
template <class T, size_t n>
T named(const std::array<std::string_view, n>& names, const std::string& name) {
  return static_cast<T>(std::ranges::find(names, name) - names.begin());
}

}  // namespace

std::vector<Option> chain_options(ChainArgs& args, std::vector<Option> more) {
  std::vector<Option> all{
      {.name = "CHAIN",
       .value = &args.chain,
       .about = "e.g. \"linear(512,2048) bias swiglu linear(1024,512)\", or @FILE",
       .required = true},
      {.name = "--rows",
       .value = &args.rows,
       .about = "of the input",
       .default_text = std::to_string(ChainArgs::kRows)},
      {"--cols", &args.cols, "of the input, where the chain does not say"},
      {"--dtype", &args.dtype, "of the input and the parameters", {"f32", "f16", "bf16"}},
      {"--recipe", &args.recipe, "none, delayed, current, mxfp8 or block"},
      {"--backward", &args.backward, "the gradients too"},
      {"--eval", &args.eval, "evaluation: dropout does nothing"},
      {"--keep", &args.keep, "what an op keeps for its backward", {"input", "fp8", "recompute"}},
      {"--precision", &args.precision, "", {"native", "strict"}},
      {"--rounding", &args.rounding, "", {"once", "eager"}},
      {"--device", &args.device, "", {"cpu", "cuda", "null"}},
      {"--target", &args.target, "plan: a machine that need not be here, e.g. sm_90a, avx512"}};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::string chain_file(const ChainArgs& args) {
  return args.chain.starts_with('@') ? args.chain.substr(1) : "";
}

std::string chain_text(const ChainArgs& args) {
  if (!args.chain.starts_with('@')) return args.chain;
  const std::string path = chain_file(args);
  const std::string name = clean(path, 200);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  require(file != nullptr, args.command, " @", name, " cannot be opened: ", std::strerror(errno),
          "; give the path of a chain's text");
  // Reads one byte more than the limit, so that the parser rejects a chain that is too long.
  std::string text(kMaxChainBytes + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  require(std::ferror(file.get()) == 0, args.command, " @", name,
          " cannot be read: ", std::strerror(errno), "; give the path of a chain's text");
  return text;
}

PlanRequest request_of(const ChainArgs& args) {
  constexpr int64_t kMost = 1LL << 32;  // tensor sizes then stay far below 2^63
  const int64_t rows = args.rows.value_or(ChainArgs::kRows);
  require(rows >= 1 && rows <= kMost, args.command, " --rows ", rows, ": it must be from 1 to ",
          kMost);
  require(args.cols >= 0 && args.cols <= kMost, args.command, " --cols ", args.cols,
          ": it must be from 1 to ", kMost);
  PlanRequest r{.cols = args.cols,
                .recipe = recipe(args.recipe),
                .training = !args.eval,
                .backward = args.backward,
                .keep = named<Keep>(kKeeps, args.keep)};
  r.dtype = *dtype_named(args.dtype);
  r.options.precision = named<Precision>(kPrecisions, args.precision);
  r.options.rounding = named<Rounding>(kRoundings, args.rounding);
  r.options.device = named<Device>(kDevices, args.device);
  r.target = args.target;
  return r;
}

Plan build(const Chain& chain, const PlanRequest& request) {
  try {
    return Plan::build(chain, request);
  } catch (const Error& e) {
    if (std::ranges::all_of(chain, is_op, &Op::name)) throw;
    fail(e.code(), e.what(),
         "; an opaque op is a function of yours, so it runs from C++ or C, not from here");
  }
}

}  // namespace tenon::cli
