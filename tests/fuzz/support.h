// Common code of the seeded runs of the fuzzers: choices, mutations, random bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>

namespace tenon::test {

using Generator = std::mt19937;

inline size_t below(Generator& r, size_t n) {
  return std::uniform_int_distribution<size_t>(0, n - 1)(r);
}

template <size_t n>
std::string pick(Generator& r, const std::array<const char*, n>& list) {
  return list[below(r, n)];
}

// Replaces, inserts, deletes or doubles a few characters. New characters are from `bytes`.
inline std::string mutated(Generator& r, std::string text, std::string_view bytes) {
  for (size_t n = 1 + below(r, 4); n > 0 && !text.empty(); --n) {
    const size_t at = below(r, text.size());
    const char c = bytes[below(r, bytes.size())];
    switch (below(r, 4)) {
      case 0:
        text[at] = c;
        break;
      case 1:
        text.insert(at, 1, c);
        break;
      case 2:
        text.erase(at, 1 + below(r, 3));
        break;
      default:
        text += text.substr(at);
        break;
    }
  }
  return text;
}

inline std::string noise(Generator& r) {
  std::string text(below(r, 64), ' ');
  for (char& c : text) c = static_cast<char>(below(r, 256));
  return text;
}

// A seeded run. Fails if too few inputs are valid.
template <class Example, class Through>
int seeded_run(const char* what, int argc, char** argv, Example example, Through through) {
  const long iterations = argc > 1 ? std::atol(argv[1]) : 20000;
  Generator random(argc > 2 ? static_cast<uint32_t>(std::atol(argv[2])) : 1);
  long valid = 0;
  for (long i = 0; i < iterations; ++i) valid += through(example(random)) ? 1 : 0;
  std::printf("%ld %s, %ld of them valid\n", iterations, what, valid);
  return valid * 4 > iterations ? 0 : 1;
}

}  // namespace tenon::test

#if !defined(TENON_FUZZ_MAIN)

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

namespace tenon::test {

// The mutations of libFuzzer, and sometimes a valid example, because mutations rarely make a valid
// header.
template <class Example>
size_t mutate_or_make(uint8_t* data, size_t size, size_t most, unsigned seed, Example example) {
  if (seed % 16 != 0) return LLVMFuzzerMutate(data, size, most);
  Generator random(seed);
  const std::string text = example(random);
  const size_t used = std::min(text.size(), most);
  std::copy_n(text.begin(), used, data);
  return used;
}

}  // namespace tenon::test

#endif
