// Hashes of results in strict precision, to compare two versions bit by bit.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/view.h"

namespace tenon::test {

// FNV-1a over 64-bit words, with a shift that mixes the high bits into the low bits.
class Hash {
 public:
  void number(uint64_t n) {
    value_ = (value_ ^ n) * 0x100000001b3U;
    value_ ^= value_ >> 29;
  }
  void text(std::string_view t) {
    number(t.size());
    for (const char c : t) number(static_cast<uint8_t>(c));
  }
  // Hashes sizes, dtype and elements. All NaNs are replaced by the canonical NaN.
  void elements(const View& v) {
    text(info(v.dtype).name);
    number(static_cast<uint64_t>(v.rows));
    number(static_cast<uint64_t>(v.cols));
    visit(v.dtype, [&](auto tag) {
      using Code = Storage<tag()>;
      const auto* row = static_cast<const char*>(v.data);
      const auto stride = static_cast<size_t>(v.stride) * sizeof(Code);
      for (int64_t r = 0; r < v.rows; ++r, row += stride)
        for (int64_t c = 0; c < v.cols; ++c) {
          Code code = 0;
          std::memcpy(&code, row + static_cast<size_t>(c) * sizeof code, sizeof code);
          number(std::isnan(decode<tag()>(code)) ? info(tag()).nan : code);
        }
    });
  }
  [[nodiscard]] uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325U;
};

// splitmix64: the same numbers with every compiler and standard library.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t operator()() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return (*this)() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  template <class List>
  auto any(const List& list) {
    return list[below(std::size(list))];
  }

 private:
  uint64_t state_;
};

inline constexpr float kInfinity = __builtin_inff();
inline constexpr std::array kSpecials{
    kInfinity,  -kInfinity, __builtin_nanf(""), 0.0F,     -0.0F, 0x1p-149F,
    -0x1p-149F, 0x1p-127F,  0x1.fffffep127F,    65504.0F,
};

// Approximately normal around 0. Some values are small.
inline float ordinary(Draw& draw) {
  const uint64_t bits = draw();
  int64_t sum = -131070;
  for (int i = 0; i < 64; i += 16) sum += static_cast<int64_t>(bits >> i & 0xffff);
  const float v = static_cast<float>(sum) * 0x1p-15F;
  return bits % 8 ? v : v * power_of_two(-static_cast<int>(bits >> 3 & 15));
}
inline float sometimes_special(Draw& draw) {
  const float value = ordinary(draw);
  return draw.one_in(23) ? draw.any(kSpecials) : value;
}

// Fills a dense matrix.
template <class Number>
void fill(const View& v, Number number) {
  auto* at = static_cast<char*>(v.data);
  visit(v.dtype, [&](auto tag) {
    for (int64_t i = 0; i < v.rows * v.cols; ++i) {
      const auto code = static_cast<Storage<tag()>>(encode<tag()>(number()));
      std::memcpy(at, &code, sizeof code);
      at += sizeof code;
    }
  });
}

// Memory for a run: filled with a known pattern, with the alignment that kernels prefer.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes) + kAlignment, 0xA5),
        data_(bytes_.data() +
              (kAlignment - reinterpret_cast<uintptr_t>(bytes_.data()) % kAlignment)) {}
  [[nodiscard]] void* data() const { return data_; }

 private:
  static constexpr size_t kAlignment = 64;
  std::vector<uint8_t> bytes_;
  uint8_t* data_;
};

// Reports a case of a group: its name and its hash.
using Report =
    std::function<void(const std::string& group, const std::string& name, uint64_t hash)>;

// True for each n-th case.
class Sample {
 public:
  explicit Sample(uint64_t n) : n_(n) {}
  bool operator()() { return number_++ % n_ == 0; }

 private:
  uint64_t n_, number_ = 0;
};

void hash_conformance(const Report& report, Sample sample);
void hash_single_calls(const Report& report);
void hash_golden_chains(const Report& report);
void hash_random_chains(const Report& report, Sample sample);

}  // namespace tenon::test
