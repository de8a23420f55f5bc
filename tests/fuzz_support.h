// What seeded runs of the fuzzers share: choices, mutations, noise.
#pragma once

#include <array>
#include <cstdint>
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

// A few of its characters replaced, added, taken out or doubled; new ones are of `bytes`.
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

}  // namespace tenon::test
