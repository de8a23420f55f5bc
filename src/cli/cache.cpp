// `tenon cache`: lists, removes or precompiles the kernels in the disk cache.
#include "backend/cuda/cache.h"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/makers.h"
#include "cli/chain_args.h"
#include "lower/data.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

using cuda::Cache;

struct WarmArgs : ChainArgs {
  std::string arch;
};

int list(const Cache& cache) {
  uint64_t total = 0;
  const std::vector<Cache::Entry> all = cache.entries();
  for (const Cache::Entry& e : all) {
    total += e.bytes;
    const auto used = static_cast<std::time_t>(e.used);
    fmt::print("{:%Y-%m-%d %H:%M}  {:>9}  {:<8}  {}\n", fmt::localtime(used), e.bytes,
               e.arch.empty() ? "-" : e.arch, e.name.empty() ? "(not a kernel of ours)" : e.name);
  }
  fmt::print("{} kernels, {} bytes in {}\n", all.size(), total, cache.folder().string());
  if (const std::string why = cache.why_off(); !why.empty()) fmt::print("off: {}\n", why);
  return ok;
}

// Compiles every step of both passes, and equal texts only once. Assumes that the machine that will
// run the kernels may have cuBLASLt.
int warm(Cache& cache, const WarmArgs& args) {
  if (const std::string why = cache.why_off(); !why.empty())
    fail(Code::runtime, "cache warm: nothing would be kept: ", why);
  require(args.target.empty(), "cache warm --target ", args.target,
          ": --arch says what kernels are compiled for; give --arch ", args.target);
  std::string arch = args.arch;
  if (arch.empty()) {
    const auto why = cuda::why_no_gpu();
    require(!why, "cache warm: ", why.value_or(""), "; give --arch, e.g. sm_90a");
    arch = cuda::device_info(0).arch();
  }
  ChainArgs chain = args;
  chain.device = "cuda";
  PlanRequest request = request_of(chain);
  if (is_target(arch)) request.target = arch;
  const Plan made = build(parse_chain(chain_text(chain)), request);
  std::set<std::string> texts;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : data_of(made).steps(pass)) {
      if (!s.chosen.kernel) continue;
      for (const std::string& text : s.chosen.kernel->texts())
        if (texts.insert(text).second) cuda::compile_once(text, arch, s.step.name);
    }
  const auto random = [](const Buffer& b) { return b.role == Role::rng; };
  if (std::ranges::any_of(made.buffers(), random)) {
    texts.insert(cuda::draw_text());
    cuda::compile_once(cuda::draw_text(), arch, "draw");
  }
  const auto kept = std::ranges::count_if(texts, [&](const std::string& text) {
    return cache.find({cuda::compiler_identity(), arch, text}).has_value();
  });
  fmt::print("{} kernels for {} in {}\n", kept, arch, cache.folder().string());
  if (static_cast<size_t>(kept) == texts.size()) return ok;
  const std::string why = cache.why_lost();
  fail(Code::runtime, "cache warm: ", texts.size() - static_cast<size_t>(kept), " of ",
       texts.size(), " kernels were not kept: ",
       why.empty() ? "others took their place; raise TENON_CACHE_MB" : why);
}

int clear(Cache& cache) {
  fmt::print("removed {} files\n", cache.clear());
  return ok;
}

constexpr Command kList{"list", "what is there, latest used first", []() -> Bound {
                          return {{}, [] { return list(Cache::shared()); }};
                        }};
constexpr Command kClear{"clear", "remove all", []() -> Bound {
                           return {{}, [] { return clear(Cache::shared()); }};
                         }};
constexpr Command kWarm{
    "warm", "compile the kernels of a chain ahead", []() -> Bound {
      static WarmArgs args;
      args.command = "warm";
      return {chain_options(
                  args, {{"--arch", &args.arch, "e.g. sm_90a; this machine's GPU unless given"}}),
              [] { return warm(Cache::shared(), args); }};
    }};

}  // namespace

extern const Command kCacheCommand{"cache", "the compiled CUDA kernels on disk", []() -> Bound {
                                     return {.parts = {kList, kClear, kWarm}};
                                   }};

}  // namespace tenon::cli
