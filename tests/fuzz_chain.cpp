// Fuzzing of chain texts: for libFuzzer, or with TENON_FUZZ_MAIN a seeded run of its own.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fuzz_support.h"
#include "tenon/chain.h"
#include "tenon/error.h"

namespace {

using namespace tenon;

void check(bool holds, const char* what, std::string_view text) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_chain: %s: '%.*s'\n", what, static_cast<int>(text.size()),
               text.data());
  std::abort();
}

// Only tenon::Error may leave the library; anything else ends the process.
bool reads(std::string_view text, Chain& chain) {
  try {
    chain = parse_chain(text);
    return true;
  } catch (const Error& e) {
    check(std::string_view(e.what()).starts_with("chain: "), "a message of something else", text);
    return false;
  }
}

// What is read can be printed, and that reads as the same.
bool through_chain(std::string_view text) {
  Chain chain, back;
  if (!reads(text, chain)) return false;
  check(!chain.empty() && chain.size() <= kMaxChainOps, "a wrong number of ops", text);
  const std::string canonical = print_chain(chain);
  check(reads(canonical, back), "the canonical form is refused", text);
  check(back == chain, "the canonical form reads as something else", text);
  check(print_chain(back) == canonical, "the canonical form is not canonical", text);
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  through_chain({reinterpret_cast<const char*>(data), size});
  return 0;
}

#if defined(TENON_FUZZ_MAIN)

namespace {

using namespace tenon::test;  // NOLINT: a test program

constexpr std::string_view kBytes = "ab().,:=<>+-\"\\# \n019eE_\0\xff";
constexpr std::array<const char*, 8> kNames{"linear", "bias", "swiglu", "add",
                                            "eps",    "_1",   "E5",     "rmsnorm"};
constexpr std::array<const char*, 14> kValues{
    "512",  "-0",   ".5",   "1e-5",    "+3.25E+7", "1e308",        "4.9e-324",
    "gelu", "true", "\"\"", "\"x*x\"", "\"#<\"",   "\"\\\"\\\\\"", "99999999999999999999"};
constexpr std::array<const char*, 6> kBlanks{"", "", " ", "\n", "\r\n\t", "# c\n"};

std::string item(Generator& r) {
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

int main(int argc, char** argv) {
  const long iterations = argc > 1 ? std::atol(argv[1]) : 100000;
  Generator random(argc > 2 ? static_cast<uint32_t>(std::atol(argv[2])) : 1);
  long read = 0;
  for (long i = 0; i < iterations; ++i) read += through_chain(example(random));
  std::printf("%ld chains, %ld of them valid\n", iterations, read);
  // A generator that makes nothing valid would test nothing.
  return read * 4 > iterations ? 0 : 1;
}

#endif
