// Hashes of texts: checksums, file names and fingerprints. Not for texts of an attacker's choice.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tenon {

inline constexpr uint64_t kHashStart = 0xcbf29ce484222325ULL;

// FNV-1a over 8-byte words. The remaining bytes form one word with their length. A multiplication
// moves information to higher bits only, so the halves of the state swap after each word.
inline uint64_t hash64(std::string_view text, uint64_t h = kHashStart) {
  constexpr size_t kWord = sizeof(uint64_t);
  const auto join = [&](uint64_t word) { h = std::rotl((h ^ word) * 0x100000001b3ULL, 32); };
  const auto word_at = [&](size_t at, size_t size) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, size);
    return word;
  };
  const size_t rest = text.size() % kWord;
  for (size_t at = 0; at + kWord <= text.size(); at += kWord) join(word_at(at, kWord));
  join(word_at(text.size() - rest, rest));
  join(text.size());
  return h;
}

// 32 hexadecimal digits, from two start values.
inline std::string hash128(std::string_view text) {
  constexpr uint64_t kSecond = 0x9ae16a3b2f90404fULL;
  std::string digits;
  for (const uint64_t h : {hash64(text), hash64(text, kSecond)})
    for (int shift = 60; shift >= 0; shift -= 4) digits += "0123456789abcdef"[h >> shift & 15];
  return digits;
}

}  // namespace tenon
