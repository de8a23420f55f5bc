// Fuzzer of chain texts, for libFuzzer, or a seeded run with TENON_FUZZ_MAIN.
#include "tenon/chain.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fuzz/support.h"
#include "tenon/error.h"
#include "tenon/plan.h"

namespace {

using namespace tenon;

void check(bool holds, const char* what, std::string_view text) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_chain: %s: '%.*s'\n", what, static_cast<int>(text.size()),
               text.data());
  std::abort();
}

// Only tenon::Error may leave the library. Any other exception ends the process.
bool reads(std::string_view text, Chain& chain) {
  try {
    chain = parse_chain(text);
    return true;
  } catch (const Error& e) {
    check(std::string_view(e.what()).starts_with("chain: "), "a message of something else", text);
    return false;
  }
}

// Plans the chain for the null device and describes it, or gets an Error.
void through_plan(const Chain& chain) {
  constexpr size_t kMostOps = 16;  // more ops only take longer
  if (chain.size() > kMostOps) return;
  PlanRequest request;
  request.cols = 64;
  request.options.device = Device::null;
  try {
    const Plan plan = Plan::build(chain, request);
    plan.check_rows(24);
    for (const Buffer& b : plan.buffers())
      check(b.bytes(24) >= 0, "a negative size", print_chain(chain));
    check(!plan.describe(24).empty(), "no description", print_chain(chain));
  } catch (const Error&) {
  }
}

// A parsed chain can be printed, and the text parses to the same chain.
bool through_chain(std::string_view text) {
  Chain chain, back;
  if (!reads(text, chain)) return false;
  check(!chain.empty() && chain.size() <= kMaxChainOps, "a wrong number of ops", text);
  const std::string canonical = print_chain(chain);
  check(reads(canonical, back), "the canonical form is refused", text);
  check(back == chain, "the canonical form reads as something else", text);
  check(print_chain(back) == canonical, "the canonical form is not canonical", text);
  through_plan(chain);
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  through_chain({reinterpret_cast<const char*>(data), size});
  return 0;
}

namespace {

using namespace tenon::test;  // NOLINT: a test program

constexpr std::string_view kBytes = "ab().,:=<>+-\"\\# \n019eE_\0\xff";
constexpr std::array<const char*, 8> kNames{"linear", "bias", "swiglu", "add",
                                            "eps",    "_1",   "E5",     "rmsnorm"};
// Ops that are valid in a plan of 64 columns.
constexpr std::array<const char*, 14> kOps{
    "linear(64,64)", "bias",        "gelu",         "scale(0.5)",       "rmsnorm",
    "layernorm",     "l2norm",      "add",          "act(\"x*x\")",     "swiglu linear(32,64)",
    "quantize",      "dropout(.1)", "elu(alpha=2)", "make_extra_output"};
constexpr std::array<const char*, 14> kValues{
    "512",  "-0",   ".5",   "1e-5",    "+3.25E+7", "1e308",        "4.9e-324",
    "gelu", "true", "\"\"", "\"x*x\"", "\"#<\"",   "\"\\\"\\\\\"", "99999999999999999999"};
constexpr std::array<const char*, 6> kBlanks{"", "", " ", "\n", "\r\n\t", "# c\n"};

std::string item(Generator& r) {
  if (below(r, 2)) return pick(r, kOps);
  const auto blank = [&] { return pick(r, kBlanks); };
  std::string out = pick(r, kNames) + blank();
  if (below(r, 2)) {
    const size_t values = below(r, 4), named = below(r, 3);
    out += "(";
    for (size_t i = 0; i < values + named; ++i) {
      if (i > 0) out += "," + blank();
      if (i >= values) out += "p" + std::to_string(i) + blank() + "=" + blank();
      out += pick(r, kValues) + blank();
    }
    out += ")" + blank();
  }
  for (size_t n = below(r, 3); n > 0; --n)
    out += (below(r, 2) ? "<" : ">") + blank() + pick(r, kNames) + blank();
  if (below(r, 4) == 0) out += ":" + blank() + pick(r, kNames);
  return out;
}

std::string example(Generator& r) {
  std::string text = pick(r, kBlanks);
  for (size_t n = 1 + below(r, 5); n > 0; --n) text += item(r) + " ";
  const size_t kind = below(r, 10);
  if (kind == 0) return noise(r);
  return kind < 4 ? mutated(r, text, kBytes) : text;
}

}  // namespace

#if defined(TENON_FUZZ_MAIN)

int main(int argc, char** argv) { return seeded_run("chains", argc, argv, example, through_chain); }

#else

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  return mutate_or_make(data, size, most, seed, example);
}

#endif
